"""Gemma 4: local and global layers with heads of different widths, embeddings per layer, keys and values shared by layers,
experts beside the dense block."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value, ops
from ..graph.values import RotaryEmbedding
from ..hparams import HParams, n_layers
from .feed_forward import FeedForward, dense_block, routed_experts
from .rotary import frequency_factors, plain_frequencies

ACTIVATION = "gelu"


OWN_LAYERS = 20  # of Gemma 3n with keys and values of their own, where the metadata does not say


def own_layers(hparams: HParams) -> int:
    """How many layers, the first ones, have keys and values of their own; the others use those of the last of them that sees as
    far."""
    count = n_layers(hparams)
    shared = max(0, count - OWN_LAYERS) if hparams.architecture == "gemma3n" else 0
    return count - hparams.size("attention.shared_kv_layers", shared, 0, count - 1)


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    graph, n_embd, count = GraphBuilder(source), hparams.size("embedding_length"), n_layers(hparams)
    epsilon = hparams.float("attention.layer_norm_rms_epsilon")
    is_local = hparams.flags("attention.sliding_window_pattern", count) or [True] * count
    own = own_layers(hparams)
    window = hparams.size("attention.sliding_window")
    width, local_width = hparams.size("attention.key_length"), hparams.size("attention.key_length_swa")
    frequencies = plain_frequencies(hparams.positive("rope.freq_base", 1e6), width)
    factors = frequency_factors(graph, hparams, width, n_ctx)
    rope = RotaryEmbedding(frequencies if factors is None else frequencies / factors)
    local_rope = RotaryEmbedding(plain_frequencies(hparams.positive("rope.freq_base_swa", 10000.0), local_width))

    x = graph.embedding("token_embd", n_embd, n_embd**0.5)
    per_layer = inputs_per_layer(graph, hparams, x, count, epsilon)
    for layer in range(count):
        prefix, local = f"blk.{layer}.", is_local[layer]
        h = graph.norm(x, f"{prefix}attn_norm", epsilon)
        attended = attention(
            graph,
            hparams,
            h,
            layer,
            # The last layer of the same kind that has keys and values of its own.
            next(i for i in range(min(layer, own - 1), -1, -1) if is_local[i] == local),
            width=local_width if local else width,
            rope=local_rope if local else rope,
            window=window if local else 0,
            epsilon=epsilon,
        )
        x = graph.add(x, graph.norm(attended, f"{prefix}post_attention_norm", epsilon))
        fed_forward = _feed_forward(graph, hparams, layer, x, epsilon)
        x = graph.add(x, graph.norm(fed_forward, f"{prefix}post_ffw_norm", epsilon))
        if per_layer:
            gate = graph.linear(x, f"{prefix}inp_gate", per_layer[layer].shape[0])
            projected = graph.linear(graph.gated(gate, per_layer[layer], ACTIVATION), f"{prefix}proj", n_embd)
            x = graph.add(x, graph.norm(projected, f"{prefix}post_norm", epsilon))
        if f"{prefix}layer_output_scale.weight" in graph:
            x = graph.scale(x, float(graph.vector(f"{prefix}layer_output_scale.weight", 1)[0]))
        graph.end_layer(x)
    hidden, softcap = graph.norm(x, "output_norm", epsilon), hparams.float("final_logit_softcapping", 30.0)
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"), softcap=softcap)


def inputs_per_layer(graph: GraphBuilder, hparams: HParams, x: Value, count: int, epsilon: float) -> tuple[Value, ...]:
    """What each layer adds to the residual stream: an embedding of the token, and a projection of the first layer's input."""
    width = hparams.size("embedding_length_per_layer_input", 0, 0)
    if not width:
        return ()
    of_token = graph.embedding("per_layer_token_embd", count * width, width**0.5)
    projected = graph.scale(graph.linear(x, "per_layer_model_proj", count * width), x.shape[0] ** -0.5)
    projected = graph.norm(graph.reshape(projected, count, width), "per_layer_proj_norm", epsilon)
    both = graph.scale(graph.add(graph.reshape(projected, count * width), of_token), 2**-0.5)
    return graph.split(both, *[width] * count)


def _feed_forward(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, epsilon: float) -> Value:
    """The dense block and, where the layer has a router, the sum of its experts, each with norms of its own."""
    prefix, block = f"blk.{layer}.", FeedForward(ACTIVATION)
    dense = dense_block(graph, hparams, layer, graph.norm(x, f"{prefix}ffn_norm", epsilon), block)
    if f"{prefix}ffn_gate_inp.weight" not in graph:
        return dense
    size = x.shape[0]
    weight = graph.weight(f"{prefix}ffn_gate_inp.scale", (size,))
    routed_by = graph.scale(graph.append(ops.Norm(graph.value(size), x, weight, epsilon)), size**-0.5)
    h = graph.norm(x, f"{prefix}pre_ffw_norm_2", epsilon)
    routed = routed_experts(graph, hparams.with_defaults({"expert_weights_norm": True}), layer, h, block, routed_by)
    dense, routed = (graph.norm(part, f"{prefix}post_ffw_norm_{n}", epsilon) for n, part in ((1, dense), (2, routed)))
    return graph.add(dense, routed)


def attention(
    graph: GraphBuilder,
    hparams: HParams,
    x: Value,
    layer: int,
    source: int,
    *,
    width: int,
    rope: RotaryEmbedding,
    window: int,
    epsilon: float,
) -> Value:
    """source: the layer whose keys and values are used, with a norm without weights; without attn_v values are the keys before
    their norm and rotation. Scores have no factor."""
    prefix, heads = f"blk.{layer}.attn_", hparams.of_layer("attention.head_count", layer)
    kv_heads = hparams.of_layer("attention.head_count_kv", layer, heads)

    def projected(part: str, n: int) -> Value:
        return graph.reshape(graph.linear(x, f"{prefix}{part}", n * width), n, width)

    q = graph.rope(graph.norm(projected("q", heads), f"{prefix}q_norm", epsilon), rope)
    k = v = None
    if source == layer:
        k = projected("k", kv_heads)
        v = graph.plain_norm(projected("v", kv_heads) if f"{prefix}v.weight" in graph else k, epsilon)
        k = graph.rope(graph.norm(k, f"{prefix}k_norm", epsilon), rope)
    out = graph.attention(q, k, v, source, 1.0, window=window)
    return graph.linear(out, f"{prefix}output", x.shape[0])
