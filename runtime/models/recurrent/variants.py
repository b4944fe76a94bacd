"""How architectures with recurrent layers differ, beyond what their tensors and metadata say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ....data_classes import dataclass
from ..feed_forward import SIGMOID
from ..variants import NORMALISED, SIGMOID_ROUTER


@dataclass(frozen=True)
class RecurrentVariant:
    """What an architecture's readers know by its name.

    rotates        queries and keys of attention layers are rotated, unless rope.scaling.finetuned is false
    interleaved    rotary embedding pairs neighbouring elements
    activation     of a gate, as in `variants.Variant`, or 'situ': see `feed_forward`
    ungated        activation of a feed-forward block without a gate
    output_norm    name of the last norm
    divide_logits  logits are divided by logit_scale instead of multiplied
    has_heads      state space layers are those of Mamba-2, else of Mamba
    both           each layer has attention beside its recurrent part
    defaults       values of metadata keys that a file lacks
    """

    rotates: bool = False
    interleaved: bool = False
    activation: str = "silu"
    ungated: str = "squared_relu"
    output_norm: str = "output_norm"
    divide_logits: bool = False
    has_heads: bool = True
    both: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


RECURRENT_VARIANTS = {
    "lfm2": RecurrentVariant(rotates=True, output_norm="token_embd_norm"),
    "lfm2moe": RecurrentVariant(rotates=True, output_norm="token_embd_norm", defaults=NORMALISED | SIGMOID_ROUTER),
    "mamba": RecurrentVariant(has_heads=False),
    "mamba2": RecurrentVariant(),
    "jamba": RecurrentVariant(has_heads=False),
    "granitehybrid": RecurrentVariant(rotates=True, interleaved=True, divide_logits=True, defaults=NORMALISED),
    "nemotron_h": RecurrentVariant(),
    "nemotron_h_moe": RecurrentVariant(defaults={"expert_gating_func": SIGMOID}),
    "falcon-h1": RecurrentVariant(rotates=True, both=True),
    "kimi-linear": RecurrentVariant(defaults=NORMALISED | SIGMOID_ROUTER),
    "kimi-k3": RecurrentVariant(activation="situ", defaults=NORMALISED | SIGMOID_ROUTER),
    "bailingmoe3": RecurrentVariant(
        rotates=True, interleaved=True, activation="clamped_silu", defaults=NORMALISED | SIGMOID_ROUTER
    ),
}
