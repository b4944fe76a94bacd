"""LongCat-Flash (Meituan, arXiv:2509.01322): latent attention; layers of two sub-layers, over both of which one mixture of
experts goes; experts that return their input.

Neither llama.cpp nor ik_llama.cpp has this architecture. The file has the names and layouts of deepseek2: every sub-layer is a
block; the even ones have a dense block next to the experts, whose result is added after the odd one. The factors of the latents
are multiplied into their norms. Keys of its own: expert_zero_count, the experts that return their input, which are the last
rows of the router and have no matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...config import Config
from ...metadata import hparam_keys, uint32_keys
from ...model_spec import ModelSpec, TensorSpec
from ...rope import rope_scaling_keys
from ...tensor_transforms import scaled
from ..decoder_spec import expert_stacks
from .deepseek import LatentSizes, attention_keys, attention_tensors, latent_attention, latent_rope

NAME = "longcat-flash"
DEFAULTS = {"intermediate_size": "ffn_hidden_size", "moe_intermediate_size": "expert_ffn_hidden_size"}
DEFAULTS |= {"num_experts_per_tok": "moe_topk"}


def longcat_flash(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("router_bias", False, "a bias of the router"),
        ("zero_expert_type", "identity", "this kind of expert"),
        ("tie_word_embeddings", False, "an output tied to the embeddings"),
        ("mla_scale_q_lora", True, "a latent without a factor"),
        ("mla_scale_kv_lora", True, "a latent without a factor"),
    ):
        config.require(key, supported, what)
    n_layers = config.count("num_layers", config.integer("num_hidden_layers", 56) // 2)
    config = config.with_defaults({key: config.get(own) for key, own in DEFAULTS.items()})
    config = config.with_values({"num_hidden_layers": 2 * n_layers}).with_defaults({"rope_theta": 1e7})
    attention, rope, notes = latent_attention(config), latent_rope(config), list[str]()
    experts, zeros = config.count("n_routed_experts", layers=0), config.integer("zero_expert_num", 0, minimum=0)
    used = config.integer("num_experts_per_tok")
    if used > experts + zeros:
        raise config.error(f"moe_topk is {used}, more than the {experts + zeros} experts")
    metadata = hparam_keys(NAME, config, rope) | attention_keys(NAME, attention, mla_layout)
    counts = {"expert_count": experts, "expert_zero_count": zeros, "expert_used_count": used, "expert_gating_func": 1}
    counts |= {"expert_feed_forward_length": config.integer("moe_intermediate_size")}
    metadata |= uint32_keys(NAME, counts | {"rope.dimension_count": attention.rope_dim})
    metadata[f"{NAME}.expert_weights_scale"] = np.float32(config.number("routed_scaling_factor", 1.0, positive=True))
    metadata[f"{NAME}.expert_weights_norm"] = False
    metadata |= rope_scaling_keys(NAME, rope, notes, latent=True)
    tensors = list(_tensors(config, attention, mla_layout, n_layers, experts, zeros))
    skipped = {"model.mtp.": "multi-token prediction"}
    # transformers writes gate and up matrices for them too, which nothing reads
    stored = [f"model.layers.{i}.mlp.experts.{experts + k}." for i in range(n_layers) for k in range(zeros)]
    skipped |= dict.fromkeys(stored, "matrices of an expert that returns its input")
    notes.append("neither llama.cpp nor ik_llama.cpp knows this architecture: its names are those of deepseek2")
    return ModelSpec(NAME, metadata, tensors, config.integer("vocab_size"), skipped, notes)


def _tensors(
    config: Config, attention: LatentSizes, mla_layout: str, n_layers: int, experts: int, zeros: int
) -> Iterator[TensorSpec]:
    vocab_size, size = config.integer("vocab_size"), config.integer("hidden_size")
    dense, rows = config.integer("intermediate_size"), config.integer("moe_intermediate_size")
    factors = {"attn_q_a_norm": (size / attention.q_rank) ** 0.5, "attn_kv_a_norm": (size / attention.kv_rank) ** 0.5}
    yield TensorSpec("token_embd.weight", ("model.embed_tokens.weight",), (vocab_size, size))
    for number in range(2 * n_layers):
        i, half = divmod(number, 2)
        block, layer = f"blk.{number}", f"model.layers.{i}"
        yield TensorSpec(f"{block}.attn_norm.weight", (f"{layer}.input_layernorm.{half}.weight",), (size,))
        for tensor in attention_tensors(attention, mla_layout, size, block, f"{layer}.self_attn.{half}"):
            factor = factors.get(tensor.name.split(".")[2])
            yield tensor if factor is None else replace(tensor, transform=scaled(factor))
        yield TensorSpec(f"{block}.ffn_norm.weight", (f"{layer}.post_attention_layernorm.{half}.weight",), (size,))
        for part in ("gate", "up", "down"):
            shape = (size, dense) if part == "down" else (dense, size)
            yield TensorSpec(f"{block}.ffn_{part}.weight", (f"{layer}.mlps.{half}.{part}_proj.weight",), shape)
        if half == 0:
            router = f"{layer}.mlp.router"
            yield TensorSpec(f"{block}.ffn_gate_inp.weight", (f"{router}.classifier.weight",), (experts + zeros, size))
            yield TensorSpec(f"{block}.exp_probs_b.bias", (f"{router}.e_score_correction_bias",), (experts + zeros,))
            for stack in expert_stacks(experts, rows, size):
                yield stack.spec(block, layer)
    yield TensorSpec("output_norm.weight", ("model.norm.weight",), (size,))
    yield TensorSpec("output.weight", ("lm_head.weight",), (vocab_size, size))
