"""DBRX (Databricks): LayerNorm without biases, limited queries, keys and values, a mixture of experts in every layer."""

from __future__ import annotations

from ...config import Config
from ...expert_transforms import split_experts, split_transposed_experts
from ...model_spec import ModelSpec
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor, linear

NAMES = CheckpointNames("transformer.blocks.{}", "transformer.wte.weight", "transformer.norm_f.weight")
OLD_KEYS = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
OLD_KEYS |= {"max_position_embeddings": "max_seq_len"}
# in the GGUF -> in the checkpoint, where the down matrices are stored transposed
EXPERTS = {"gate": "w1", "up": "v1", "down": "w2"}


def dbrx(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    attention, block = config.section("attn_config"), config.section("ffn_config")
    activation = block.get("ffn_act_fn") or {"name": "silu"}
    if activation != {"name": "silu"}:
        raise config.error(f"ffn_act_fn is {activation!r:.60}: this activation cannot be converted, only {{'name': 'silu'}}")
    norm = block.get("moe_normalize_expert_weights", 1.0 if "moe_normalize_expert_weights" not in block.values else None)
    if norm not in (None, 1):
        raise config.error(f"moe_normalize_expert_weights is {norm!r:.60}: this norm of weights cannot be converted, only 1")
    values = {key: config.get(old) for key, old in OLD_KEYS.items() if config.get(old) is not None}
    values |= {"num_key_value_heads": attention.integer("kv_n_heads", 1), "intermediate_size": block.integer("ffn_hidden_size")}
    values |= {"num_experts": block.integer("moe_num_experts"), "num_experts_per_tok": block.integer("moe_top_k")}
    config = config.with_defaults({"rope_theta": attention.get("rope_theta")}).with_values(values | {"layer_norm_eps": 1e-5})
    spec = DecoderSpec("dbrx", config, norm=("attention.layer_norm_epsilon", "layer_norm_eps"))
    if attention.get("clip_qkv") is not None:
        spec.add_float32({"attention.clamp_kqv": attention.number("clip_qkv", positive=True)})
    n = spec.add_expert_counts("num_experts", spec.intermediate_size, layers=0)
    if norm is None:
        spec.metadata["dbrx.expert_weights_norm"] = False
        spec.notes.append("experts' weights are not normalised here (moe_normalize_expert_weights); llama.cpp normalises them")
    size, rows = spec.hidden_size, spec.intermediate_size
    transforms = {"gate": split_experts(n), "up": split_experts(n), "down": split_transposed_experts(n)}
    layer = [
        spec.norm("attn_norm", "norm_attn_norm.norm_1"),
        *linear("attn_qkv", "norm_attn_norm.attn.Wqkv", (size + 2 * spec.n_kv_heads * spec.head_dim, size)),
        *linear("attn_output", "norm_attn_norm.attn.out_proj", (size, size)),
        spec.norm("attn_output_norm", "norm_attn_norm.norm_2"),
        LayerTensor("ffn_gate_inp.weight", "ffn.router.layer.weight", (n, size)),
        *(
            LayerTensor(f"ffn_{part}_exps.weight", f"ffn.experts.mlp.{source}", (n * rows, size), transforms[part])
            for part, source in EXPERTS.items()
        ),
    ]
    return spec.build(layer, NAMES)
