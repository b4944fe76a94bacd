"""Two models of two layers with random weights, without a vocabulary: grouped-query attention and latent attention."""

import numpy as np

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode

N_EMBD, N_HEAD, WIDTH, N_FF, N_VOCAB, RANK = 64, 4, 32, 96, 96, 64


def source_of(metadata, shapes, type_name="f32"):
    """Random weights in the given type; vectors are float32, near 1."""
    rng = np.random.default_rng(11)
    tensors = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape[::-1], dtype=np.float32)
        x = 1 + 0.2 * x if x.ndim == 1 else x / np.sqrt(shape[0])
        kind = TYPES[type_name if x.ndim > 1 and "gate_inp" not in name else "f32"]
        rows = np.ascontiguousarray(x.reshape(-1, shape[0]), np.float32)
        tensors[name] = source_tensor(name, shape, kind, encode(rows, kind.name))
    return TensorSource("test model", metadata, tensors, "test")


def source_tensor(name, shape, kind, stored):
    def read(start, stop):
        return decode(stored[start:stop], kind.name, shape[0])

    return SourceTensor(name, shape, kind.name, read, lambda start, stop: stored[start:stop], kind)


def llama(type_name="f32", experts=0, n_kv=2, width=WIDTH):
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": N_EMBD,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": N_HEAD,
        "llama.attention.head_count_kv": n_kv,
        "llama.attention.key_length": width,
        "llama.attention.value_length": width,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width,
        "llama.expert_count": experts,
        "llama.expert_used_count": 4,
    }
    shapes = {"token_embd.weight": (N_EMBD, N_VOCAB), "output_norm.weight": (N_EMBD,), "output.weight": (N_EMBD, N_VOCAB)}
    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (N_EMBD,),
            f"blk.{i}.attn_q.weight": (N_EMBD, N_HEAD * width),
            f"blk.{i}.attn_k.weight": (N_EMBD, n_kv * width),
            f"blk.{i}.attn_v.weight": (N_EMBD, n_kv * width),
            f"blk.{i}.attn_output.weight": (N_HEAD * width, N_EMBD),
            f"blk.{i}.ffn_norm.weight": (N_EMBD,),
            f"blk.{i}.ffn_gate{suffix}.weight": (N_EMBD, N_FF, *stack),
            f"blk.{i}.ffn_up{suffix}.weight": (N_EMBD, N_FF, *stack),
            f"blk.{i}.ffn_down{suffix}.weight": (N_FF, N_EMBD, *stack),
        }
        if experts:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (N_EMBD, experts)
    return source_of(metadata, shapes, type_name)


def latent(rank=RANK, type_name="f32"):
    metadata = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 2,
        "deepseek2.context_length": 512,
        "deepseek2.embedding_length": N_EMBD,
        "deepseek2.feed_forward_length": N_FF,
        "deepseek2.leading_dense_block_count": 2,
        "deepseek2.attention.head_count": N_HEAD,
        "deepseek2.attention.kv_lora_rank": rank,
        "deepseek2.attention.key_length": 2 * WIDTH,
        "deepseek2.attention.value_length": WIDTH,
        "deepseek2.rope.dimension_count": WIDTH,
        "deepseek2.attention.layer_norm_rms_epsilon": 1e-5,
        "deepseek2.expert_count": 2,
    }
    shapes = {"token_embd.weight": (N_EMBD, N_VOCAB), "output_norm.weight": (N_EMBD,), "output.weight": (N_EMBD, N_VOCAB)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (N_EMBD,),
            f"blk.{i}.attn_q.weight": (N_EMBD, N_HEAD * 2 * WIDTH),
            f"blk.{i}.attn_kv_a_mqa.weight": (N_EMBD, rank + WIDTH),
            f"blk.{i}.attn_kv_a_norm.weight": (rank,),
            f"blk.{i}.attn_kv_b.weight": (rank, N_HEAD * 2 * WIDTH),
            f"blk.{i}.attn_output.weight": (N_HEAD * WIDTH, N_EMBD),
            f"blk.{i}.ffn_norm.weight": (N_EMBD,),
            f"blk.{i}.ffn_gate.weight": (N_EMBD, N_FF),
            f"blk.{i}.ffn_up.weight": (N_EMBD, N_FF),
            f"blk.{i}.ffn_down.weight": (N_FF, N_EMBD),
        }
    return source_of(metadata, shapes, type_name)
