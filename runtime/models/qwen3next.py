"""Qwen3-Next, Qwen 3.5 and 3.6: layers of linear attention by the gated delta rule, every fourth one with gated attention."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..hparams import HParams, n_layers
from .attention import Heads, grouped_attention
from .delta_net import DeltaHeads, gated_delta_net
from .draft import draft_input, finish_draft
from .feed_forward import feed_forward
from .rotary import frequency_factors, rotary_embedding, rotated_dims
from .variants import NORMALISED


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None, draft: int | None = None) -> Graph:
    """The model's graph, or that of the draft layer with this number.

    A layer with a convolution (ssm_conv1d) has linear attention. Text has the same position on all axes of the rotary
    embedding, so that its sections (rope.dimension_sections) do not matter.

    Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported.
    """
    hparams = hparams.with_defaults(NORMALISED)
    graph, heads, delta_heads = GraphBuilder(source), Heads.of(hparams), DeltaHeads.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    dims = rotated_dims(hparams, heads.k_width)
    rope = rotary_embedding(hparams, dims, interleaved=False, factors=frequency_factors(graph, hparams, dims, n_ctx))
    scale = heads.k_width**-0.5
    tiled = hparams.architecture != "qwen3next"

    def decoder_layer(x: Value, layer: int) -> Value:
        prefix = f"blk.{layer}."
        h = graph.norm(x, f"{prefix}attn_norm", epsilon)
        if f"{prefix}ssm_conv1d.weight" in graph:
            mixed = gated_delta_net(graph, h, layer, delta_heads, epsilon=epsilon, tiled=tiled)
        else:
            mixed = grouped_attention(graph, h, layer, heads, scale=scale, epsilon=epsilon, rope=rope)
        x = graph.add(x, mixed)
        return graph.add(x, feed_forward(graph, hparams, layer, graph.norm(x, f"{prefix}post_attention_norm", epsilon)))

    if draft is not None:
        x = decoder_layer(draft_input(graph, draft, n_embd, epsilon), draft)
        return finish_draft(graph, hparams, draft, x, epsilon)
    x = graph.embedding("token_embd", n_embd)
    for layer in range(n_layers(hparams)):
        x = decoder_layer(x, layer)
        graph.end_layer(x)
    return graph.finish(hparams.architecture, graph.norm(x, "output_norm", epsilon), hparams.size("context_length"))
