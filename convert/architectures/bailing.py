"""Ling and Bailing (inclusionAI): a Llama's attention in one matrix, experts by softmax in every layer beside shared ones."""

from __future__ import annotations

import numpy as np

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import Edit, run_of_rows
from .decoder_spec import Names, Outline, Part

NAMES = Names(embedding="model.word_embeddings.weight")
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}


def bailing(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("use_bias", False, "a model with biases"),
        ("use_qkv_bias", False, "a model with biases"),
        ("norm_softmax", False, "logits with normalised rows of the output"),
        ("norm_head", False, "logits with normalised rows of the output"),
        ("multi_gate", False, "several routers"),
        ("first_k_dense_replace", 0, "dense layers"),
        ("score_function", "softmax", "this choice of experts"),
    ):
        config.expect(key, supported, what)
    outline = Outline("bailingmoe", config)
    if outline.rotary != outline.head:
        raise config.fail("rotating a part of each head cannot be converted for this architecture")
    inner, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", 0, least=0)
    n = outline.expert_counts("num_experts", inner)
    outline.count({"leading_dense_block_count": 0, "expert_shared_count": shared})
    outline.real({"expert_weights_scale": 1.0})
    outline.metadata["bailingmoe.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *_attention(outline),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.routed(n, inner, EXPERTS),
        *(outline.gated("mlp.shared_experts", inner * shared, "_shexp") if shared else ()),
    ]
    return outline.describe(layer, NAMES)


def _attention(outline: Outline) -> list[Part]:
    size, q, kv = outline.head, outline.heads * outline.head, outline.heads_kv * outline.head
    shape = (q + 2 * kv, outline.hidden)

    def pairs(rows: np.ndarray) -> np.ndarray:
        """Rows in the order in which neighbours are rotated together (as edits.interleaved)."""
        head, at = np.divmod(rows, size)
        return head * size + at % 2 * (size // 2) + at // 2

    edits: dict[str, Edit] = {"q": run_of_rows(0, q, pairs), "k": run_of_rows(q, kv, pairs), "v": run_of_rows(q + kv, kv)}
    return [
        *(Part(f"attn_{p}.weight", "attention.query_key_value.weight", shape, edit) for p, edit in edits.items()),
        Part("attn_output.weight", "attention.dense.weight", (outline.hidden, q)),
    ]
