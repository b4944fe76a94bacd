"""Models with latent attention: deepseek2 (DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash), mistral4, and with sparse attention
deepseek32 and glm-dsa, all with a mixture of experts; and minicpm3."""

from __future__ import annotations

from ...formats import TensorSource
from ..graph import Graph, GraphBuilder, Value
from ..hparams import HParams, n_layers
from .attention import temperature_of
from .draft import draft_input, finish_draft
from .feed_forward import SIGMOID, feed_forward
from .latent_attention import Indexer, LatentHeads, latent_attention
from .rotary import frequency_factors, rotary_embedding, yarn_mscale

NORMALISED = {"expert_weights_norm": True}
DEFAULTS = {"mistral4": NORMALISED, "glm-dsa": NORMALISED | {"expert_gating_func": SIGMOID}}


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None, draft: int | None = None) -> Graph:
    """The model's graph, or that of the draft layer with this number.

    Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    is_minicpm = hparams.architecture == "minicpm3"
    hparams = hparams.with_defaults(_minicpm3(hparams) if is_minicpm else DEFAULTS.get(hparams.architecture, {}))
    graph, heads, indexer = GraphBuilder(source), LatentHeads.of(hparams), Indexer.of(hparams)
    n_embd, epsilon = hparams.size("embedding_length"), hparams.float("attention.layer_norm_rms_epsilon")
    factors = frequency_factors(graph, hparams, heads.rope, n_ctx)
    rope = rotary_embedding(hparams, heads.rope, interleaved=not is_minicpm, factors=factors)
    scale = (heads.nope + heads.rope) ** -0.5
    if "rope.scaling.yarn_log_multiplier" in hparams:
        scale *= yarn_mscale(hparams.float("rope.scaling.factor"), hparams.float("rope.scaling.yarn_log_multiplier")) ** 2
    temperature, selection = temperature_of(hparams), None
    residual_scale = hparams.float("residual_scale", 0.0) or 1.0

    embedding_scale, logit_scale = hparams.float("embedding_scale", 0.0) or 1.0, hparams.float("logit_scale", 0.0) or 1.0

    def decoder_layer(x: Value, layer: int, selection: Value | None) -> tuple[Value, Value | None]:
        h = graph.norm(x, f"blk.{layer}.attn_norm", epsilon)
        attended, selection = latent_attention(
            graph,
            h,
            layer,
            heads,
            scale=scale,
            epsilon=epsilon,
            rope=rope,
            temperature=temperature,
            indexer=indexer,
            selection=selection,
        )
        x = graph.add(x, attended, residual_scale)
        h = graph.norm(x, f"blk.{layer}.ffn_norm", epsilon)
        return graph.add(x, feed_forward(graph, hparams, layer, h), residual_scale), selection

    if draft is not None:
        x, _ = decoder_layer(draft_input(graph, draft, n_embd, epsilon, embedding_scale), draft, None)
        return finish_draft(graph, hparams, draft, x, epsilon, scale=logit_scale)
    x = graph.embedding("token_embd", n_embd, embedding_scale)
    for layer in range(n_layers(hparams)):
        x, selection = decoder_layer(x, layer, selection)
        graph.end_layer(x)
    hidden = graph.norm(x, "output_norm", epsilon)
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"), scale=logit_scale)


def _minicpm3(hparams: HParams) -> dict[str, float]:
    """Factors of the published model, for files that do not say them."""
    layers, width = n_layers(hparams), hparams.int("embedding_length")
    return {"embedding_scale": 12.0, "residual_scale": 1.4 / layers**0.5, "logit_scale": 256 / width}
