"""What is known of the files that llama.cpp and ik_llama.cpp load; found by loading tiny models of all architectures there."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError
from ggufmill.formats.loaders import (
    ANY,
    ARCHITECTURES,
    DIFFERENCES,
    PROBLEMS,
    PROGRAMS,
    LoaderTensor,
    loader_differences,
    loader_problems,
)


def problems(program, architecture, names=(), kind="f32", find=loader_problems, shapes=None, **keys):
    """Of a model with these tensors and keys (__ for a dot) of two layers."""
    metadata = {"general.architecture": architecture, f"{architecture}.block_count": np.uint32(2)}
    metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    shapes = dict.fromkeys(names, (32, 32)) | (shapes or {})
    return find(metadata, {name: LoaderTensor(shape, TYPES[kind]) for name, shape in shapes.items()}, program)


def test_architectures_and_types():
    assert problems("llama.cpp", "llama", ["output.weight"]) == []
    assert problems("ik_llama.cpp", "olmo2", ["output.weight"]) == ["it does not know the architecture 'olmo2'"]
    assert problems("llama.cpp", "longcat-flash") == ["it does not know the architecture 'longcat-flash'"]
    for kind, program in (
        ("iq4_k", "llama.cpp"),
        ("q4_k_r4", "llama.cpp"),
        ("nvfp4", "ik_llama.cpp"),
        ("tq2_0", "ik_llama.cpp"),
    ):
        assert problems(program, "llama", ["output.weight"], kind) == [f"it does not know the tensor types {kind}"]
        other = next(one for one in PROGRAMS if one != program)
        assert problems(other, "llama", ["output.weight"], kind) == []
    with pytest.raises(PlanError, match="is not a program that is known; there are llama.cpp, ik_llama.cpp"):
        problems("vllm", "llama")


@pytest.mark.parametrize("program", PROGRAMS)
def test_tensors_that_are_not_read_or_needed(program):
    (line,) = problems(program, "qwen3", ["rope_freqs.weight"])
    assert "it does not read rope_freqs" in line
    assert "bias of attn_output" in problems(program, "qwen3moe", ["blk.0.attn_output.bias"])[0]
    assert "output.weight" in problems(program, "dots1")[0]
    assert "attention.sliding_window" in problems(program, "gpt-oss", ["output.weight"])[0]
    assert problems(program, "gpt-oss", ["output.weight"], attention__sliding_window=0) == []


def test_what_one_of_both_does():
    assert problems("llama.cpp", "qwen3", ["blk.0.attn_q.bias"]) == []
    assert "biases of queries" in problems("ik_llama.cpp", "qwen3", ["blk.0.attn_q.bias"])[0]
    assert "biases of queries" in problems("ik_llama.cpp", "glm4moe")[0]
    assert problems("ik_llama.cpp", "glm4moe", ["blk.0.attn_q.bias"]) == []
    assert "attention.sliding_window" in problems("ik_llama.cpp", "phi3")[0]
    assert problems("ik_llama.cpp", "phi3", attention__sliding_window=0) == problems("llama.cpp", "phi3") == []
    sizes = {"embedding_length": 64, "attention__head_count": 4}
    assert problems("ik_llama.cpp", "llama", shapes={"rope_freqs.weight": (8,)}, **sizes) == []
    assert "rope_freqs" in problems("ik_llama.cpp", "llama", shapes={"rope_freqs.weight": (12,)}, **sizes)[0]


def test_layouts_of_latent_attention():
    parts = ["blk.0.attn_kv_b.weight", "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"]
    assert "--mla-layout mainline" in problems("llama.cpp", "deepseek2", parts, attention__q_lora_rank=8)[0]
    assert problems("ik_llama.cpp", "deepseek2", parts, attention__q_lora_rank=8) == []
    mainline = {"attention__key_length_mla": 192, "attention__q_lora_rank": 8}
    assert "--mla-layout ik" in problems("ik_llama.cpp", "deepseek2", parts[1:], **mainline)[0]
    assert problems("llama.cpp", "deepseek2", parts[1:], **mainline) == []


def test_what_is_computed_otherwise():
    assert problems("llama.cpp", "qwen2", find=loader_differences) == []
    assert problems("llama.cpp", "qwen2", find=loader_differences, attention__sliding_window=20) == [
        "it ignores the sliding window"
    ]
    assert problems("ik_llama.cpp", "phi3", find=loader_differences, attention__sliding_window=20) == []
    assert "experts" in problems("ik_llama.cpp", "llama", ["blk.0.ffn_gate_inp.weight"], find=loader_differences)[0]
    assert problems("ik_llama.cpp", "olmo", find=loader_differences) == ["it rotates keys twice"]


def test_a_vocabulary_without_byte_tokens():
    for kinds, kind, expected in (([2, 3, 1], "llama", 1), ([2, 3, 6], "llama", 0), ([1, 1, 1], "gpt2", 0), ([], "llama", 0)):
        vocabulary = {"tokenizer.ggml.model": kind, "tokenizer.ggml.token_type": np.array(kinds, np.int32)}
        metadata = {"general.architecture": "llama", **vocabulary}
        lines = loader_differences(metadata, {}, "llama.cpp")
        assert ["no byte tokens" in line for line in lines] == [True] * expected


def test_the_table_names_programs_and_architectures_that_there_are():
    for fact in PROBLEMS + DIFFERENCES:
        assert set(fact.programs) <= set(PROGRAMS)
        for program in fact.programs:
            known = set(fact.architectures.split()) & (ARCHITECTURES[program] | {ANY})
            assert known, fact.says
