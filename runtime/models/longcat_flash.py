"""LongCat-Flash (arXiv:2509.01322, section 2): blocks in pairs; the first has experts beside its dense block, whose result is
added after the second (shortcut-connected mixture of experts)."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..hparams import HParams, n_layers
from .feed_forward import FeedForward, dense_block, routed_experts
from .latent_attention import LatentHeads, latent_attention
from .rotary import frequency_factors, rotary_embedding, yarn_mscale

LATENT_EPSILON = 1e-6  # of the latents' norms, whatever that of the others is; the metadata does not say it


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None) -> Graph:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    graph, heads, block = GraphBuilder(source), LatentHeads.of(hparams), FeedForward()
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    rope = rotary_embedding(hparams, heads.rope, interleaved=True, factors=frequency_factors(graph, hparams, heads.rope, n_ctx))
    scale = (heads.nope + heads.rope) ** -0.5
    if "rope.scaling.yarn_log_multiplier" in hparams:
        scale *= yarn_mscale(hparams.float("rope.scaling.factor"), hparams.float("rope.scaling.yarn_log_multiplier")) ** 2
    x, shortcut = graph.embedding("token_embd", n_embd), None
    for layer in range(n_layers(hparams)):
        h = graph.norm(x, f"blk.{layer}.attn_norm", epsilon)
        attended, _ = latent_attention(graph, h, layer, heads, scale=scale, epsilon=LATENT_EPSILON, rope=rope)
        x = graph.add(x, attended)
        h = graph.norm(x, f"blk.{layer}.ffn_norm", epsilon)
        experts: Value | None = None
        if f"blk.{layer}.ffn_gate_inp.weight" in graph:
            experts = routed_experts(graph, hparams, layer, h, block)
        x = graph.add(x, dense_block(graph, hparams, layer, h, block))
        if experts is None and shortcut is not None:
            x = graph.add(x, shortcut)
        shortcut = experts
        graph.end_layer(x)
    return graph.finish(hparams.architecture, graph.norm(x, "output_norm", epsilon), hparams.size("context_length"))
