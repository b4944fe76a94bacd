"""Llama and what is built like it (Llama 2 and 3, Mistral, TinyLlama, ...): dense, grouped-query attention, SwiGLU."""

from __future__ import annotations

from functools import partial

from .checkpoint import Description, Wanted
from .config import Config
from .edits import constant, interleaved, plain
from .metadata import Rope, common, counts, llama3_factors, read_rope, rope_scaling

ARCHITECTURE = "llama"


def describe(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors of a Llama. Raises FormatError for what config.json says that cannot be converted."""
    notes: list[str] = []
    config.expect("hidden_act", "silu", "this activation")
    rope = read_rope(config)
    heads = config.integer("num_attention_heads")
    heads_kv = config.integer("num_key_value_heads", heads)
    head_size = config.integer("head_dim", config.integer("hidden_size") // heads)
    if heads % heads_kv or head_size % 2:
        raise config.fail(f"{heads} heads over {heads_kv} key-value heads of {head_size} elements cannot be")

    metadata = common(ARCHITECTURE, config, rope)
    metadata |= counts(ARCHITECTURE, {"attention.head_count_kv": heads_kv, "rope.dimension_count": head_size})
    if config.get("head_dim") is not None:
        metadata |= counts(ARCHITECTURE, {"attention.key_length": head_size, "attention.value_length": head_size})
    metadata |= rope_scaling(ARCHITECTURE, rope, notes)
    window = config.get("sliding_window")
    if isinstance(window, int) and window < config.integer("max_position_embeddings"):
        notes.append(f"the sliding window of {window} tokens is left out: GGUF's llama attends to the whole context")

    left_out = {}
    if config.flag("tie_word_embeddings", False):
        left_out["lm_head.weight"] = "output tied to the embeddings"
    wanted = _tensors(config, rope, heads, heads_kv, head_size)
    return Description(ARCHITECTURE, metadata, wanted, config.integer("vocab_size"), left_out, notes)


def _tensors(config: Config, rope: Rope, heads: int, heads_kv: int, head_size: int) -> list[Wanted]:
    n_vocab, hidden, inner = (config.integer(k) for k in ("vocab_size", "hidden_size", "intermediate_size"))
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    # GGUF name, name in the checkpoint, [rows, columns], has a bias, edit
    projections = (
        ("attn_q", "self_attn.q_proj", (heads * head_size, hidden), attention_bias, interleaved(heads)),
        ("attn_k", "self_attn.k_proj", (heads_kv * head_size, hidden), attention_bias, interleaved(heads_kv)),
        ("attn_v", "self_attn.v_proj", (heads_kv * head_size, hidden), attention_bias, plain),
        ("attn_output", "self_attn.o_proj", (hidden, heads * head_size), attention_bias, plain),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), mlp_bias, plain),
        ("ffn_up", "mlp.up_proj", (inner, hidden), mlp_bias, plain),
        ("ffn_down", "mlp.down_proj", (hidden, inner), mlp_bias, plain),
    )
    is_tied = config.flag("tie_word_embeddings", False)
    wanted = []
    if rope.kind == "llama3":
        factors = partial(llama3_factors, config, rope, head_size)
        wanted.append(Wanted("rope_freqs.weight", (), (head_size // 2,), constant(factors)))
    other_name = "lm_head.weight" if is_tied else None
    wanted.append(Wanted("token_embd.weight", ("model.embed_tokens.weight",), (n_vocab, hidden), or_else=other_name))
    for i in range(config.count("num_hidden_layers")):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        wanted.append(Wanted(f"{block}.attn_norm.weight", (f"{layer}.input_layernorm.weight",), (hidden,)))
        for name, source, shape, has_bias, edit in projections:
            if name == "ffn_gate":
                wanted.append(Wanted(f"{block}.ffn_norm.weight", (f"{layer}.post_attention_layernorm.weight",), (hidden,)))
            wanted.append(Wanted(f"{block}.{name}.weight", (f"{layer}.{source}.weight",), shape, edit))
            if has_bias:
                wanted.append(Wanted(f"{block}.{name}.bias", (f"{layer}.{source}.bias",), shape[:1], edit))
    wanted.append(Wanted("output_norm.weight", ("model.norm.weight",), (hidden,)))
    if not is_tied:
        wanted.append(Wanted("output.weight", ("lm_head.weight",), (n_vocab, hidden)))
    return wanted
