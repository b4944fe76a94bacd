"""DeepSeek-V4: residual streams that each token mixes in its own way, attention to compressed entries, experts that the first
layers choose by token id."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value, hyper_connection_ops
from ..hparams import HParams, n_layers
from .compressed_attention import CompressedHeads, compressed_attention, run_length
from .feed_forward import feed_forward
from .latent_attention import Indexer


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    graph, heads, indexer = GraphBuilder(source), CompressedHeads.of(hparams), Indexer.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    streams = hparams.size("hyper_connection.count", maximum=64)

    def mixing(x: Value, prefix: str, scales: int) -> Value:
        """From the tensors PREFIX_{fn,base,scale}."""
        size = streams if scales == 1 else (2 + streams) * streams
        numbers = graph.plain_norm(graph.reshape(x, streams * n_embd), epsilon)
        return graph.append(
            hyper_connection_ops.HyperConnectionWeights(
                graph.value(size),
                graph.linear(numbers, f"{prefix}_fn", size),
                graph.weight(f"{prefix}_scale.weight", (scales,)),
                graph.weight(f"{prefix}_base.weight", (size,)),
                streams,
                hparams.size("hyper_connection.sinkhorn_iterations", 20, 1, 1000),
                hparams.positive("hyper_connection.epsilon", 1e-6),
            )
        )

    def collapse(x: Value, factors: Value) -> Value:
        return graph.append(hyper_connection_ops.CollapseStreams(graph.value(n_embd), x, factors))

    def residual(x: Value, update: Value, factors: Value, matrix: Value) -> Value:
        mixed = graph.append(hyper_connection_ops.HyperConnectionMix(graph.value(streams, n_embd), x, matrix, adds=False))
        return graph.append(
            hyper_connection_ops.HyperConnectionAdd(graph.value(streams, n_embd), mixed, update, factors, (0.0,) * streams)
        )

    x = graph.embedding("token_embd", n_embd)
    x = graph.append(hyper_connection_ops.RepeatStreams(graph.value(streams, n_embd), x))
    for layer in range(n_layers(hparams)):
        prefix = f"blk.{layer}."
        before, behind, matrix = graph.split(mixing(x, f"{prefix}hc_attn", 3), streams, streams, streams**2)
        h = graph.norm(collapse(x, before), f"{prefix}attn_norm", epsilon)
        attended = compressed_attention(graph, h, layer, heads, run_length(hparams, layer), epsilon, indexer)
        x = residual(x, attended, behind, matrix)
        before, behind, matrix = graph.split(mixing(x, f"{prefix}hc_ffn", 3), streams, streams, streams**2)
        h = graph.norm(collapse(x, before), f"{prefix}ffn_norm", epsilon)
        x = residual(x, feed_forward(graph, hparams, layer, h), behind, matrix)
        graph.end_layer(x)
    hidden = graph.norm(collapse(x, mixing(x, "output_hc", 1)), "output_norm", epsilon)
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"))
