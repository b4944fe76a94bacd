"""What the metadata say about each layer of an architecture with recurrent layers: which are recurrent, and what they keep."""

from __future__ import annotations

from ...hparams import HParams
from ..delta_net import DELTA_NET_ARCHITECTURES, DeltaHeads, recurrent_layers
from .kimi_delta import KimiDeltaHeads
from .state_space import StateSpace
from .variants import RECURRENT_VARIANTS


def layer_states(hparams: HParams, layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a layer keeps per sequence, whatever its length; {} if nothing."""
    architecture = hparams.architecture
    if architecture in DELTA_NET_ARCHITECTURES:
        return DeltaHeads.of(hparams).states if any(recurrent_layers(hparams)[layer : layer + 1]) else {}
    if architecture == "qwen4exp":
        from .. import qwen4exp  # with its graph, which no other architecture needs here

        return qwen4exp.layer_states(hparams, layer, any(recurrent_layers(hparams)[layer : layer + 1]))
    if architecture == "openpangu":
        from .. import openpangu

        return openpangu.layer_states(hparams)
    variant = RECURRENT_VARIANTS.get(architecture)
    if variant is None or not (variant.both or _is_recurrent(hparams, layer)):
        return {}
    if "shortconv.l_cache" in hparams:
        return {"convolution": (hparams.size("shortconv.l_cache") - 1, hparams.size("embedding_length"))}
    if "kda.head_dim" in hparams:
        return KimiDeltaHeads.of(hparams).states
    return StateSpace.of(hparams, has_heads=variant.has_heads).states


def keeps_rows(hparams: HParams, layer: int) -> bool:
    """Whether a layer keeps something of each token: keys and values, or latents."""
    variant = RECURRENT_VARIANTS.get(hparams.architecture)
    if hparams.architecture == "openpangu":
        return True
    if hparams.architecture == "qwen4exp":
        return "delta" not in layer_states(hparams, layer)
    if variant is None:
        return not layer_states(hparams, layer)
    return variant.both or hparams.of_layer("attention.head_count_kv", layer, 0, 0) > 0


def _is_recurrent(hparams: HParams, layer: int) -> bool:
    """Layers without keys and values are, but for feed-forward blocks that are layers of their own (Nemotron-H)."""
    if hparams.of_layer("attention.head_count_kv", layer, 0, 0):
        return False
    is_block = hparams.architecture.startswith("nemotron_h") and hparams.of_layer("feed_forward_length", layer, 0, 0) > 0
    return not is_block
