"""How the architectures that are built like Llama differ from it, beyond what their tensors and metadata say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ...data_classes import dataclass
from ..hparams import HParams, n_layers
from .feed_forward import SIGMOID


def _rsqrt_width(hparams: HParams, width: int) -> float:
    return width**-0.5


def _scale_of_largest(layers: int) -> Callable[[HParams, int], float]:
    """Gemma's largest models divide scores by the root of n_embd / n_head, not of a head's width; only their depth tells."""

    def scale(hparams: HParams, width: int) -> float:
        is_largest = n_layers(hparams) == layers
        return (hparams.int("embedding_length") / hparams.int("attention.head_count") if is_largest else width) ** -0.5

    return scale


def _alibi_of_metadata(hparams: HParams) -> float:
    return hparams.float("attention.max_alibi_bias", 0.0)


def _alibi_always(hparams: HParams) -> float:
    return 8.0


def _alibi_of_13b(hparams: HParams) -> float:
    """Of Baichuan's two sizes the larger has linear biases instead of a rotary embedding; only its depth tells."""
    return 8.0 if n_layers(hparams) == 40 else 0.0


def _no_layer(hparams: HParams, layer: int, local: bool, windows: bool) -> bool:
    return False


def _every_layer(hparams: HParams, layer: int, local: bool, windows: bool) -> bool:
    return True


def _only_local(hparams: HParams, layer: int, local: bool, windows: bool) -> bool:
    """In a model with windows, layers without one have no positions (Cohere 2, EXAONE 4)."""
    return local or not windows


def _local_or_dense(hparams: HParams, layer: int, local: bool, windows: bool) -> bool:
    return local or layer < hparams.size("leading_dense_block_count", 0, 0)


def _three_of_four(hparams: HParams, layer: int, local: bool, windows: bool) -> bool:
    return (layer + 1) % 4 != 0


def _three_of_four_if_chunked(hparams: HParams, layer: int, local: bool, windows: bool) -> bool:
    """Llama 4; its small relatives without chunks rotate in all layers."""
    return (layer + 1) % 4 != 0 or not windows


def _but_of_128_experts(hparams: HParams) -> bool:
    return hparams.int("expert_count") != 128


@dataclass(frozen=True)
class Variant:
    """What an architecture's readers know by its name.

    interleaved        rotary embedding pairs neighbouring elements (0, 1), (2, 3), ...; else (0, d/2), (1, d/2 + 1), ...
    defaults           values of metadata keys that a file lacks
    local_rope         layers with a window rotate by rope.freq_base_swa, without scaling
    half_rope          layers without a window rotate half of the elements that those with one rotate
    activation         of a gate: 'silu', 'gelu', 'gelu_erf', 'clamped_silu' or 'clamped_swish'
    ungated            activation of a feed-forward block without a gate: 'gelu', 'gelu_erf' or 'squared_relu'
    embedding_scale    n_embd -> factor of the embeddings, where the metadata does not say
    attention_scale    width of a head -> factor of the attention's scores, where the metadata does not say
    ffn_norm           name of the norm before the feed-forward block; unless it is this, post_attention_norm is after attention
    pre_norm           there are norms before both blocks; else only after them
    norm_after_rope    queries and keys are normalised after their rotation instead of before
    parallel           attention and feed-forward block see the same input, normalised once (attn_norm), or for attention by
                       attn_norm_2 where that is there. None: as the metadata says (use_parallel_residual), each after its norm
    parallel_unnormed  layers without ffn_norm are parallel (StableLM), whatever the metadata say
    has_head           it predicts tokens; else it makes embeddings of texts: every token sees all others unless the metadata
                       say otherwise (attention.causal), and the first layer may have no norm before attention
    first_global       of layers with a window in a period, the first is global; else the last
    rotates            (hparams, layer, whether it has a window, whether any layer has) -> whether it rotates queries and keys
    alibi              the largest of the linear biases; where there are any, nothing is rotated
    divide_logits      logits are divided by logit_scale instead of multiplied
    norm               'rms' or 'layer'; None: what the metadata has an epsilon of
    norm_weights       norms have weights
    embedding_norm     embeddings are normalised without weights
    post_epsilon       of norms after a block; None: as of the others
    attention_gate     function of attn_gate, with which the attention's result is multiplied: 'sigmoid' or 'softplus'
    gating             of a router, where expert_gating_func does not say: 'sparse_mixer'
    chunked            layers with a window attend within chunks of its size
    head_norms         hparams -> whether rotated queries and keys are normalised without weights
    temperature_offset  of positions, by which only queries that are not rotated are scaled; None: all are, without offset
    weigh_inputs       an expert's weight multiplies its input instead of its result
    shared_average     the result of routed and shared experts is their mean instead of their sum
    drafts_unnormed    draft layers read the residual stream, not the output of the last norm
    drafts_chained     each draft layer reads the output of the one before; else all read the model's
    """

    interleaved: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    local_rope: bool = False
    half_rope: bool = False
    activation: str = "silu"
    ungated: str = "gelu"
    embedding_scale: Callable[[int], float] = lambda n_embd: 1.0
    attention_scale: Callable[[HParams, int], float] = _rsqrt_width
    ffn_norm: str = "ffn_norm"
    pre_norm: bool = True
    norm_after_rope: bool = False
    parallel: bool | None = False
    parallel_unnormed: bool = False
    has_head: bool = True
    first_global: bool = False
    rotates: Callable[[HParams, int, bool, bool], bool] = _every_layer
    alibi: Callable[[HParams], float] = _alibi_of_metadata
    divide_logits: bool = False
    norm: str | None = None
    norm_weights: bool = True
    embedding_norm: bool = False
    post_epsilon: float | None = None
    attention_gate: str = "sigmoid"
    gating: str = ""
    chunked: bool = False
    head_norms: Callable[[HParams], bool] = lambda hparams: False
    temperature_offset: int | None = None
    weigh_inputs: bool = False
    shared_average: bool = False
    drafts_unnormed: bool = False
    drafts_chained: bool = True

    def is_parallel(self, hparams: HParams, has_ffn_norm: bool) -> bool:
        """Whether a layer's attention and feed-forward block see the same input."""
        if self.parallel_unnormed:
            return not has_ffn_norm
        return hparams.flag("use_parallel_residual") if self.parallel is None else self.parallel


NORMALISED = {"expert_weights_norm": True}
SIGMOID_ROUTER = {"expert_gating_func": SIGMOID}
GEMMA2 = {"attention.sliding_window": 4096, "attention.sliding_window_pattern": 2}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10000.0}
COHERE2 = EXAONE4 = {"attention.sliding_window_pattern": 4}
GPT_OSS = NORMALISED | {"attention.sliding_window_pattern": 2, "rope.scaling.yarn_truncate": False}

LLAMA4 = SIGMOID_ROUTER | {"attention.sliding_window": 8192, "attention.sliding_window_pattern": 4}
LLAMA4 |= {"attention.temperature_scale": 0.1, "attention.temperature_length": 8192}
AFMOE = COHERE2 | NORMALISED | SIGMOID_ROUTER
COHERE2_MOE = Variant(interleaved=True, parallel=True, defaults=SIGMOID_ROUTER, rotates=_local_or_dense, shared_average=True)

# general.architecture -> how it differs
VARIANTS = {
    "llama": Variant(interleaved=True, defaults=NORMALISED),
    "mistral3": Variant(interleaved=True),
    "qwen2": Variant(),
    "qwen2moe": Variant(),
    "qwen3": Variant(),
    "qwen3moe": Variant(defaults=NORMALISED),
    "qwen2vl": Variant(),
    "qwen3vl": Variant(),
    "qwen3vlmoe": Variant(defaults=NORMALISED),
    "gemma2": Variant(defaults=GEMMA2, activation="gelu", embedding_scale=math.sqrt, attention_scale=_scale_of_largest(46)),
    "gemma3": Variant(
        defaults=GEMMA3, activation="gelu", embedding_scale=math.sqrt, attention_scale=_scale_of_largest(62), local_rope=True
    ),
    "glm4": Variant(interleaved=True),
    "glm4moe": Variant(defaults=SIGMOID_ROUTER, ffn_norm="post_attention_norm"),
    "gpt-oss": Variant(defaults=GPT_OSS, activation="clamped_swish", ffn_norm="post_attention_norm"),
    "ernie4_5": Variant(interleaved=True),
    "ernie4_5-moe": Variant(interleaved=True, defaults=NORMALISED),
    "hunyuan-dense": Variant(norm_after_rope=True),
    "hunyuan-moe": Variant(norm_after_rope=True, defaults=NORMALISED),
    "phi3": Variant(),
    "starcoder2": Variant(),
    "command-r": Variant(interleaved=True, parallel=True),
    "cohere2": Variant(interleaved=True, parallel=True, defaults=COHERE2, rotates=_only_local),
    "olmo2": Variant(pre_norm=False, local_rope=True),
    "granite": Variant(interleaved=True, divide_logits=True),
    "minimax-m2": Variant(defaults=NORMALISED),
    "exaone": Variant(),
    "exaone4": Variant(pre_norm=False, defaults=EXAONE4, rotates=_only_local),
    "nemotron": Variant(ungated="squared_relu"),
    "smollm3": Variant(interleaved=True, rotates=_three_of_four),
    "seed_oss": Variant(ffn_norm="post_attention_norm"),
    "bailingmoe": Variant(interleaved=True),
    "bailingmoe2": Variant(defaults=SIGMOID_ROUTER),
    "mimo2": Variant(defaults=NORMALISED | SIGMOID_ROUTER, local_rope=True, drafts_unnormed=True, drafts_chained=False),
    "olmoe": Variant(),
    "arcee": Variant(interleaved=True, ungated="squared_relu"),
    "granitemoe": Variant(interleaved=True, defaults=NORMALISED, divide_logits=True),
    "exaone-moe": Variant(defaults=EXAONE4 | SIGMOID_ROUTER, rotates=_only_local),
    "dots1": Variant(defaults=SIGMOID_ROUTER),
    "minimax-m3": Variant(defaults=NORMALISED | SIGMOID_ROUTER, activation="clamped_swish"),
    "step35": Variant(
        defaults=NORMALISED | SIGMOID_ROUTER, local_rope=True, half_rope=True, activation="clamped_silu", drafts_unnormed=True
    ),
    "llama4": Variant(
        interleaved=True,
        defaults=LLAMA4,
        rotates=_three_of_four_if_chunked,
        chunked=True,
        head_norms=_but_of_128_experts,
        temperature_offset=1,
        weigh_inputs=True,
    ),
    "gemma": Variant(activation="gelu", embedding_scale=math.sqrt),
    "olmo": Variant(interleaved=True, norm_weights=False),
    "apertus": Variant(ungated="xielu"),
    "jais2": Variant(ungated="squared_relu"),
    "phimoe": Variant(norm="layer", gating="sparse_mixer", defaults={"expert_router_jitter": 0.01}),
    "hy_v3": Variant(defaults=NORMALISED | SIGMOID_ROUTER),
    "laguna": Variant(defaults=NORMALISED | SIGMOID_ROUTER, local_rope=True, attention_gate="softplus"),
    "mellum": Variant(defaults=NORMALISED | COHERE2, local_rope=True),
    "muse-glimmer": Variant(interleaved=True, defaults=COHERE2, rotates=_only_local, embedding_norm=True, post_epsilon=1e-8),
    "afmoe": Variant(defaults=AFMOE, embedding_scale=math.sqrt, rotates=_only_local),
    **dict.fromkeys(("cohere2moe", "cohere2_moe"), COHERE2_MOE),
    "modern-bert": Variant(
        defaults={"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 10000.0},
        activation="gelu_erf",
        local_rope=True,
        has_head=False,
        first_global=True,
    ),
    "gemma-embedding": Variant(defaults=GEMMA3, activation="gelu", embedding_scale=math.sqrt, local_rope=True, has_head=False),
    "gpt2": Variant(rotates=_no_layer),
    "gptneox": Variant(ungated="gelu_erf", parallel=None),
    "falcon": Variant(ungated="gelu_erf", parallel=True),
    "bloom": Variant(rotates=_no_layer, alibi=_alibi_always),
    "mpt": Variant(ungated="gelu_erf", rotates=_no_layer),
    "dbrx": Variant(defaults=NORMALISED, ffn_norm="attn_output_norm"),
    "stablelm": Variant(parallel_unnormed=True),
    "phi2": Variant(parallel=True),
    "baichuan": Variant(interleaved=True, alibi=_alibi_of_13b),
    "chatglm": Variant(interleaved=True),
}


@dataclass(frozen=True)
class Encoder:
    """What the architecture's name says. rotates: whether queries and keys are rotated; alibi: the largest of the linear
    biases; activation: of a feed-forward block with a gate."""

    rotates: bool = False
    alibi: float = 0.0
    activation: str = "gelu_erf"


ENCODERS = {
    "bert": Encoder(),
    "nomic-bert": Encoder(rotates=True, activation="silu"),
    "nomic-bert-moe": Encoder(rotates=True),
    "jina-bert-v2": Encoder(alibi=8.0),
    "jina-bert-v3": Encoder(rotates=True),
}
