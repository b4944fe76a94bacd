"""Graphs of Llama and of the many architectures built like it: grouped-query attention, gated feed-forward or experts.

What a model has, its tensors say: biases, norms of each head, norms behind a block, experts, a shared expert and its gate are
used where they are there. Sizes, windows, scales and soft caps are in the metadata. The rest is known by the architecture's
name and stands in VARIATIONS: a new architecture of this kind is a line there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...formats import FormatError
from ..backends.cpu.attention import Span
from ..backends.cpu.blocks import feed_forward
from ..backends.cpu.decoder import Block, Decoder, Settings, embedding_and_head
from ..backends.cpu.feedforward import Activation, clamped_swish_times, gelu_times, silu_times, squared_relu_times
from ..backends.cpu.grouped import GroupedAttention, Heads, cached_parts
from ..backends.cpu.kv_cache import KVCache
from ..backends.cpu.moe import SIGMOID
from ..backends.cpu.norms import Norm, norm_from
from ..backends.cpu.rope import Rope, frequency_factors, rope_from, rotated_dims
from ..backends.cpu.weights import WeightStore
from ..hparams import MAX_LAYERS, HParams


def _published_scale(layers: int) -> Callable[[HParams, int], float]:
    """Gemma's biggest models divide scores by the root of n_embd / n_head, not of a head's size; only their depth says so."""

    def scale(hparams: HParams, width: int) -> float:
        is_biggest = hparams.int("block_count") == layers
        return (hparams.int("embedding_length") / hparams.int("attention.head_count") if is_biggest else width) ** -0.5

    return scale


@dataclass(frozen=True)
class Variation:
    """What readers of an architecture take for granted.

    pairs         rotary embedding turns neighbouring elements (0, 1), (2, 3), ...; else (0, d/2), (1, d/2 + 1), ...
    keys          values of metadata keys where a file lacks them
    local_rope    layers with a window rotate by rope.freq_base_swa, without scaling
    activation    of a gate, and its product with what it lets through
    embedding     n_embd -> factor of the embeddings
    scale         width of a head -> factor of the attention's scores, where the metadata does not say
    ffn_norm      name of the norm in front of the feed-forward block; post_attention_norm is behind the attention otherwise
    late_norms    queries and keys are normalised after their rotation instead of before
    early_norms   there are norms in front of both blocks; else only behind them
    parallel      both blocks see the same input, normalised once (attn_norm)
    ungated       activation of a feed-forward block without a gate
    rotated       (number of a layer, whether it has a window, whether any has) -> whether it rotates queries and keys
    divides       logits are divided by logit_scale instead of multiplied
    """

    pairs: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    local_rope: bool = False
    activation: Activation = silu_times
    embedding: Callable[[int], float] = lambda n_embd: 1.0
    scale: Callable[[HParams, int], float] = lambda hparams, width: width**-0.5
    ffn_norm: str = "ffn_norm"
    late_norms: bool = False
    early_norms: bool = True
    parallel: bool = False
    ungated: Activation = gelu_times
    rotated: Callable[[int, bool, bool], bool] = lambda layer, local, windows: True
    divides: bool = False


def _only_local(layer: int, local: bool, windows: bool) -> bool:
    """Layers that see everything have no positions (Cohere 2, EXAONE 4), in a model that has others."""
    return local or not windows


def _three_of_four(layer: int, local: bool, windows: bool) -> bool:
    return (layer + 1) % 4 != 0


NORMALISED = {"expert_weights_norm": True}
GEMMA2 = {"attention.sliding_window": 4096, "attention.sliding_window_pattern": 2}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10000.0}
COHERE2 = EXAONE4 = {"attention.sliding_window_pattern": 4}
GPT_OSS = NORMALISED | {"attention.sliding_window_pattern": 2, "rope.scaling.yarn_truncate": False}

# general.architecture -> how it differs
VARIATIONS = {
    "llama": Variation(pairs=True, keys=NORMALISED),
    "qwen2": Variation(),
    "qwen2moe": Variation(),
    "qwen3": Variation(),
    "qwen3moe": Variation(keys=NORMALISED),
    "gemma2": Variation(keys=GEMMA2, activation=gelu_times, embedding=math.sqrt, scale=_published_scale(46)),
    "gemma3": Variation(keys=GEMMA3, activation=gelu_times, embedding=math.sqrt, scale=_published_scale(62), local_rope=True),
    "glm4moe": Variation(keys={"expert_gating_func": SIGMOID}, ffn_norm="post_attention_norm"),
    "gpt-oss": Variation(keys=GPT_OSS, activation=clamped_swish_times, ffn_norm="post_attention_norm"),
    "ernie4_5": Variation(pairs=True),
    "ernie4_5-moe": Variation(pairs=True, keys=NORMALISED),
    "hunyuan-dense": Variation(late_norms=True),
    "hunyuan-moe": Variation(late_norms=True, keys=NORMALISED),
    "phi3": Variation(),
    "starcoder2": Variation(),
    "command-r": Variation(pairs=True, parallel=True),
    "cohere2": Variation(pairs=True, parallel=True, keys=COHERE2, rotated=_only_local),
    "olmo2": Variation(early_norms=False),
    "granite": Variation(pairs=True, divides=True),
    "minimax-m2": Variation(keys=NORMALISED),
    "exaone": Variation(),
    "exaone4": Variation(early_norms=False, keys=EXAONE4, rotated=_only_local),
    "nemotron": Variation(ungated=squared_relu_times),
    "smollm3": Variation(pairs=True, rotated=_three_of_four),
    "seed_oss": Variation(ffn_norm="post_attention_norm"),
    "bailingmoe": Variation(pairs=True),
    "dots1": Variation(keys={"expert_gating_func": SIGMOID}),
}


def build(store: WeightStore, hparams: HParams, settings: Settings) -> Decoder:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape."""
    variation = VARIATIONS[hparams.architecture]
    hparams = hparams.with_defaults(variation.keys)
    n_embd, n_head = hparams.size("embedding_length"), hparams.size("attention.head_count")
    n_kv = hparams.size("attention.head_count_kv", n_head)
    if n_head % n_kv:
        raise FormatError(f"{hparams.path}: {n_head} heads cannot share {n_kv} keys and values evenly")
    epsilon = hparams.float(f"attention.layer_norm_{'' if 'attention.layer_norm_epsilon' in hparams else 'rms_'}epsilon")
    k_width = hparams.size("attention.key_length", n_embd // n_head)
    v_width = hparams.size("attention.value_length", n_embd // n_head)
    heads = Heads(n_head, n_kv, k_width, v_width)
    everywhere, local = _ropes(store, hparams, variation, k_width, settings.n_ctx)
    spans = _spans(store, hparams, variation, heads)

    def needed(name: str) -> Norm:
        return norm_from(store, hparams, name, n_embd)

    def norm(name: str) -> Norm | None:
        return needed(name) if f"{name}.weight" in store else None

    def rope(layer: int, span: Span) -> Rope | None:
        if not variation.rotated(layer, span.window > 0, any(s.window for s in spans)):
            return None
        return local if span.window else everywhere

    before = [(None, None)] * len(spans)
    if variation.early_norms:
        names = ["attn_norm", "attn_norm" if variation.parallel else variation.ffn_norm]
        before = [tuple(needed(f"blk.{i}.{name}") for name in names) for i in range(len(spans))]
    blocks = [
        Block(
            before[i][0],
            GroupedAttention(store, i, n_embd, heads, rope(i, span), span, epsilon, variation.late_norms),
            before[i][1],
            feed_forward(store, hparams, i, variation.activation, variation.ungated),
            None if variation.ffn_norm == "post_attention_norm" else norm(f"blk.{i}.post_attention_norm"),
            norm(f"blk.{i}.post_ffw_norm"),
            scale=hparams.float("residual_scale", 0.0) or 1.0,
            parallel=variation.parallel,
        )
        for i, span in enumerate(spans)
    ]
    embedding, head = embedding_and_head(store, n_embd)

    logit_scale = hparams.float("logit_scale", 0.0) or 1.0
    parts = cached_parts(heads, settings)

    def new_cache(limit: int) -> KVCache:
        return KVCache(len(blocks), parts, limit)

    return Decoder(
        store,
        embedding,
        blocks,
        needed("output_norm"),
        head,
        hparams.size("context_length"),
        new_cache,
        settings,
        embedding_scale=hparams.float("embedding_scale", 0.0) or variation.embedding(n_embd),
        logit_scale=1 / logit_scale if variation.divides else logit_scale,
        logit_softcap=hparams.float("final_logit_softcapping", 0.0),
    )


def _ropes(store: WeightStore, hparams: HParams, variation: Variation, k_width: int, n_ctx: int | None) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of those with a window."""
    dims = rotated_dims(hparams, k_width)
    factors = frequency_factors(store, hparams, dims, n_ctx)
    everywhere = rope_from(hparams, dims, variation.pairs, factors)
    if not variation.local_rope:
        return everywhere, everywhere
    return everywhere, Rope.plain(hparams.positive("rope.freq_base_swa"), dims, variation.pairs)


def _spans(store: WeightStore, hparams: HParams, variation: Variation, heads: Heads) -> list[Span]:
    """What each layer sees. Layers behind these, for the prediction of several tokens at once, are not run."""
    blocks = hparams.size("block_count", maximum=MAX_LAYERS)
    layers = blocks - hparams.size("nextn_predict_layers", 0, 0, blocks - 1)
    window = hparams.size("attention.sliding_window", 0, 0)
    is_local = hparams.flags("attention.sliding_window_pattern", layers) or [True] * layers
    scale = hparams.float("attention.scale", 0.0) or variation.scale(hparams, heads.k_width)
    softcap = hparams.float("attn_logit_softcapping", 0.0)
    sinks = [f"blk.{i}.attn_sinks.weight" for i in range(layers)]
    return [
        Span(scale, window if local else 0, softcap, store.vector(name, heads.n) if name in store else None)
        for local, name in zip(is_local, sinks, strict=True)
    ]
