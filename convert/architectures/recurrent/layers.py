"""Which layers are recurrent, from config.json; per-layer metadata of models that mix them with attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..decoder_spec import DecoderSpec

ATTENTION = ("full_attention", "attention")
LINEAR = ("linear_attention", "mamba", "conv")


def attention_layers(spec: DecoderSpec, types: object) -> list[bool]:
    """For each layer whether it is attention, from a list of types such as layer_types. Raises FormatError for others."""
    known = dict.fromkeys(ATTENTION, True) | dict.fromkeys(LINEAR, False)
    if not isinstance(types, list) or len(types) != spec.n_layers or any(str(t) not in known for t in types):
        raise spec.config.error(f"layer_types is {types!r:.80}; one of {', '.join(known)} is needed for each layer")
    return [known[t] for t in types]


def add_key_value_heads(spec: DecoderSpec, is_attention: Sequence[bool], heads: int | None = None) -> None:
    """attention.head_count_kv for each layer; 0 says that it is recurrent, which is how llama.cpp knows."""
    counts = [heads or spec.n_kv_heads if each else 0 for each in is_attention]
    spec.metadata[f"{spec.architecture}.attention.head_count_kv"] = np.array(counts, np.uint32)
