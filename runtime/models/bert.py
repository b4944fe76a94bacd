"""BERT and its relatives: every token sees all others; a norm behind each block, of its input and its result together."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..hparams import HParams, n_layers
from .attention import Heads, grouped_attention
from .feed_forward import FeedForward, feed_forward
from .rotary import rotary_embedding
from .variants import ENCODERS


def pair_separator(source: TensorSource) -> int:
    """The token behind which the second text of a pair begins, for models that tell the two by token types; else -1."""
    types = source.tensors.get("token_types.weight")
    separator = source.metadata.get("tokenizer.ggml.seperator_token_id")
    return int(separator) if types is not None and types.n_rows > 1 and separator is not None else -1


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    encoder, graph, heads = ENCODERS[hparams.architecture], GraphBuilder(source), Heads.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_epsilon")
    rope = rotary_embedding(hparams, heads.k_width, interleaved=False) if encoder.rotates else None

    def norm(x: Value, name: str) -> Value:
        return graph.norm(x, name, epsilon, kind="layer")

    x = graph.embedding("token_embd", n_embd)
    for name, by in (("token_types", "segment"), ("position_embd", "position")):
        if f"{name}.weight" in graph:
            separator = pair_separator(source) if by == "segment" else -1
            x = graph.add(x, graph.embedding(name, n_embd, by=by, separator=separator))
    x = norm(x, "token_embd_norm")
    for layer in range(n_layers(hparams)):
        prefix = f"blk.{layer}."
        attended = grouped_attention(
            graph,
            x,
            layer,
            heads,
            scale=heads.k_width**-0.5,
            epsilon=epsilon,
            rope=rope,
            alibi=encoder.alibi,
            causal=hparams.flag("attention.causal", False),
        )
        h = norm(graph.add(x, attended), f"{prefix}attn_output_norm")
        if f"{prefix}attn_norm_2.weight" in graph:
            h = norm(graph.add(h, x), f"{prefix}attn_norm_2")
        fed_forward = feed_forward(graph, hparams, layer, h, FeedForward(encoder.activation, encoder.activation))
        x = norm(graph.add(h, fed_forward), f"{prefix}layer_output_norm")
        graph.end_layer(x)
    return graph.finish_encoder(hparams.architecture, x, hparams.size("context_length"))
