"""What llama.cpp and ik_llama.cpp do with a GGUF: why one does not load it, and where one computes something else.

Found by loading the tests' tiny models of all architectures in both: llama.cpp 0c1e5709 (of llama-cpp-python 0.3.36) and
ik_llama.cpp 8337e4cd. A file without a problem here can still have one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gguf import TokenType

from ..errors import PlanError
from .types import TensorType

LLAMA_CPP, IK_LLAMA_CPP, OLLAMA = PROGRAMS = ("llama.cpp", "ik_llama.cpp", "ollama")


@dataclass(frozen=True)
class Loader:
    """What a program takes beside the facts below.

    reads       whether it knows the id of a tensor type
    facts_of    the program whose architectures and facts are its own
    splits      whether it takes a model in several files
    mla_layout  of latent attention (convert --mla-layout)
    fallbacks   types that it takes where the row length is no multiple of a block, if other than those of the table of types
    stand_ins   what takes the place of types of stock mixes that it does not know
    """

    reads: Callable[[int], bool]
    facts_of: str
    splits: bool
    mla_layout: str
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)


_LLAMA_CPP = Loader(
    lambda number: number <= 42,  # its ids end there
    LLAMA_CPP,
    True,
    "mainline",
    {"q2_K": "q4_0", "q3_K": "q4_0", "q5_K": "q5_1"},
    {"iq2_k": "iq2_xs", "iq3_k": "iq3_s", "iq4_k": "q4_K", "iq4_ks": "q4_K", "iq5_k": "q5_K", "iq6_k": "q6_K", "q6_0": "q5_1"},
)
LOADERS = {
    LLAMA_CPP: _LLAMA_CPP,
    IK_LLAMA_CPP: Loader(lambda number: number not in (34, 35, 40, 42), IK_LLAMA_CPP, True, "ik"),  # tq1_0, tq2_0, nvfp4, q2_0
    OLLAMA: replace(_LLAMA_CPP, splits=False),  # it runs models with llama.cpp
}

# general.architecture that both know
_BOTH = """llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert nomic-bert jina-bert-v2 bloom
stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe mellum phi2 phi3 plamo
codeshell orion internlm2 minicpm gemma gemma2 gemma3 gemma4 starcoder2 mamba xverse command-r cohere2 dbrx olmo openelm
arctic deepseek2 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet t5 t5encoder jais granite granitemoe bailingmoe2 bailingmoe3
dots1 laguna ernie4_5 ernie4_5-moe hunyuan-moe smollm3 gpt-oss seed_oss minimax-m2 minimax-m3 mistral3 mistral4 mimo2 step35
muse-glimmer"""
ARCHITECTURES = {
    LLAMA_CPP: frozenset(
        f"""{_BOTH} modern-bert nomic-bert-moe neo-bert jina-bert-v3 eurobert qwen4exp phimoe plamo2 plamo3 minicpm3 gemma3n
        gemma-embedding gemma4-assistant mamba2 maple jamba falcon-h1 cohere2moe olmo2 olmoe deepseek deepseek2-ocr
        deepseek32 jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2 rwkv7 arwkv7
        granitehybrid graniteswitch granite_swa chameleon wavtokenizer-dec plm bailingmoe dots3note arcee afmoe
        hunyuan-dense hunyuan_vl hy_v3 hy_v4 lfm2 lfm2moe dream smallthinker llada llada-moe grovemoe apertus
        minimax-01 hrm_text cogvlm rnd1 pangu-embedded eagle3 dflash paddleocr spark2_5 llama-embed maincoder
        kimi-linear kimi-k3 glm5-next talkie nanbeige qwen3tts pockettts clip""".split()
    ),
    IK_LLAMA_CPP: frozenset(
        f"""{_BOTH} cohere2_moe bitnet-25 bitnet-b1.58 gemma4_mtp dflash dflash-draft gemma4-assistant openpangu""".split()
    ),
}


@dataclass(frozen=True)
class LoaderTensor:
    """A tensor as its header has it: shape in ne order."""

    shape: tuple[int, ...]
    type: TensorType


Tensors = Mapping[str, LoaderTensor]


ANY = "*"


@dataclass(frozen=True)
class Fact:
    """Of files of some architectures: what a program does with those that `holds` for.

    architectures  names, separated by spaces, or ANY; programs: of those with facts of their own
    holds          (metadata without the architecture's prefix, tensors) -> whether it concerns the file
    says           what comes of it
    """

    programs: tuple[str, ...]
    architectures: str
    holds: Callable[[Mapping[str, Any], Tensors], bool]
    says: str


def _has(pattern: str) -> Callable[[Mapping[str, Any], Tensors], bool]:
    regex = re.compile(pattern)
    return lambda keys, tensors: any(regex.fullmatch(name) for name in tensors)


def _lacks(pattern: str) -> Callable[[Mapping[str, Any], Tensors], bool]:
    has = _has(pattern)
    return lambda keys, tensors: not has(keys, tensors)


def _unread(pattern: str, programs: tuple[str, ...], architectures: str, what: str) -> Fact:
    return Fact(programs, architectures, _has(pattern), f"it does not read {what}, and ends at tensors that it does not know")


def _needed(pattern: str, programs: tuple[str, ...], architectures: str, what: str) -> Fact:
    return Fact(programs, architectures, _lacks(pattern), f"it needs {what}")


def _head_rotation(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """rope_freqs of another length than heads of n_embd / n_head numbers have."""
    freqs = tensors.get("rope_freqs.weight")
    width = int(keys.get("embedding_length", 0)) // max(1, int(np.max(keys.get("attention.head_count", 1))))
    return freqs is not None and freqs.shape[0] != width // 2


def _dense_among_experts(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    """A layer without a router behind the leading dense ones."""
    layers = range(int(keys.get("leading_dense_block_count", 0)), _layers(keys))
    return any(f"blk.{i}.ffn_gate_inp.weight" not in tensors for i in layers)


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
    return keys.get("tokenizer.ggml.model") == "llama" and bool(kinds.size) and not np.any(kinds == TokenType.BYTE)


def _layers(keys: Mapping[str, Any]) -> int:
    return int(keys.get("block_count", 0)) - int(keys.get("nextn_predict_layers", 0))


def _window(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    return int(keys.get("attention.sliding_window", 0)) > 0


def _always(keys: Mapping[str, Any], tensors: Tensors) -> bool:
    return True


_IK, _LC, _LC_IK = (IK_LLAMA_CPP,), (LLAMA_CPP,), (LLAMA_CPP, IK_LLAMA_CPP)
_LATENT = "deepseek2 glm-dsa mistral4"
# Why a file is not loaded.
PROBLEMS = (
    _unread(r"rope_freqs\.weight", _LC_IK, "qwen2 qwen3 qwen3moe smollm3 olmo2", "rope_freqs (rope type llama3)"),
    Fact(_IK, "llama", _head_rotation, "it takes rope_freqs only of heads of embedding_length / head_count numbers"),
    _unread(r"blk\.\d+\.attn_output\.bias", _LC_IK, "qwen3 qwen3moe command-r smollm3 seed_oss", "the bias of attn_output"),
    _unread(r"blk\.\d+\.attn_[qkv]\.bias", _IK, "qwen3 qwen3moe command-r smollm3", "biases of queries, keys and values"),
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
    _unread(r"output\.weight", _LC_IK, "gemma", "an output of its own (output.weight)"),
    _unread(r"blk\.\d+\.attn_output\.bias", _LC_IK, "llama4", "the bias of attn_output"),
    _unread(r"blk\.\d+\.ffn_\w+_shexp\.weight", _IK, "granitemoe", "the shared experts"),
    _unread(r"blk\.\d+\.indexer\..*", _IK, "minimax-m3", "the indexers (convert --mla-layout ik)"),
    _needed(r"blk\.\d+\.attn_output\.bias", _LC, "jais2", "biases"),
    _needed(r"blk\.\d+\.ssm_conv1d\.bias", _LC, "mamba jamba", "a bias of the convolution"),
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
        "qwen3next ernie4_5-moe mellum",
        _dense_among_experts,
        "it needs experts in all layers behind the first dense ones",
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
    Fact(_LC_IK, ANY, _no_byte_tokens, "it aborts at characters that the vocabulary lacks (there are no byte tokens)"),
    Fact(_LC, "llama qwen2 qwen3 qwen3moe starcoder2 phi3", _window, "it ignores the sliding window"),
    Fact(_IK, "llama qwen2 qwen3 qwen3moe mistral3", _window, "it ignores the sliding window"),
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


def loader_problems(metadata: Mapping[str, Any], tensors: Tensors, program: str, files: int = 1) -> list[str]:
    """Why a program does not load a model, a line each; [] if nothing is known.

    metadata: keys of the GGUF -> values; tensors: name -> shape and type; program: one of PROGRAMS (PlanError for another);
    files: how many the model is in
    """
    loader = loader_of(program)
    architecture = str(metadata.get("general.architecture", ""))
    known = architecture in ARCHITECTURES[loader.facts_of]
    problems = [] if known else [f"it does not know the architecture {architecture!r}"]
    unknown = dict.fromkeys(t.type.name for t in tensors.values() if not loader.reads(t.type.id))
    if unknown:
        problems.append(f"it does not know the tensor types {', '.join(unknown)}")
    if files > 1 and not loader.splits:
        problems.append("it does not take models in several files")
    return problems + _facts(PROBLEMS, architecture, metadata, tensors, loader)


def loader_differences(metadata: Mapping[str, Any], tensors: Tensors, program: str) -> list[str]:
    """What a program computes otherwise than the model's own code in a file that it loads; as `loader_problems`."""
    return _facts(DIFFERENCES, str(metadata.get("general.architecture", "")), metadata, tensors, loader_of(program))


def loader_of(program: str) -> Loader:
    """The entry of LOADERS. Raises PlanError for a program that is not in it."""
    if program not in LOADERS:
        raise PlanError(f"{program!r} is not a program that is known; there are {', '.join(PROGRAMS)}")
    return LOADERS[program]


def _facts(
    facts: tuple[Fact, ...], architecture: str, metadata: Mapping[str, Any], tensors: Tensors, loader: Loader
) -> list[str]:
    keys = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    names = {architecture, ANY}
    concerned = (fact for fact in facts if loader.facts_of in fact.programs and names & set(fact.architectures.split()))
    return [fact.says for fact in concerned if fact.holds(keys, tensors)]
