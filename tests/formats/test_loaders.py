"""What is known of the files that llama.cpp and ik_llama.cpp load; found by loading tiny models of all architectures there."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError
from ggufmill.formats.loader_facts import DIFFERENCES, PROBLEMS, LoaderTensor
from ggufmill.formats.loaders import ANY, ARCHITECTURES, LOADERS, PROGRAMS, loader_differences, loader_problems


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
        ("q4_0_4x4", "llama.cpp"),  # removed, as are the next three ids
        ("q4_0_4x8", "llama.cpp"),
        ("q4_0_8x8", "ollama"),
    ):
        assert problems(program, "llama", ["output.weight"], kind) == [f"it does not know the tensor types {kind}"]
        other = next(one for one in reversed(PROGRAMS) if LOADERS[one].facts_of != LOADERS[program].facts_of)
        assert problems(other, "llama", ["output.weight"], kind) == []
    assert not LOADERS["llama.cpp"].reads(36)  # BitNet's i2_s in ik_llama.cpp
    assert LOADERS["ik_llama.cpp"].reads(36)
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


def test_ling_3_and_openpangu():
    names = ["output.weight", "blk.0.attn_indexer_k.weight"]
    assert "as wide as heads of delta" in problems("ik_llama.cpp", "bailingmoe3", names, kda__head_dim=16)[0]
    same = {"kda__head_dim": 16, "attention__value_length_mla": 16}
    assert problems("ik_llama.cpp", "bailingmoe3", names, **same) == problems("llama.cpp", "bailingmoe3", names) == []
    assert "output.weight" in problems("ik_llama.cpp", "bailingmoe3", **same)[0]
    assert "it selects no keys" in problems("ik_llama.cpp", "openpangu", names, find=loader_differences)[0]
    assert problems("ik_llama.cpp", "openpangu", names, find=loader_differences, swa_layers=[0]) == []


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


@pytest.mark.parametrize("kind", ["q4_1", "q5_1", "q4_0", "q8_0"])
def test_rows_of_blocks_that_are_no_multiple_of_four(kind):
    wrong = 1 if kind in ("q4_1", "q5_1") else 0
    for columns, expected in ((576, wrong), (192, wrong), (1536, 0)):
        shapes = {"blk.0.attn_q.weight": (columns, 64)}
        assert len(problems("ik_llama.cpp", "llama", kind=kind, shapes=shapes, find=loader_differences)) == expected
        assert problems("llama.cpp", "llama", kind=kind, shapes=shapes, find=loader_differences) == []


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


@pytest.mark.parametrize(
    ("program", "architecture", "names", "keys", "says"),
    [
        ("ik_llama.cpp", "llama", ["rope_factors_long.weight"], {"rope__scaling__type": "longrope"}, "longrope"),
        ("llama.cpp", "llama", ["rope_factors_long.weight"], {"rope__scaling__type": "longrope"}, ""),
        ("llama.cpp", "qwen2", ["rope_factors_long.weight"], {"rope__scaling__type": "longrope"}, "the factors of LongRoPE"),
        ("llama.cpp", "gemma3", ["rope_freqs.weight"], {}, "it does not read rope_freqs"),
        ("llama.cpp", "gemma2", ["blk.0.attn_output.bias"], {}, "bias of attn_output"),
        ("llama.cpp", "gemma2", ["blk.0.attn_q.bias"], {}, ""),
        ("llama.cpp", "seed_oss", ["blk.0.ffn_up.bias"], {}, "these biases"),
        ("llama.cpp", "deepseek2", ["blk.0.attn_q_a.bias"], {}, "biases in latent attention"),
        ("llama.cpp", "qwen3moe", ["blk.0.ffn_gate_inp.weight"], {}, "experts in all layers"),
        ("llama.cpp", "dots1", ["output.weight", "blk.0.ffn_gate_inp.weight"], {}, "a shared expert"),
        ("llama.cpp", "cohere2", [], {"attention__sliding_window_pattern": np.zeros(2, bool)}, "a window in some layer"),
        ("llama.cpp", "cohere2", [], {"attention__sliding_window_pattern": np.array([True, False])}, ""),
        ("llama.cpp", "falcon-h1", [], {}, "a bias of the convolution"),
        ("llama.cpp", "deepseek4", [], {"hyper_connection__count": 3}, "four streams"),
        ("ik_llama.cpp", "gemma3", [], {}, "attention.sliding_window"),
    ],
)
def test_problems_of_rare_configurations(program, architecture, names, keys, says):
    found = problems(program, architecture, names, **keys)
    assert (len(found), says in "".join(found)) == (bool(says), True)


@pytest.mark.parametrize(
    ("program", "architecture", "keys", "says"),
    [
        ("llama.cpp", "gpt-oss", {"rope__scaling__type": "yarn"}, "whole pairs"),
        ("llama.cpp", "gpt-oss", {"rope__scaling__type": "yarn", "rope__scaling__yarn_truncate": True}, ""),
        ("llama.cpp", "llama", {"rope__scaling__type": "yarn"}, ""),
        ("llama.cpp", "llama", {"rope__scaling__yarn_truncate": False}, "whole pairs"),
        ("llama.cpp", "deepseek2", {"rope__scaling__yarn_beta_fast": 1.0}, "beta_fast"),
        ("llama.cpp", "mistral3", {"rope__scaling__yarn_beta_fast": 1.0}, ""),
        ("llama.cpp", "deepseek2", {"rope__scaling__type": "linear"}, "it scales rotation otherwise"),
        ("llama.cpp", "deepseek2", {"expert_group_count": 4}, "other groups"),
        ("llama.cpp", "dots1", {"expert_group_count": 4}, ""),
        ("ik_llama.cpp", "dots1", {"expert_group_count": 4}, "without regard to groups"),
        ("ik_llama.cpp", "gemma3", {"attention__sliding_window": 20, "final_logit_softcapping": 3.0}, "the soft cap"),
        ("llama.cpp", "gemma3", {"final_logit_softcapping": 3.0}, ""),
        ("llama.cpp", "gemma2", {"attention__scale": 0.1}, "it divides scores"),
        ("llama.cpp", "qwen3moe", {"expert_weights_norm": False}, "sum to one"),
        ("llama.cpp", "qwen3moe", {"expert_weights_norm": True}, ""),
        ("llama.cpp", "minicpm3", {"embedding_length": 64, "embedding_scale": 12.0, "logit_scale": 4.0}, ""),
        ("llama.cpp", "minicpm3", {"embedding_length": 64, "embedding_scale": 3.0, "logit_scale": 4.0}, "factors"),
        ("llama.cpp", "llama4", {"attention__sliding_window": 20}, "chunks of 8192"),
        ("llama.cpp", "exaone4", {"attention__sliding_window": 20}, "it ignores the sliding window"),
        ("llama.cpp", "gpt-oss", {"swiglu_clamp_exp": 5.0}, "limit to be 7"),
        ("llama.cpp", "afmoe", {"embedding_scale": 1.0}, "it scales embeddings"),
    ],
)
def test_differences_of_rare_configurations(program, architecture, keys, says):
    found = problems(program, architecture, find=loader_differences, **keys)
    assert (len(found), says in "".join(found)) == (bool(says), True)
