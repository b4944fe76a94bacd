"""Qwen 4 Exp: residual streams that each block mixes and adds to, linear attention by the gated delta rule, attention to
selected runs of keys, experts, and embeddings of hashed n-grams."""

from __future__ import annotations

from ...formats import FormatError, TensorSource
from ..graph import Graph, GraphBuilder, Value, activation_ops, hyper_connection_ops, ops
from ..graph.values import NgramHash, StateSpec
from ..hparams import HParams, n_layers
from .attention import Heads, RunIndexer, grouped_attention
from .delta_net import DeltaHeads, gated_delta_net
from .feed_forward import feed_forward
from .rotary import frequency_factors, rotary_embedding, rotated_dims
from .variants import NORMALISED


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """A layer with a convolution (ssm_conv1d) has linear attention, one with ple_key embeddings of n-grams.

    Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported.
    """
    hparams = hparams.with_defaults(NORMALISED)
    graph, heads, delta_heads = GraphBuilder(source), Heads.of(hparams), DeltaHeads.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    streams, rank = hparams.size("hyper_connection.count", maximum=64), hparams.size("hyper_connection.low_rank")
    dims = rotated_dims(hparams, heads.k_width)
    rope = rotary_embedding(hparams, dims, interleaved=False, factors=frequency_factors(graph, hparams, dims, n_ctx))
    size = streams * n_embd

    def stream_norm(x: Value, name: str) -> Value:
        """Of each stream by itself, with weights of its own: x (streams, n_embd) or (size,) -> (size,)."""
        numbers = graph.reshape(graph.plain_norm(graph.reshape(x, streams, n_embd), epsilon), size)
        return graph.append(activation_ops.Multiply(graph.value(size), numbers, graph.weight(f"{name}.weight", (size,))))

    def mixed(x: Value, prefix: str) -> tuple[Value, Value]:
        """What a block is given, from the tensors PREFIX_{norm,down,up}, and the normalised streams."""
        numbers = stream_norm(x, f"{prefix}_norm")
        low = graph.activation(graph.scale(graph.linear(numbers, f"{prefix}_down", rank), 1 / streams), "silu")
        first, *others = graph.split(
            graph.gated(graph.linear(low, f"{prefix}_up", size), numbers, "sigmoid"), *[n_embd] * streams
        )
        for other in others:
            first = graph.add(first, other)
        return graph.scale(first, 1 / streams), numbers

    def gated_copies(x: Value, gates: Value) -> Value:
        """x times the sigmoid of each stream's gate."""
        copies = graph.append(hyper_connection_ops.RepeatStreams(graph.value(streams, n_embd), x))
        return graph.gate_heads(copies, gates)

    def residual(x: Value, update: Value, numbers: Value, prefix: str) -> Value:
        """From the tensor PREFIX_inject."""
        gates = graph.scale(graph.linear(numbers, f"{prefix}_inject", streams), 1 / streams)
        return graph.add(x, gated_copies(update, gates), 2.0)

    def with_ngrams(x: Value, layer: int) -> Value:
        """From the tensors per_layer_token_embd and blk.N.ple_{key,value,norm_key,norm_query,norm_conv,conv1d}."""
        prefix, ngrams = f"blk.{layer}.ple_", ngram_hash(hparams)
        width, rows = graph.shape("per_layer_token_embd.weight")[:2]
        if max(a + b for a, b in zip(ngrams.offsets, ngrams.sizes, strict=True)) > rows:
            raise FormatError(
                f"{hparams.path}: per_layer_token_embd.weight has {rows} rows, too few for its heads (ple.head_*)"
            )
        table = graph.weight("per_layer_token_embd.weight", (width, rows))
        graph.cache.append(StateSpec(layer, "tokens", (ngrams.n_past, 1)))
        embedded = graph.value(len(ngrams.sizes) * width)
        embedded = graph.append(ops.NgramEmbedding(embedded, table, layer, ngrams))
        keys = graph.reshape(stream_norm(graph.linear(embedded, f"{prefix}key", size), f"{prefix}norm_key"), streams, n_embd)
        queries = graph.reshape(stream_norm(x, f"{prefix}norm_query"), streams, n_embd)
        gates = graph.append(hyper_connection_ops.MatchStreams(graph.value(streams), keys, queries))
        values = gated_copies(graph.linear(embedded, f"{prefix}value", n_embd), gates)
        near = stream_norm(values, f"{prefix}norm_conv")
        near = graph.short_convolution(
            near, f"{prefix}conv1d", layer, state="ngram_convolution", dilation=len(ngrams.multipliers)
        )
        return graph.add(x, graph.add(values, graph.reshape(near, streams, n_embd)))

    x = graph.embedding("token_embd", n_embd)
    x = graph.append(hyper_connection_ops.RepeatStreams(graph.value(streams, n_embd), x))
    for layer in range(n_layers(hparams)):
        prefix = f"blk.{layer}."
        if f"{prefix}ple_key.weight" in graph:
            x = with_ngrams(x, layer)
        h, numbers = mixed(x, f"{prefix}hc_attn")
        if f"{prefix}ssm_conv1d.weight" in graph:
            h = gated_delta_net(graph, h, layer, delta_heads, epsilon=epsilon, tiled=True, gate_function="sigmoid")
        else:
            blocks, scale = RunIndexer.of(hparams, layer), heads.k_width**-0.5
            h = grouped_attention(graph, h, layer, heads, scale=scale, epsilon=epsilon, rope=rope, blocks=blocks)
        x = residual(x, h, numbers, f"{prefix}hc_attn")
        h, numbers = mixed(x, f"{prefix}hc_ffn")
        x = residual(x, feed_forward(graph, hparams, layer, h), numbers, f"{prefix}hc_ffn")
        graph.end_layer(x)
    return graph.finish(hparams.architecture, mixed(x, "output_hc")[0], hparams.size("context_length"))


def ngram_hash(hparams: HParams) -> NgramHash:
    """Raises FormatError for lists of a wrong length, or numbers beyond what can be."""
    length, heads = hparams.size("ple.ngram_size", minimum=2, maximum=16), hparams.size("ple.heads_per_ngram", maximum=256)
    counts = {"layer_multipliers": length, "head_vocab_sizes": (length - 1) * heads, "head_offsets": (length - 1) * heads}
    lists = []
    for key, count in counts.items():
        values = [int(value) for value in hparams.metadata.get(f"{hparams.architecture}.ple.{key}", ())][:count]
        least = 0 if key == "head_offsets" else 1
        if len(values) < count or any(not least <= value < 1 << 63 for value in values):
            raise FormatError(f"{hparams.path}: {hparams.architecture}.ple.{key} needs {count} numbers of at least {least}")
        lists.append(tuple(values))
    multipliers, sizes, offsets = lists
    return NgramHash(multipliers, sizes, offsets, hparams.size("ple.eos_token_id", minimum=0))


def layer_states(hparams: HParams, layer: int, is_linear: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a layer keeps per sequence, whatever its length."""
    if not is_linear:
        indexer = RunIndexer.of(hparams, layer)
        return indexer.states if indexer is not None else {}
    states = DeltaHeads.of(hparams).states
    if layer in [int(number) for number in hparams.metadata.get(f"{hparams.architecture}.ple.layers", ())]:
        length, size = hparams.size("ple.ngram_size"), hparams.size("hyper_connection.count") * hparams.size("embedding_length")
        states |= {"tokens": (length - 1, 1), "ngram_convolution": ((hparams.size("ple.conv_kernel") - 1) * length, size)}
    return states
