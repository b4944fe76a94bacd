"""Gemma 3n: several residual streams, of which layers compute one and predict and correct the others (alternating updates,
arXiv:2301.13310); embeddings per layer; a low-rank residual beside the attention; keys and values that layers share."""

from __future__ import annotations

from ...formats import FormatError, TensorSource
from ..graph import Graph, GraphBuilder, Value, activation_ops, hyper_connection_ops
from ..graph.values import RotaryEmbedding
from ..hparams import HParams, n_layers
from .gemma4 import ACTIVATION, attention, inputs_per_layer, own_layers
from .rotary import frequency_factors, plain_frequencies, rotary_embedding

STREAMS = {"altup.num_inputs": 4, "altup.active_idx": 0}
LEAST_SQUARE = 1e-5  # of streams whose magnitude is set


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    graph, n_embd, count = GraphBuilder(source), hparams.size("embedding_length"), n_layers(hparams)
    hparams = hparams.with_defaults({**STREAMS, "attention.sliding_window_pattern": 5})
    epsilon, width = hparams.float("attention.layer_norm_rms_epsilon"), hparams.size("attention.key_length")
    streams = hparams.size("altup.num_inputs", minimum=2, maximum=16)
    is_local = hparams.flags("attention.sliding_window_pattern", count) or []
    own = own_layers(hparams)
    rope = rotary_embedding(hparams, width, interleaved=False, factors=frequency_factors(graph, hparams, width, n_ctx))
    local_rope = RotaryEmbedding(plain_frequencies(hparams.positive("rope.freq_base_swa", 10000.0), width))
    active = hparams.size("altup.active_idx", 0, 0, streams - 1)

    x = graph.embedding("token_embd", n_embd, n_embd**0.5)
    per_layer = inputs_per_layer(graph, hparams, x, count, epsilon)
    if not per_layer:
        raise FormatError(f"{hparams.path}: metadata key {hparams.architecture}.embedding_length_per_layer_input is missing")
    stacked = graph.weight("altup_proj.weight", (n_embd, n_embd, streams - 1))
    x = graph.append(hyper_connection_ops.ExpandStreams(graph.value(streams, n_embd), x, stacked, LEAST_SQUARE))
    for layer in range(count):
        prefix, local = f"blk.{layer}.", is_local[layer]
        mixing = graph.linear(
            _modalities(graph, _stream(graph, x, active), prefix, streams, epsilon), f"{prefix}altup_predict_coef", streams**2
        )
        predicted = graph.append(hyper_connection_ops.HyperConnectionMix(graph.value(streams, n_embd), x, mixing))
        computed = _stream(graph, predicted, active)
        h = graph.norm(computed, f"{prefix}attn_norm", epsilon)
        attended = attention(
            graph,
            hparams,
            h,
            layer,
            next(i for i in range(min(layer, own - 1), -1, -1) if is_local[i] == local),
            width=width,
            rope=local_rope if local else rope,
            window=hparams.size("attention.sliding_window") if local else 0,
            epsilon=epsilon,
        )
        attended = graph.add(computed, graph.norm(attended, f"{prefix}post_attention_norm", epsilon))
        both = graph.scale(graph.add(attended, _low_rank(graph, h, prefix, epsilon)), 2**-0.5)
        fed_forward = _feed_forward(graph, hparams, layer, graph.norm(both, f"{prefix}ffn_norm", epsilon))
        updated = graph.add(both, graph.norm(fed_forward, f"{prefix}post_ffw_norm", epsilon))
        factors = graph.linear(_modalities(graph, updated, prefix, streams, epsilon), f"{prefix}altup_correct_coef", streams)
        x = _add(graph, predicted, graph.add(updated, computed, -1.0), factors, (1.0,) * streams)
        scale = graph.weight(f"{prefix}altup_correct_scale.weight", (n_embd,))
        scaled = graph.append(activation_ops.Multiply(graph.value(n_embd), _stream(graph, x, active), scale))
        gate = graph.linear(scaled, f"{prefix}inp_gate", per_layer[layer].shape[0])
        added = graph.linear(graph.gated(gate, per_layer[layer], ACTIVATION), f"{prefix}proj", n_embd)
        added = graph.norm(added, f"{prefix}post_norm", epsilon)
        x = _add(graph, x, added, None, (0.0, *[1.0] * (streams - 1)))
        graph.end_layer(x)
    stacked = graph.weight("altup_unembd_proj.weight", (n_embd, n_embd, streams - 1))
    merged = graph.append(hyper_connection_ops.MergeStreams(graph.value(n_embd), x, stacked, LEAST_SQUARE))
    hidden, softcap = graph.norm(merged, "output_norm", epsilon), hparams.float("final_logit_softcapping", 30.0)
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"), softcap=softcap)


def _stream(graph: GraphBuilder, x: Value, number: int) -> Value:
    """One of the streams (streams, width) -> (width,)."""
    streams, width = x.shape
    return graph.split(graph.reshape(x, streams * width), *[width] * streams)[number]


def _add(graph: GraphBuilder, x: Value, update: Value, factors: Value | None, constants: tuple[float, ...]) -> Value:
    return graph.append(hyper_connection_ops.HyperConnectionAdd(graph.value(*x.shape), x, update, factors, constants))


def _modalities(graph: GraphBuilder, x: Value, prefix: str, streams: int, epsilon: float) -> Value:
    """What the coefficients of the streams are computed from: (width,) -> (streams,)."""
    normed = graph.scale(graph.norm(x, f"{prefix}altup_router_norm", epsilon), 1 / x.shape[0])
    return graph.softcap(graph.linear(normed, f"{prefix}altup_router", streams), 1.0)  # tanh


def _low_rank(graph: GraphBuilder, x: Value, prefix: str, epsilon: float) -> Value:
    """Learned augmented residual (LAuReL, arXiv:2411.07501)."""
    rank = graph.shape(f"{prefix}laurel_l.weight")[1]
    out = graph.linear(graph.linear(x, f"{prefix}laurel_l", rank), f"{prefix}laurel_r", x.shape[0])
    return graph.add(x, graph.norm(out, f"{prefix}laurel_post_norm", epsilon))


def _feed_forward(graph: GraphBuilder, hparams: HParams, layer: int, x: Value) -> Value:
    """A gated block; in the first layers only the largest numbers of the gate count."""
    prefix, n_ff = f"blk.{layer}.ffn_", hparams.of_layer("feed_forward_length", layer)
    gate, up = (graph.linear(x, f"{prefix}{part}", n_ff) for part in ("gate", "up"))
    factor = hparams.number_of_layer("activation_sparsity_scale", layer)
    if factor > float("-inf"):
        gate = graph.append(activation_ops.GaussianTopK(graph.value(n_ff), gate, factor))
    return graph.linear(graph.gated(gate, up, ACTIVATION), f"{prefix}down", x.shape[0])
