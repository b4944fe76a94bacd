"""openPangu 2: residual streams as in DeepSeek-V4, latent attention with parameter sinks, windows in most layers and an indexer
in the others, short convolutions of latents and of what attention gives, norms before and behind each block."""

from __future__ import annotations

from functools import partial

from ...formats import FormatError, TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..graph.sink_attention_ops import SinkAttention
from ..graph.values import RotaryEmbedding
from ..hparams import HParams, n_layers
from .feed_forward import feed_forward
from .latent_attention import Indexer, LatentHeads, select_keys
from .rotary import rotary_embedding
from .streams import StreamNames, Streams

EPSILON = 1e-6  # of the streams' mixing; the metadata does not say it
INDEXER_NAMES = ("attn_indexer_q_b", "attn_indexer_k", "attn_indexer_k_norm", "attn_indexer_weights_proj")
CONVOLUTIONS = ("qa", "compresskv", "o")


def windows(hparams: HParams) -> dict[int, int]:
    """Layer -> its window; layers that are not there see all keys. Raises FormatError for lists of two lengths."""
    layers, sizes = (hparams.metadata.get(f"{hparams.architecture}.{key}", ()) for key in ("swa_layers", "sliding_window_list"))
    if len(layers) != len(sizes):
        raise FormatError(f"{hparams.path}: swa_layers and sliding_window_list have {len(layers)} and {len(sizes)} numbers")
    return {int(layer): int(size) for layer, size in zip(layers, sizes, strict=True)}


def layer_states(hparams: HParams) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what each layer keeps per sequence: the last inputs of its convolutions of three tokens."""
    heads = LatentHeads.of(hparams)
    sizes = (heads.q_rank, heads.rank, heads.n * heads.v_width)
    return {f"convolution_{name}": (2, size) for name, size in zip(CONVOLUTIONS, sizes, strict=True)}


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    graph, heads = GraphBuilder(source), LatentHeads.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    rope, sizes = rotary_embedding(hparams, heads.rope, interleaved=False), windows(hparams)
    streams, iterations = hparams.size("mhc_num_stream", maximum=64), hparams.size("mhc_recur_norm", 20, 1, 1000)
    mixing = Streams(graph, streams, n_embd, iterations, EPSILON, StreamNames("_phi", "_alpha", "_beta"))

    def around(x: Value, prefix: str, block) -> Value:
        numbers = graph.norm(graph.reshape(x, streams * n_embd), f"{prefix}_gamma", epsilon)
        return mixing.around(x, numbers, prefix, block)

    def attention(layer: int, x: Value) -> Value:
        h = graph.norm(x, f"blk.{layer}.attn_norm", epsilon)
        h = _attention(graph, hparams, h, layer, heads, epsilon, rope, sizes.get(layer, 0))
        return graph.norm(h, f"blk.{layer}.post_attention_norm", epsilon)

    def block(layer: int, x: Value) -> Value:
        h = feed_forward(graph, hparams, layer, graph.norm(x, f"blk.{layer}.ffn_norm", epsilon))
        return graph.norm(h, f"blk.{layer}.post_ffw_norm", epsilon)

    x = mixing.of(graph.embedding("token_embd", n_embd))
    for layer in range(n_layers(hparams)):
        x = around(x, f"blk.{layer}.attn_mhc", partial(attention, layer))
        x = around(x, f"blk.{layer}.mlp_mhc", partial(block, layer))
        if f"blk.{layer}.block_post_norm.weight" in graph:
            x = graph.norm(x, f"blk.{layer}.block_post_norm", epsilon)
        graph.end_layer(x)
    numbers = graph.norm(graph.reshape(x, streams * n_embd), "merge_mhc_gamma", epsilon)
    hidden = graph.norm(mixing.collapsed(x, numbers, "merge_mhc"), "output_norm", epsilon)
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"))


def _attention(
    graph: GraphBuilder,
    hparams: HParams,
    x: Value,
    layer: int,
    heads: LatentHeads,
    epsilon: float,
    rope: RotaryEmbedding,
    window: int,
) -> Value:
    """From the tensors blk.N.attn_{q_a,qa_conv,q_a_norm,q_b,kv_a_mqa,compresskv_conv,kv_a_norm,k_b,v_b,param_sink_kv,
    param_sink_k_pe,o_conv,output}, and those of an indexer where the layer has no window."""
    prefix, n_sinks = f"blk.{layer}.attn_", hparams.size("param_sink_number", minimum=1)

    def convolved(part: Value, name: str) -> Value:
        state = f"convolution_{name}"
        return graph.add(part, graph.short_convolution(part, f"{prefix}{name}_conv", layer, activation="none", state=state))

    q_latent = graph.norm(convolved(graph.linear(x, f"{prefix}q_a", heads.q_rank), "qa"), f"{prefix}q_a_norm", epsilon)
    q = graph.reshape(
        graph.linear(q_latent, f"{prefix}q_b", heads.n * (heads.nope + heads.rope)), heads.n, heads.nope + heads.rope
    )
    q = graph.rope(q, rope, start=heads.nope)
    latent, k_pe = graph.split(graph.linear(x, f"{prefix}kv_a_mqa", heads.rank + heads.rope), heads.rank, heads.rope)
    latent, k_pe = graph.norm(convolved(latent, "compresskv"), f"{prefix}kv_a_norm", epsilon), graph.rope(k_pe, rope)
    indexer, selection = Indexer.of(hparams), None
    if not window and indexer is not None and f"blk.{layer}.{INDEXER_NAMES[0]}.weight" in graph:
        selection = select_keys(graph, x, q_latent, layer, indexer, rope, INDEXER_NAMES)
    out = graph.append(
        SinkAttention(
            graph.value(heads.n, heads.v_width),
            q,
            latent,
            k_pe,
            layer,
            (heads.nope + heads.rope) ** -0.5,
            heads.v_width,
            graph.weight(f"{prefix}k_b.weight", (heads.nope, heads.rank * heads.n)),
            graph.weight(f"{prefix}v_b.weight", (heads.rank, heads.n * heads.v_width)),
            graph.weight(f"{prefix}param_sink_kv", (heads.rank, n_sinks)),
            graph.weight(f"{prefix}param_sink_k_pe", (heads.rope, n_sinks)),
            graph.weight(f"{prefix}kv_a_norm.weight", (heads.rank,)),
            epsilon,
            window,
            selection,
        )
    )
    out = convolved(graph.reshape(out, heads.n * heads.v_width), "o")
    return graph.linear(out, f"{prefix}output", x.shape[0])
