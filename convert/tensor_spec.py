"""What the tensors of a GGUF are made from, those of draft layers too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from ..data_classes import dataclass
from .tensor_transforms import Transform, unchanged


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the GGUF.

    name             in the GGUF
    sources          names of the checkpoint's tensors that it is made from; empty for a computed tensor
    shape            that each source must have, outermost dimension first
    transform        makes the tensor from the sources' weights
    fallback_source  taken if the only source is missing: tied embeddings may be stored under either name
    alternative      the same tensor from other sources, used if none of these exists or they have another shape: experts one by
                     one, in a stack, or in a stack of transposed matrices
    is_optional      the GGUF lacks the tensor if none of its sources exists
    last_shape       of the last source, where it is another one
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    transform: Transform = unchanged
    fallback_source: str | None = None
    alternative: TensorSpec | None = None
    is_optional: bool = False
    last_shape: tuple[int, ...] | None = None

    def source_shape(self, number: int) -> tuple[int, ...]:
        """That the source of this number must have."""
        return self.last_shape if self.last_shape and number == len(self.sources) - 1 else self.shape


@dataclass(frozen=True)
class DraftLayer:
    """A draft layer (draft_layers.py).

    prefix    of its own tensors in the checkpoint
    tensors   all that it needs
    optional  tensors that a checkpoint may lack: embeddings and output of its own, an indexer
    """

    prefix: str
    tensors: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class DraftLayers:
    """The draft layers that a config.json describes; which of them the checkpoint has, its tensors say.

    layers    in order
    prefixes  of the names of all their tensors in the checkpoint
    metadata  keys that differ from those of the model without them: a value for each layer, the model's and these
    refused_by  a program that does not load files of this architecture with them: it ends at tensors that it does not know
    default   whether they are kept where nothing is said: not in a layout that is for that program only
    """

    layers: tuple[DraftLayer, ...]
    prefixes: tuple[str, ...]
    metadata: Mapping[str, np.ndarray] = field(default_factory=dict)
    refused_by: str = ""
    default: bool = True
