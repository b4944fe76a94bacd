"""What converting a checkpoint amounts to: the GGUF's metadata and, for each of its tensors, what it is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .draft_layers import DraftLayers
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
    last_rows        rows of the last source, where it may have fewer than the others; 0: as many
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    transform: Transform = unchanged
    fallback_source: str | None = None
    alternative: TensorSpec | None = None
    is_optional: bool = False
    last_rows: int = 0

    def source_shape(self, number: int) -> tuple[int, ...]:
        """That the source of this number must have."""
        return (self.last_rows, *self.shape[1:]) if self.last_rows and number == len(self.sources) - 1 else self.shape


@dataclass(frozen=True)
class ModelSpec:
    """What an architecture's module makes of a config.json.

    architecture      general.architecture
    metadata          GGUF keys -> values, without general.* and tokenizer.*
    tensors           in file order
    vocab_size        rows of the embedding, which the vocabulary must have
    skipped_prefixes  prefix of tensor names that have no counterpart in a GGUF -> what these are, for the user
    notes             for the user, one line each
    renamed_prefixes  prefix of tensor names -> its replacement, applied first: text models inside multimodal checkpoints
    stored_values     metadata key -> names of tensors of one number each, whose numbers are the key's array of float32
    stored_integers   metadata key -> name of a tensor of whole numbers, which are the key's array of uint64
    draft             layers that predict further tokens, which the checkpoint may have
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: list[TensorSpec]
    vocab_size: int
    skipped_prefixes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    renamed_prefixes: dict[str, str] = field(default_factory=dict)
    stored_values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stored_integers: dict[str, str] = field(default_factory=dict)
    draft: DraftLayers | None = None
