"""Hunyuan: queries and keys are normalised after their rotation; dense, or with experts beside a shared one (A13B)."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline, Part

EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
STRETCHED = 256 * 1024  # tokens that the stretched rotation is made for; max_position_embeddings does not say so


def hunyuan_moe(config: Config, mla_layout: str) -> Description:
    """Hunyuan-A13B. Raises FormatError for what config.json says that cannot be converted."""
    config = _alike(config, "moe_topk", "moe_intermediate_size", "num_shared_expert", "num_experts")
    outline = _outline("hunyuan-moe", config)
    inner = config.integer("moe_intermediate_size", outline.inner)
    if inner != outline.inner:
        raise config.fail(f"moe_intermediate_size is {inner}; it has to be intermediate_size, which is {outline.inner}")
    experts = outline.expert_counts("num_experts", inner, used="moe_topk")
    shared = config.integer("num_shared_expert", 1)
    outline.count({"expert_shared_count": shared, "expert_shared_feed_forward_length": shared * inner})
    feed_forward = [
        *outline.routed(experts, inner, EXPERTS, "mlp.gate.wg"),
        *outline.gated("mlp.shared_mlp", shared * inner, "_shexp"),
    ]
    return outline.describe(_layer(outline, feed_forward))


def hunyuan_dense(config: Config, mla_layout: str) -> Description:
    """The dense models of 0.5 B to 7 B. Raises FormatError for what config.json says that cannot be converted."""
    outline = _outline("hunyuan-dense", config)
    return outline.describe(_layer(outline, outline.gated()))


def _alike(config: Config, *keys: str) -> Config:
    """These keys may be lists with a value for each layer; GGUF takes one for all."""
    values = {}
    for key in keys:
        value = config.get(key)
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise config.fail(f"{key} is {value!r:.60}; only the same value for every layer can be converted")
            values[key] = value[0]
    return Config(config.path, config.values | values, config.n_stored)


def _outline(architecture: str, config: Config) -> Outline:
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("use_qk_norm", True, "attention without normalised queries and keys"),
        ("use_cla", False, "attention across layers"),
        ("mlp_bias", False, "biases in the feed-forward block"),
    ):
        config.expect(key, supported, what)
    outline = Outline(architecture, config)
    rope = outline.rope
    if rope.kind == "dynamic" and rope.settings.get("alpha") is not None:
        # NTK-aware scaling by a fixed alpha: the base is stretched, once and for all lengths, so that nothing is left out.
        alpha, size = rope.settings.real("alpha", positive=True), outline.head
        outline.notes.clear()
        outline.real({"rope.freq_base": rope.theta * alpha ** (size / (size - 2)), "rope.scaling.factor": 1.0})
        outline.metadata[f"{architecture}.rope.scaling.type"] = "none"
        outline.count({"rope.scaling.original_context_length": STRETCHED, "context_length": STRETCHED})
    return outline


def _layer(outline: Outline, feed_forward: list[Part]) -> list[Part]:
    bias = outline.config.flag("attention_bias", False)
    return [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=bias, output_bias=bias),
        outline.norm("attn_q_norm", "self_attn.query_layernorm", outline.head),
        outline.norm("attn_k_norm", "self_attn.key_layernorm", outline.head),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]
