"""Facts about files that llama.cpp and ik_llama.cpp do not load, or compute otherwise than the model's own code.

Found by loading the tests' tiny models in both, and comparing logits or perplexities: llama.cpp 0c1e5709 (of llama-cpp-python
0.3.36) and ik_llama.cpp 8337e4cd.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..data_classes import dataclass
from .metadata_values import BYTE
from .types import TensorType

LLAMA_CPP, IK_LLAMA_CPP = "llama.cpp", "ik_llama.cpp"


@dataclass(frozen=True)
class LoaderTensor:
    """A tensor as its header has it: shape in ne order."""

    shape: tuple[int, ...]
    type: TensorType


Tensors = Mapping[str, LoaderTensor]


ANY = "*"
_PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Fact:
    """What a program does with files of some architectures for which `holds` is true.

    architectures  names, separated by spaces, or ANY; programs: of those with facts of their own
    holds          (metadata without the architecture's prefix, tensors) -> whether it concerns the file
    says           what comes of it
    """

    programs: tuple[str, ...]
    architectures: str
    holds: Callable[[Mapping[str, Any], Tensors], bool]
    says: str


def _has(pattern: str) -> Callable[[Mapping[str, Any], Tensors], bool]:
    return lambda keys, tensors: any(re.fullmatch(pattern, name) for name in tensors)  # compiled when it is asked


def _lacks(pattern: str) -> Callable[[Mapping[str, Any], Tensors], bool]:
    has = _has(pattern)
    return lambda keys, tensors: not has(keys, tensors)


def _unread(pattern: str, programs: tuple[str, ...], architectures: str, what: str) -> Fact:
    return Fact(programs, architectures, _has(pattern), f"it does not read {what}, and ends at tensors that it does not know")


def _is(key: str, value: object) -> Callable[[Mapping[str, Any], Tensors], bool]:
    return lambda keys, tensors: key in keys and keys[key] == value


def _betas_but_of(*architectures: str) -> Callable[[Mapping[str, Any], Tensors], bool]:
    """Ends of yarn's ramp, in models of other architectures."""
    names = [f"rope.scaling.yarn_beta_{end}" for end in ("fast", "slow")]
    return lambda keys, tensors: any(n in keys for n in names) and keys.get("general.architecture") not in architectures


def _needed(pattern: str, programs: tuple[str, ...], architectures: str, what: str) -> Fact:
    return Fact(programs, architectures, _lacks(pattern), f"it needs {what}")


def _head_rotation(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """rope_freqs of another length than heads of n_embd / n_head numbers have."""
    freqs = tensors.get("rope_freqs.weight")
    width = int(keys.get("embedding_length", 0)) // max(1, int(np.max(keys.get("attention.head_count", 1))))
    return freqs is not None and freqs.shape[0] != width // 2


def _dense_among_experts(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """A layer without a router after the leading dense ones."""
    layers = range(int(keys.get("leading_dense_block_count", 0)), _layers(keys))
    return any(f"blk.{i}.ffn_gate_inp.weight" not in tensors for i in layers)


def _unselected(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """Indexers in a model without windows."""
    return "swa_layers" not in keys and any(name.endswith(".attn_indexer_k.weight") for name in tensors)


def _router_without_bias(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    routers = [name for name in tensors if name.endswith(".ffn_gate_inp.weight")]
    return any(f"{name.removesuffix('ffn_gate_inp.weight')}exp_probs_b.bias" not in tensors for name in routers)


def _other_order(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """Linear attention in other layers than all but each full_attention_interval-th."""
    period = int(keys.get("full_attention_interval", 4))
    return any((f"blk.{i}.ssm_conv1d.weight" in tensors) != bool((i + 1) % period) for i in range(_layers(keys)))


def _other_ngram_width(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    return any(t.shape[0] != keys.get("embedding_length") for name, t in tensors.items() if name.endswith(".ple_key.weight"))


def _wide_heads(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """Heads that are not embedding_length numbers together."""
    query = tensors.get("blk.0.attn_q.weight")
    return query is not None and query.shape[1] != query.shape[0]


def _no_byte_tokens(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """A SentencePiece vocabulary without <0x00> to <0xFF>."""
    kinds = np.asarray(keys.get("tokenizer.ggml.token_type", ()))
    return keys.get("tokenizer.ggml.model") == "llama" and bool(kinds.size) and not np.any(kinds == BYTE)


def _layers(keys: Mapping[str, Any]) -> int:
    return int(keys.get("block_count", 0)) - int(keys.get("nextn_predict_layers", 0))


def _window(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    return int(keys.get("attention.sliding_window", 0)) > 0


def _all_global(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    return _PATTERN in keys and not np.any(keys[_PATTERN])


def _unshared(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """A router without a shared expert."""
    routers = [name for name in tensors if name.endswith(".ffn_gate_inp.weight")]
    return any(f"{name.removesuffix('ffn_gate_inp.weight')}ffn_up_shexp.weight" not in tensors for name in routers)


def _unbiased(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """A router without a bias, whose groups are weighed by their best expert, not their best two (DeepSeek-V2)."""
    return not any(".exp_probs_b" in name for name in tensors)


def _groups(keys: Mapping[str, Any]) -> bool:
    return int(keys.get("expert_group_count", 0)) > 1


def _odd_blocks(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """Rows of q4_1 or q5_1 whose number of blocks is no multiple of four: SmolLM2 135M, 576 wide, has a perplexity of 132 for
    22.9."""
    return any(t.type.name in ("q4_1", "q5_1") and t.shape[0] % (4 * t.type.block) for t in tensors.values())


def _unrounded(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """Yarn as in gpt-oss's own code, which is what files of it without the key say."""
    return keys.get("rope.scaling.type") == "yarn" and not keys.get("rope.scaling.yarn_truncate", False)


def _other_ratios(keys: Mapping[str, Any]) -> bool:
    return bool(set(np.ravel(keys.get("attention.compress_ratios", 0)).tolist()) - {0, 4, 128})


def _other_factors(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """Other than MiniCPM 3 4B's scale_emb, scale_depth and dim_model_base."""
    layers, width = _layers(keys) or 1, int(keys.get("embedding_length", 0)) or 1
    published = {"embedding_scale": 12.0, "residual_scale": 1.4 / layers**0.5, "logit_scale": 256 / width}
    return any(not np.isclose(float(keys.get(key, value)), value, rtol=1e-5) for key, value in published.items())


def _always(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    return True


_IK, _LC, _LC_IK = (IK_LLAMA_CPP,), (LLAMA_CPP,), (LLAMA_CPP, IK_LLAMA_CPP)
_PLAIN = "gemma gemma2 gemma3 olmo olmo2 olmoe"  # attention without biases
# Rotation without a tensor of factors.
_UNSCALED = f"{_PLAIN} qwen2 qwen2moe qwen3 qwen3moe smollm3 seed_oss dots1 ernie4_5 ernie4_5-moe hunyuan-dense hunyuan-moe"
_QKV_BIASES, _OTHER_GROUPS = "biases of queries, keys and values", "it chooses experts from other groups"
_LATENT = "deepseek2 glm-dsa mistral4"
# Why a file is not loaded.
PROBLEMS = (
    _unread(r"rope_freqs\.weight", _LC_IK, _UNSCALED, "rope_freqs (rope type llama3)"),
    _unread(r"rope_factors_(long|short)\.weight", _LC, _UNSCALED, "the factors of LongRoPE"),
    Fact(_IK, ANY, _is("rope.scaling.type", "longrope"), "it does not know the type of rotary scaling 'longrope'"),
    Fact(_IK, "llama", _head_rotation, "it takes rope_freqs only of heads of embedding_length / head_count numbers"),
    _unread(
        r"blk\.\d+\.attn_output\.bias", _LC_IK, f"qwen3 qwen3moe command-r smollm3 seed_oss {_PLAIN}", "the bias of attn_output"
    ),
    _unread(r"blk\.\d+\.attn_[qkv]\.bias", _IK, f"qwen3 qwen3moe command-r smollm3 {_PLAIN}", _QKV_BIASES),
    _unread(
        r"output\.bias|blk\.\d+\.ffn_(gate|up|down)(_shexp)?\.bias", _LC_IK, "ernie4_5 ernie4_5-moe seed_oss", "these biases"
    ),
    _unread(r"blk\.\d+\.(attn_q_a|attn_kv_a_mqa|attn_output|ffn_\w+)\.bias", _LC_IK, _LATENT, "biases in latent attention"),
    _unread(r"blk\.\d+\.(attn_output|ffn_up|ffn_down)\.bias", _LC, "arcee", "these biases"),
    Fact(
        _LC_IK,
        "command-r",
        lambda keys, tensors: int(keys.get("block_count", 0)) < 64 and _has(r"blk\.\d+\.attn_[qk]_norm\.weight")(keys, tensors),
        "it reads norms of queries and keys only in models of at least 64 layers",
    ),
    _needed(r"output\.weight", _LC_IK, "gpt-oss dots1 stablelm", "an output of its own (output.weight)"),
    _needed(r"output\.weight", _LC, "olmo2 olmoe nemotron minimax-m2 phimoe apertus", "an output of its own (output.weight)"),
    _needed(r"output\.weight", _IK, "chatglm", "an output of its own (output.weight)"),
    _needed(r"blk\.\d+\.attn_qkv\.weight", _IK, "chatglm", "queries, keys and values in one matrix"),
    _needed(r"output\.weight", _IK, "bailingmoe3", "an output of its own (output.weight)"),
    Fact(
        _IK,
        "bailingmoe3",
        lambda keys, tensors: keys.get("attention.value_length_mla") != keys.get("kda.head_dim"),
        "it needs values of latent attention as wide as heads of delta attention (attention.value_length_mla, kda.head_dim)",
    ),
    _unread(r"output\.weight", _LC_IK, "gemma", "an output of its own (output.weight)"),
    _unread(r"blk\.\d+\.attn_output\.bias", _LC_IK, "llama4", "the bias of attn_output"),
    _unread(r"blk\.\d+\.ffn_\w+_shexp\.weight", _IK, "granitemoe", "the shared experts"),
    _unread(r"blk\.\d+\.indexer\..*", _IK, "minimax-m3", "the indexers (convert --mla-layout ik)"),
    _needed(r"blk\.\d+\.attn_output\.bias", _LC, "jais2", "biases"),
    _needed(
        r"blk\.\d+\.ssm_conv1d\.bias",
        _LC,
        "mamba jamba granitehybrid nemotron_h nemotron_h_moe falcon-h1",
        "a bias of the convolution",
    ),
    Fact(_LC_IK, "deepseek2 dots1", _unshared, "it needs a shared expert"),
    Fact(_LC, "cohere2 afmoe", _all_global, "it needs a window in some layer"),
    Fact(
        _IK, "gemma3", lambda keys, tensors: "attention.sliding_window" not in keys, "it needs the key attention.sliding_window"
    ),
    Fact(
        _LC,
        "deepseek4",
        lambda keys, tensors: keys.get("hyper_connection.count", 4) != 4 or _other_ratios(keys),
        "it knows four streams, and entries for 4 and 128 tokens alone",
    ),
    Fact(_LC, "lfm2moe", _router_without_bias, "it needs a bias of the router"),
    Fact(
        _LC,
        "minimax-m3",
        lambda keys, tensors: any(
            f"blk.{i}.ffn_gate_inp.weight" in tensors and f"blk.{i}.indexer.q_proj.weight" not in tensors
            for i in range(_layers(keys))
        ),
        "it needs an indexer in each layer with experts (convert --mla-layout mainline)",
    ),
    Fact(
        _LC,
        "gemma3n",
        lambda keys, tensors: (keys.get("embedding_length_per_layer_input"), keys.get("altup.num_inputs", 4)) != (256, 4),
        "it knows the sizes of the published models only",
    ),
    Fact(_IK, "gpt2 bloom mpt", _always, "its graph of this architecture ends at a check of the norms' epsilon"),
    Fact(_IK, "mamba", _always, "its graph of this architecture ends at a check of shapes"),
    Fact(_IK, "minimax-m3", _always, "its dense block ends at a check of this activation"),
    Fact(
        _IK, "laguna", lambda keys, tensors: "attention.sliding_window" not in keys, "it needs the key attention.sliding_window"
    ),
    _needed(r"output\.bias", _LC, "phimoe", "a bias of the output (output.bias)"),
    _needed(r"blk\.\d+\.attn_(q|qkv)\.bias", _IK, "glm4moe qwen2moe starcoder2", "biases of queries, keys and values"),
    _needed(r"blk\.\d+\.attn_output\.bias", _LC, "starcoder2", "a bias of attn_output"),
    Fact(
        _LC_IK,
        "gpt-oss",
        lambda keys, tensors: "attention.sliding_window" not in keys,
        "it needs the key attention.sliding_window",
    ),
    Fact(
        _IK,
        "phi3",
        lambda keys, tensors: "attention.sliding_window" not in keys and int(keys.get("block_count", 0)) not in (32, 40),
        "it needs the key attention.sliding_window (0: no window)",
    ),
    Fact(
        _IK,
        "gemma2",
        lambda keys, tensors: int(keys.get("block_count", 0)) not in (26, 42, 46),
        "it knows the sizes of the published models only (26, 42 and 46 layers)",
    ),
    Fact(_IK, "starcoder2", _always, "its graph of this architecture ends at a check of the norms' epsilon"),
    Fact(
        _LC_IK,
        "qwen2moe qwen3moe qwen3vlmoe qwen3next ernie4_5-moe mellum",
        _dense_among_experts,
        "it needs experts in all layers after the first dense ones",
    ),
    Fact(_LC_IK, "qwen3next qwen35 qwen35moe", _other_order, "it knows one order of linear and full attention only"),
    _unread(r"blk\.\d+\.attn_[qkv]\.bias", _LC, "qwen4exp", "biases of queries, keys and values"),
    Fact(_LC, "qwen4exp", _other_ngram_width, "it needs embeddings of n-grams of embedding_length numbers together"),
    Fact(_LC, "chatglm", _wide_heads, "it needs heads of embedding_length / head_count numbers"),
    Fact(
        _LC,
        "olmoe",
        lambda keys, tensors: keys.get("attention.head_count_kv", 0) != keys.get("attention.head_count", 0),
        "it needs as many key-value heads as heads",
    ),
    Fact(
        _IK,
        "dbrx",
        lambda keys, tensors: int(keys.get("expert_used_count", 1)) > 1,
        "it takes an expert's feed-forward length for feed_forward_length / expert_used_count",
    ),
    Fact(_IK, "glm4", _wide_heads, "it needs heads of embedding_length / head_count numbers"),
    Fact(
        _IK,
        "glm-dsa",
        lambda keys, tensors: any(len(t.shape) == 2 for name, t in tensors.items() if name.endswith(".attn_k_b.weight")),
        "it needs a matrix for each head in attn_k_b",
    ),
    Fact(
        _LC,
        f"{_LATENT} deepseek32",
        lambda keys, tensors: "attention.key_length_mla" not in keys and _has(r"blk\.\d+\.attn_k_b\.weight")(keys, tensors),
        "its layout of latent attention is another (convert --mla-layout mainline)",
    ),
    Fact(
        _IK,
        _LATENT,
        lambda keys, tensors: "attention.key_length_mla" in keys,
        "its layout of latent attention is another (convert --mla-layout ik)",
    ),
    Fact(
        _IK,
        "deepseek2",
        lambda keys, tensors: "attention.q_lora_rank" not in keys and int(keys.get("block_count", 0)) not in (26, 27),
        "it needs the key attention.q_lora_rank, but in a model of DeepSeek-V2-Lite's layers",
    ),
)
# What is computed otherwise.
DIFFERENCES = (
    Fact(_IK, "openpangu", _unselected, "where no layer has a window it selects no keys"),
    Fact(_LC_IK, ANY, _no_byte_tokens, "it aborts at characters that the vocabulary lacks (there are no byte tokens)"),
    Fact(
        _IK,
        ANY,
        _odd_blocks,
        "on processors, its products of q4_1 and q5_1 with rows of other than a multiple of 128 are wrong",
    ),
    Fact(_LC_IK, "llama qwen2 qwen2moe qwen3 qwen3moe mistral3 smollm3 dots1", _window, "it ignores the sliding window"),
    Fact(_LC, "starcoder2 phi3", _window, "it ignores the sliding window"),
    Fact(_LC, "exaone4", lambda keys, tensors: _window(keys, tensors) and _layers(keys) != 64, "it ignores the sliding window"),
    Fact(
        _LC,
        "llama4",
        lambda keys, tensors: keys.get("attention.sliding_window", 8192) not in (0, 8192),
        "it attends within chunks of 8192 tokens, whatever the file says",
    ),
    Fact(_IK, "gemma3 cohere2 gpt-oss", lambda keys, tensors: _PATTERN in keys, "it knows one pattern of windows"),
    Fact(_LC_IK, "gpt-oss", _unrounded, "it begins and ends the ramp of yarn at whole pairs"),
    Fact(_LC_IK, ANY, _is("rope.scaling.yarn_truncate", False), "it begins and ends the ramp of yarn at whole pairs"),
    Fact(_LC, ANY, _betas_but_of("grok", "mistral3"), "it takes yarn's beta_fast to be 32, and beta_slow to be 1"),
    Fact(_IK, ANY, _betas_but_of("grok", "mistral3", "laguna"), "it takes yarn's beta_fast to be 32, and beta_slow to be 1"),
    Fact(_LC_IK, "deepseek2", _is("rope.scaling.type", "linear"), "it scales rotation otherwise"),
    Fact(_LC, "gemma2 gemma3", lambda keys, tensors: "attention.scale" in keys, "it divides scores as published models do"),
    Fact(_IK, "gemma3", lambda keys, tensors: "final_logit_softcapping" in keys, "it ignores the soft cap of logits"),
    Fact(
        _LC_IK,
        "gpt-oss minimax-m3",
        lambda keys, tensors: "swiglu_clamp_exp" in keys,
        "it takes the activation's limit to be 7",
    ),
    Fact(_LC, "deepseek2", lambda keys, tensors: _groups(keys) and _unbiased(keys, tensors), _OTHER_GROUPS),
    Fact(_LC, "mimo2 kimi-linear", lambda keys, tensors: _groups(keys), _OTHER_GROUPS),
    Fact(_IK, "deepseek2 dots1", lambda keys, tensors: _groups(keys), "it chooses experts without regard to groups"),
    Fact(_LC_IK, "qwen3moe dbrx", _is("expert_weights_norm", False), "it makes weights of experts sum to one"),
    Fact(_LC, "minicpm3", _other_factors, "it takes factors of the published model for embeddings, residuals and logits"),
    Fact(_LC, "phimoe", _always, "its norms and its weights of experts are other ones"),
    Fact(
        _LC,
        "afmoe",
        lambda keys, tensors: "embedding_scale" in keys or _PATTERN in keys,
        "it scales embeddings, and takes each fourth layer to be global, whatever the file says",
    ),
    Fact(
        _IK,
        "llama",
        _has(r"blk\.\d+\.ffn_gate_inp\.weight"),
        "it adds the experts' sum to the normalised input of the block instead of the residual stream",
    ),
    Fact(
        _IK, "llama4", _always, "it leaves out the norms of queries and keys, and adds the block's sum to its normalised input"
    ),
    Fact(_IK, "granite granitemoe", _always, "it multiplies the whole residual stream by residual_scale"),
    Fact(_IK, "olmo", _always, "it rotates keys twice"),
    Fact(
        _LC,
        "qwen4exp",
        lambda keys, tensors: bool(np.any(keys.get("attention.compress_ratios", 0))),
        "beyond attention.indexer.top_k tokens, it attends to up to attention.compress_ratios - 1 tokens more",
    ),
)
