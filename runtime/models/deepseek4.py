"""DeepSeek-V4: residual streams that each token mixes in its own way, attention to compressed entries, experts that the first
layers choose by token id."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..hparams import HParams, n_layers
from .compressed_attention import CompressedHeads, compressed_attention, run_length
from .feed_forward import feed_forward
from .latent_attention import Indexer
from .streams import Streams


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    graph, heads, indexer = GraphBuilder(source), CompressedHeads.of(hparams), Indexer.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    streams = hparams.size("hyper_connection.count", maximum=64)

    iterations = hparams.size("hyper_connection.sinkhorn_iterations", 20, 1, 1000)
    mixing = Streams(graph, streams, n_embd, iterations, hparams.positive("hyper_connection.epsilon", 1e-6))

    def numbers(x: Value) -> Value:
        return graph.plain_norm(graph.reshape(x, streams * n_embd), epsilon)

    x = graph.embedding("token_embd", n_embd)
    x = mixing.of(x)
    for layer in range(n_layers(hparams)):
        prefix = f"blk.{layer}."

        def attention(h: Value, layer: int = layer, prefix: str = prefix) -> Value:
            h, run = graph.norm(h, f"{prefix}attn_norm", epsilon), run_length(hparams, layer)
            return compressed_attention(graph, h, layer, heads, run, epsilon, indexer)

        def block(h: Value, layer: int = layer, prefix: str = prefix) -> Value:
            return feed_forward(graph, hparams, layer, graph.norm(h, f"{prefix}ffn_norm", epsilon))

        x = mixing.around(x, numbers(x), f"{prefix}hc_attn", attention)
        x = mixing.around(x, numbers(x), f"{prefix}hc_ffn", block)
        graph.end_layer(x)
    hidden = graph.norm(mixing.collapsed(x, numbers(x), "output_hc"), "output_norm", epsilon)
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"))
