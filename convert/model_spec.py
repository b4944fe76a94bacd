"""What converting a checkpoint amounts to: the GGUF's metadata and, for each of its tensors, what it is made from."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ..data_classes import dataclass
from .tensor_spec import DraftLayers, TensorSpec


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
