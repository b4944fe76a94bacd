"""Scales of whole matrices, which GGUF files of llama.cpp keep as tensors NAME.scale beside NAME.weight (nvfp4)."""

from __future__ import annotations

# Matrices NAME.weight of a layer for which llama.cpp looks for a tensor NAME.scale (llama-model.cpp, load_tensors); a file with
# such a tensor for another matrix is not loaded.
SCALED_MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    *("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    *("ssm_in", "ssm_out", "ssm_alpha", "ssm_beta", "nextn.eh_proj", "nextn.shared_head_head"),
)
