"""Nemotron-H and Nemotron 3: each layer is a state space (Mamba-2), attention, a feed-forward block, or experts."""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...expert_transforms import stack_experts
from ...model_spec import ModelSpec
from ..decoder_spec import MAX_EXPERTS, SIGMOID_GATING, CheckpointNames, DecoderSpec, LayerTensor, linear
from .layers import add_key_value_heads
from .state_space import Mamba2

MAMBA2 = {"heads": "mamba_num_heads", "width": "mamba_head_dim", "groups": "n_groups", "size": "ssm_state_size"}
MAMBA2 |= {"kernel": "conv_kernel"}
STATE_SPACE, ATTENTION, BLOCK, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": STATE_SPACE, "*": ATTENTION, "-": BLOCK, "E": EXPERTS}  # of hybrid_override_pattern
TYPES = {name: name for name in LETTERS.values()} | {"mamba": STATE_SPACE, "attention": ATTENTION}
NAMES = CheckpointNames("backbone.layers.{}", "backbone.embeddings.weight", "backbone.norm_f.weight")
_ATTENTION = {part: f"mixer.{part}_proj" for part in "qkv"} | {"output": "mixer.o_proj"}
_RMS_NORM = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
_DEFAULTS = {"head_dim": 128, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "layer_norm_epsilon": 1e-5}


def nemotron_h(config: Config, mla_layout: str) -> ModelSpec:
    """nemotron_h, or nemotron_h_moe where layers have experts. Raises FormatError for settings that cannot be converted.

    The lower bound of steps, time_step_min, is not in a GGUF: llama.cpp computes without it.
    """
    for key, supported, what in (
        ("mlp_hidden_act", "relu2", "this activation"),
        ("mamba_hidden_act", "silu", "this activation"),
        ("use_bias", False, "a model with biases"),
        ("mamba_proj_bias", False, "a model with biases"),
        ("attention_bias", False, "a model with biases"),
        ("sliding_window", None, "a sliding window"),
    ):
        config.require(key, supported, what)
    types = _layer_types(config)
    config = config.with_defaults(_DEFAULTS | {"head_dim": config.get("attention_head_dim", 128)})
    config = config.with_values({"num_hidden_layers": len(types), "rope_parameters": None, "partial_rotary_factor": None})
    has_experts = EXPERTS in types
    spec = DecoderSpec("nemotron_h_moe" if has_experts else "nemotron_h", config, norm=_RMS_NORM)
    spec.add_float32(
        {"attention.layer_norm_epsilon": config.number("layer_norm_epsilon", positive=True)}
    )  # llama.cpp needs both
    spec.renamed_prefixes = {"model.": "backbone."}
    spec.skipped_prefixes["mtp."] = "multi-token prediction layers"
    rows = config.integer("moe_intermediate_size") if has_experts else spec.intermediate_size
    lengths = [{BLOCK: spec.intermediate_size, EXPERTS: rows}.get(t, 0) for t in types]
    spec.metadata[f"{spec.architecture}.feed_forward_length"] = np.array(lengths, np.uint32)
    add_key_value_heads(spec, [t == ATTENTION for t in types])
    sizes = Mamba2.of(config, MAMBA2)
    sizes.add_metadata(spec)
    mixers = {
        STATE_SPACE: sizes.tensors(spec, "mixer", conv_bias=config.flag("use_conv_bias", True)),
        ATTENTION: spec.attention(_ATTENTION),
        BLOCK: _block(spec, "mixer", spec.intermediate_size, config.flag("mlp_bias", False)),
    }
    if has_experts:
        config.require("mlp_bias", False, "experts with biases")
        mixers[EXPERTS] = _experts(spec, rows)
    return spec.build(lambda i: [spec.norm("attn_norm", "norm"), *mixers[types[i]]], NAMES)


def _layer_types(config: Config) -> list[str]:
    pattern = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    known = LETTERS if isinstance(pattern, str) else TYPES
    if not isinstance(pattern, str | list) or not pattern or any(str(t) not in known for t in pattern):
        raise config.error(f"layers_block_type is {pattern!r:.80}; one of {', '.join(known)} is needed for each layer")
    if len(pattern) > config.n_stored:
        raise config.error(f"{len(pattern)} layers, more than the {config.n_stored} tensors that are stored")
    return [known[t] for t in pattern]


def _block(spec: DecoderSpec, source: str, rows: int, bias: bool = False, suffix: str = "") -> list[LayerTensor]:
    """A feed-forward block without a gate."""
    up = linear(f"ffn_up{suffix}", f"{source}.up_proj", (rows, spec.hidden_size), bias=bias)
    return [*up, *linear(f"ffn_down{suffix}", f"{source}.down_proj", (spec.hidden_size, rows), bias=bias)]


def _experts(spec: DecoderSpec, rows: int) -> list[LayerTensor]:
    """Experts without gates, by sigmoid plus bias, and a shared one; they may read a latent instead of the layer's input."""
    config, architecture = spec.config, spec.architecture
    n, used = config.integer("n_routed_experts"), config.integer("num_experts_per_tok")
    if not used <= n <= min(MAX_EXPERTS, config.n_stored):
        raise config.error(f"{used} of {n} experts (num_experts_per_tok, n_routed_experts) cannot be")
    shared, groups = config.integer("moe_shared_expert_intermediate_size"), config.integer("n_group", 1)
    counts = {"count": n, "used_count": used, "feed_forward_length": rows, "shared_feed_forward_length": shared}
    counts |= {"shared_count": config.integer("n_shared_experts", 1), "gating_func": SIGMOID_GATING, "group_count": groups}
    spec.add_uint32({f"expert_{key}": value for key, value in counts.items()})
    if groups > 1:
        spec.add_uint32({"expert_group_used_count": config.integer("topk_group", 1)})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata[f"{architecture}.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    latent, latents = spec.hidden_size, []
    if config.get("moe_latent_size") is not None:
        latent = config.integer("moe_latent_size")
        spec.add_uint32({"moe_latent_size": latent})
        latents = linear("ffn_latent_down", "mixer.fc1_latent_proj", (latent, spec.hidden_size))
        latents += linear("ffn_latent_up", "mixer.fc2_latent_proj", (spec.hidden_size, latent))
    bias = LayerTensor("exp_probs_b.bias", "mixer.gate.e_score_correction.bias", (n,))
    return [
        LayerTensor("ffn_gate_inp.weight", "mixer.gate.weight", (n, spec.hidden_size)),
        LayerTensor("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", (n,), alternative=bias),
        *latents,
        LayerTensor("ffn_up_exps.weight", "mixer.experts.{}.up_proj.weight", (rows, latent), stack_experts, n),
        LayerTensor("ffn_down_exps.weight", "mixer.experts.{}.down_proj.weight", (latent, rows), stack_experts, n),
        *_block(spec, "mixer.shared_experts", shared, suffix="_shexp"),
    ]
