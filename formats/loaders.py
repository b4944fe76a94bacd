"""What llama.cpp and ik_llama.cpp do with a GGUF: why one does not load it, and where one computes something else.

A file without a problem here can still have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

from ..data_classes import dataclass
from ..errors import PlanError
from .loader_facts import ANY, DIFFERENCES, IK_LLAMA_CPP, LLAMA_CPP, PROBLEMS, Fact, Tensors

OLLAMA = "ollama"
PROGRAMS = (LLAMA_CPP, IK_LLAMA_CPP, OLLAMA)
MLA_LAYOUTS = ("ik", "mainline", "legacy")  # of latent attention: ik_llama.cpp's, llama.cpp's, and that of files before it


@dataclass(frozen=True)
class Loader:
    """What a program takes, apart from the facts below.

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
    lambda number: number <= 42 and number not in (4, 5, 31, 32, 33, 36, 37, 38),  # its ids end there; these were removed
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
    return [fact.says for fact in concerned if _holds(fact, keys, tensors)]


def _holds(fact: Fact, keys: Mapping[str, Any], tensors: Tensors) -> bool:
    try:
        return fact.holds(keys, tensors)
    except (TypeError, ValueError, OverflowError):  # a key holds something else than a number: no program gets that far
        return False
