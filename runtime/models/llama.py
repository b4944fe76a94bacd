"""Llama and the many architectures built like it: grouped-query attention, gated feed-forward block or experts.

What a model has, its tensors say: biases, norms of each head, norms after a block, experts, a shared expert and its gate are
used where they are there. Sizes, windows, scales and soft caps are in the metadata. The rest is known by an architecture's name
and stands in `variants.VARIANTS`: a new architecture of this kind is a line there.
"""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..graph.values import RotaryEmbedding
from ..hparams import HParams, n_draft_layers, n_layers
from .attention import BlockIndexer, Heads, grouped_attention, temperature_of
from .draft import draft_input, finish_draft
from .feed_forward import FeedForward, feed_forward
from .rotary import frequency_factors, plain_frequencies, rotary_embedding, rotated_dims
from .variants import VARIANTS, Variant

NO_CAP = 1e6  # what is capped so high changes by less than float32 rounds it


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None, draft: int | None = None) -> Graph:
    """The model's graph, or that of the draft layer with this number.

    Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    variant = VARIANTS[hparams.architecture]
    hparams = hparams.with_defaults(variant.defaults)
    graph, heads, n_embd = GraphBuilder(source), Heads.of(hparams), hparams.size("embedding_length")
    has_layer_epsilon = "attention.layer_norm_epsilon" in hparams
    norm_kind = variant.norm or ("layer" if has_layer_epsilon else "rms")
    epsilon = hparams.float(f"attention.layer_norm_{'' if has_layer_epsilon else 'rms_'}epsilon")
    scale = hparams.float("attention.scale", 0.0) or variant.attention_scale(hparams, heads.k_width)
    softcap = _soft_cap(hparams, "attn_logit_softcapping")
    residual_scale = hparams.float("residual_scale", 0.0) or 1.0
    temperature, value_scale = (
        temperature_of(hparams, variant.temperature_offset or 0),
        hparams.float("attention.value_scale", 0.0) or 1.0,
    )
    windows = _windows(hparams, variant, n_layers(hparams) if draft is None else draft + 1)
    has_windows = hparams.size("attention.sliding_window", 0, 0) > 0
    clamp, blocks = hparams.float("attention.clamp_kqv", 0.0), BlockIndexer.of(hparams)
    alibi, causal = variant.alibi(hparams), hparams.flag("attention.causal", variant.has_head)
    ungated = hparams.text("hidden_activation", variant.ungated)
    block = FeedForward(variant.activation, ungated, variant.gating, variant.shared_average, variant.weigh_inputs)
    rope, local_rope = _rotary_embeddings(graph, hparams, variant, heads.k_width, n_ctx)

    def norm(x: Value, name: str, epsilon: float = epsilon) -> Value:
        if not variant.norm_weights:
            return graph.plain_norm(x, epsilon, norm_kind)
        return graph.norm(x, name, epsilon, kind=norm_kind)

    def optional_norm(x: Value, name: str, epsilon: float = epsilon) -> Value:
        return norm(x, name, epsilon) if f"{name}.weight" in graph else x

    post_epsilon = epsilon if variant.post_epsilon is None else variant.post_epsilon

    logit_scale = hparams.float("logit_scale", 0.0) or 1.0
    head_scale = 1 / logit_scale if variant.divide_logits else logit_scale
    head_softcap = _soft_cap(hparams, "final_logit_softcapping")
    embedding_scale = hparams.float("embedding_scale", 0.0) or variant.embedding_scale(n_embd)

    def decoder_layer(x: Value, layer: int, window: int) -> Value:
        prefix, rotates = f"blk.{layer}.", not alibi and variant.rotates(hparams, layer, window > 0, has_windows)
        first_norm = norm if variant.has_head or layer else optional_norm
        h = first_norm(x, f"{prefix}attn_norm") if variant.pre_norm else x
        parallel = variant.is_parallel(hparams, f"{prefix}ffn_norm.weight" in graph)
        attended = grouped_attention(
            graph,
            norm(x, f"{prefix}attn_norm_2") if f"{prefix}attn_norm_2.weight" in graph else h,
            layer,
            Heads.of(hparams, layer),
            scale=scale,
            epsilon=epsilon,
            rope=None if not rotates else local_rope if window else rope,
            norm_after_rope=variant.norm_after_rope,
            window=window,
            softcap=softcap,
            temperature=None if rotates and variant.temperature_offset is not None else temperature,
            chunked=variant.chunked and window > 0,
            alibi=alibi,
            causal=causal,
            plain_head_norms=rotates and variant.head_norms(hparams),
            clamp=clamp,
            gate_function=variant.attention_gate,
            blocks=blocks,
        )
        attended = graph.scale(attended, value_scale)
        if variant.ffn_norm != "post_attention_norm":
            attended = optional_norm(attended, f"{prefix}post_attention_norm", post_epsilon)
        before, x = x, graph.add(x, attended, residual_scale)
        if not parallel:
            h = norm(x, prefix + variant.ffn_norm) if variant.pre_norm else x
        elif variant.parallel is None:
            h = norm(before, f"{prefix}ffn_norm")
        fed_forward = feed_forward(graph, hparams, layer, h, block)
        return graph.add(x, optional_norm(fed_forward, f"{prefix}post_ffw_norm", post_epsilon), residual_scale)

    if draft is not None:
        x = decoder_layer(draft_input(graph, draft, n_embd, epsilon, embedding_scale), draft, windows[draft])
        options = {"unnormed": variant.drafts_unnormed, "chained": variant.drafts_chained}
        return finish_draft(graph, hparams, draft, x, epsilon, scale=head_scale, softcap=head_softcap, **options)
    x = graph.embedding("token_embd", n_embd, embedding_scale)
    if "position_embd.weight" in graph:
        x = graph.add(x, graph.embedding("position_embd", n_embd, by="position"))
    x = graph.plain_norm(x, epsilon, norm_kind) if variant.embedding_norm else optional_norm(x, "token_embd_norm")
    for layer, window in enumerate(windows):
        x = decoder_layer(x, layer, window)
        graph.end_layer(x)
    n_ctx_train = hparams.size("context_length")
    if variant.drafts_unnormed and n_draft_layers(hparams):
        options = {"scale": head_scale, "softcap": head_softcap, "head_norm": lambda x: norm(x, "output_norm")}
        return graph.finish(hparams.architecture, x, n_ctx_train, **options)
    hidden = norm(x, "output_norm")
    if not variant.has_head or "pooling_type" in hparams:
        return graph.finish_encoder(hparams.architecture, hidden, n_ctx_train)
    return graph.finish(hparams.architecture, hidden, n_ctx_train, scale=head_scale, softcap=head_softcap)


def _soft_cap(hparams: HParams, key: str) -> float:
    """0: none. So large a cap says that there is none, to readers that would put in their own."""
    cap = hparams.float(key, 0.0)
    return cap if cap < NO_CAP else 0.0


def _windows(hparams: HParams, variant: Variant, layers: int) -> list[int]:
    """The window of each of the first layers; 0: it sees everything."""
    window = hparams.size("attention.sliding_window", 0, 0)
    if variant.first_global:
        period = hparams.size("attention.sliding_window_pattern", minimum=0)
        return [window if period == 0 or i % period else 0 for i in range(layers)]
    is_local = hparams.flags("attention.sliding_window_pattern", layers) or [True] * layers
    return [window if local else 0 for local in is_local]


def _rotary_embeddings(
    graph: GraphBuilder, hparams: HParams, variant: Variant, width: int, n_ctx: int | None
) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    """Of layers without a window, and of those with one."""
    stored = rotated_dims(hparams, width)
    dims = stored // 2 if variant.half_rope else stored
    rope = rotary_embedding(hparams, dims, variant.interleaved, frequency_factors(graph, hparams, dims, n_ctx, stored))
    if not variant.local_rope:
        return rope, rope
    local_dims = hparams.size("rope.dimension_count_swa", stored, 2, width)
    base = hparams.positive("rope.freq_base_swa", hparams.float("rope.freq_base", 10000.0))
    frequencies = plain_frequencies(base, local_dims)
    return rope, RotaryEmbedding(frequencies, interleaved=variant.interleaved)
