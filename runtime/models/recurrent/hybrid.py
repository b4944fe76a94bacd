"""Models of state space layers, short convolutions or delta attention, most with a few layers of attention: LFM2, Mamba,
Mamba-2, Jamba, Granite 4, Nemotron-H, Falcon-H1, Kimi Linear, Kimi K3, Ling 3.

What a layer has, its tensors say: a convolution (shortconv), a state space (ssm_in), delta attention (ssm_beta), attention, or
several of these, whose results are added; behind it a feed-forward block with a norm of its own (ffn_norm), or as a layer by
itself.
"""

from __future__ import annotations

from functools import partial

from ....formats import FormatError, TensorSource
from ...graph import Graph, GraphBuilder, Value, hyper_connection_ops
from ...graph.values import RotaryEmbedding
from ...hparams import HParams, n_layers
from ..attention import Heads, grouped_attention
from ..draft import draft_input, finish_draft
from ..feed_forward import FeedForward, feed_forward
from ..latent_attention import LatentHeads, latent_attention
from ..rotary import frequency_factors, rotary_embedding, rotated_dims
from .kimi_delta import KimiDeltaHeads, kimi_delta_attention
from .state_space import StateSpace, state_space
from .variants import RECURRENT_VARIANTS, RecurrentVariant


def build(source: TensorSource, hparams: HParams, n_ctx: int | None = None, draft: int | None = None) -> Graph:
    """The model's graph, or that of the draft layer with this number.

    Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for what is not supported."""
    variant = RECURRENT_VARIANTS[hparams.architecture]
    hparams = hparams.with_defaults(variant.defaults)
    graph, n_embd = GraphBuilder(source), hparams.size("embedding_length")
    rms_epsilon = "attention.layer_norm_rms_epsilon"  # files of Nemotron-H may have the other key only
    epsilon = hparams.float(rms_epsilon if rms_epsilon in hparams else "attention.layer_norm_epsilon")
    residual_scale, logit_scale = (hparams.float(key, 0.0) or 1.0 for key in ("residual_scale", "logit_scale"))
    situ = (hparams.float("activation.situ_beta", 0.0), hparams.float("activation.situ_linear_beta", 0.0))
    block = FeedForward(activation=variant.activation, ungated=variant.ungated, situ=situ)
    mixers = _Mixers(graph, hparams, variant, epsilon, n_ctx)

    def decoder_layer(residual: Residual, layer: int) -> None:
        prefix = f"blk.{layer}."
        h = graph.norm(residual.read(f"{prefix}attn_res_score"), f"{prefix}attn_norm", epsilon)
        parts = mixers.results(h, layer)
        if not parts:
            parts = [feed_forward(graph, hparams, layer, h, block)]
        residual.add(parts[0] if len(parts) == 1 else graph.add(parts[0], parts[1]), attention_of=layer)
        if any(f"{prefix}ffn_norm{suffix}" in graph for suffix in (".weight", "")):
            h = graph.norm(residual.read(f"{prefix}ffn_res_score"), f"{prefix}ffn_norm", epsilon)
            residual.add(feed_forward(graph, hparams, layer, h, block))

    if draft is not None:
        residual = Residual(graph, draft_input(graph, draft, n_embd, epsilon), scale=residual_scale)
        decoder_layer(residual, draft)
        return finish_draft(graph, hparams, draft, residual.value, epsilon)
    x = graph.embedding("token_embd", n_embd, hparams.float("embedding_scale", 0.0) or 1.0)
    new_sum = hparams.size("attn_res.block_size", 0, 0)
    residual = Residual(graph, x, scale=residual_scale, block=new_sum, epsilon=epsilon)
    for layer in range(n_layers(hparams)):
        decoder_layer(residual, layer)
        graph.end_layer(residual.value)
    hidden = graph.norm(residual.read("output_res_score"), variant.output_norm, epsilon)
    scale = 1 / logit_scale if variant.divide_logits else logit_scale
    return graph.finish(hparams.architecture, hidden, hparams.size("context_length"), scale=scale)


class _Mixers:
    """The parts of layers that mix tokens."""

    def __init__(self, graph: GraphBuilder, hparams: HParams, variant: RecurrentVariant, epsilon: float, n_ctx: int | None):
        self.graph, self.hparams, self.variant, self.epsilon, self.n_ctx = graph, hparams, variant, epsilon, n_ctx

    def results(self, x: Value, layer: int) -> list[Value]:
        """What each of a layer's mixers makes of its normalised input."""
        prefix = f"blk.{layer}."
        mixers = {
            "attn_kv_a_mqa": self._latent_attention,
            "shortconv.in_proj": partial(gated_convolution, self.graph),
            "ssm_in": self._state_space,
            "ssm_beta": self._delta_attention,
        }
        chosen = [mixer for name, mixer in mixers.items() if f"{prefix}{name}.weight" in self.graph]
        has_attention = any(f"{prefix}attn_{name}.weight" in self.graph for name in ("q", "qkv"))
        if has_attention and not any(f"{prefix}{name}.weight" in self.graph for name in ("attn_kv_a_mqa", "ssm_beta")):
            chosen.insert(0, self._attention)
        if len(chosen) > 2:
            raise FormatError(f"{self.graph.source.path}: layer {layer} has more than two of attention and recurrent parts")
        return [mixer(x, layer) for mixer in chosen]

    def _attention(self, x: Value, layer: int) -> Value:
        heads = Heads.of(self.hparams, layer)
        scale = self.hparams.float("attention.scale", 0.0) or heads.k_width**-0.5
        rope = self._rope(heads.k_width)
        return grouped_attention(self.graph, x, layer, heads, scale=scale, epsilon=self.epsilon, rope=rope)

    def _rope(self, width: int) -> RotaryEmbedding | None:
        if not self.variant.rotates or not self.hparams.flag("rope.scaling.finetuned", True):
            return None
        dims = rotated_dims(self.hparams, width)
        factors = frequency_factors(self.graph, self.hparams, dims, self.n_ctx)
        return rotary_embedding(self.hparams, dims, self.variant.interleaved, factors)

    def _latent_attention(self, x: Value, layer: int) -> Value:
        heads = LatentHeads.of(self.hparams)
        scale = (heads.nope + heads.rope) ** -0.5
        return latent_attention(self.graph, x, layer, heads, scale=scale, epsilon=self.epsilon, rope=self._rope(heads.rope))[0]

    def _state_space(self, x: Value, layer: int) -> Value:
        sizes = StateSpace.of(self.hparams, has_heads=self.variant.has_heads)
        plain_norms = self.hparams.flag("ssm.dt_b_c_rms")
        return state_space(self.graph, x, layer, sizes, epsilon=self.epsilon, plain_norms=plain_norms)

    def _delta_attention(self, x: Value, layer: int) -> Value:
        return kimi_delta_attention(self.graph, x, layer, KimiDeltaHeads.of(self.hparams), epsilon=self.epsilon)


def gated_convolution(graph: GraphBuilder, x: Value, layer: int) -> Value:
    """A gated short convolution (LFM2, arXiv:2511.23404): out(c * convolution(b * v)), b, c and v from one matrix; the tensors
    blk.N.shortconv.{in_proj,conv,out_proj}."""
    prefix, n = f"blk.{layer}.shortconv.", x.shape[0]
    b, c, values = graph.split(graph.linear(x, f"{prefix}in_proj", 3 * n), n, n, n)
    mixed = graph.short_convolution(graph.gated(b, values, "identity"), f"{prefix}conv", layer, "none")
    return graph.linear(graph.gated(c, mixed, "identity"), f"{prefix}out_proj", n)


class Residual:
    """What goes from layer to layer: the sum of a model's embedding and its layers' results, or several sums that each layer
    weighs (attention residuals; Kimi K3).

    With `block` > 0 a new sum begins at every block-th layer, with what its attention gives. All that reads the sums reads
    their mean, with weights by the softmax of scores (`ScoreStreams`).

    value  (width,), or (sums, width)
    scale  of the results, where there is one sum
    """

    def __init__(self, graph: GraphBuilder, x: Value, *, scale: float, block: int = 0, epsilon: float = 0.0):
        self.graph, self.scale, self.block, self.epsilon = graph, scale, block, epsilon
        self.value = graph.reshape(x, 1, *x.shape) if block else x

    def read(self, name: str) -> Value:
        """(width,); name: of the tensor with which the sums are scored."""
        graph, x = self.graph, self.value
        if not self.block:
            return x
        sums, width = x.shape
        weight = graph.weight(f"{name}.weight", (width,))
        factors = graph.append(hyper_connection_ops.ScoreStreams(graph.value(sums), x, weight, self.epsilon))
        return graph.append(hyper_connection_ops.CollapseStreams(graph.value(width), x, factors))

    def add(self, result: Value, attention_of: int | None = None) -> None:
        """attention_of: the layer whose attention the result is of."""
        graph, x = self.graph, self.value
        if not self.block:
            self.value = graph.add(x, result, self.scale)
            return
        sums, width = x.shape
        if attention_of is not None and attention_of % self.block == 0:
            joined = graph.concat(graph.reshape(x, sums * width), result)
            self.value = graph.reshape(joined, sums + 1, width)
            return
        constants = (*[0.0] * (sums - 1), 1.0)
        self.value = graph.append(hyper_connection_ops.HyperConnectionAdd(graph.value(sums, width), x, result, None, constants))
