"""Stock mixes against llama-quantize --dry-run, tensor by tensor, on the tensors of ten models with and without an imatrix."""

import json
from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError
from ggufmill.quantize.recipes import mixes
from ggufmill.quantize.recipes.mixes import (
    LayerPosition,
    Mix,
    ModelTraits,
    default_type,
    file_type_id,
    file_type_name,
    file_types,
)

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "golden_mixes.npz")
ABOUT = json.loads(str(GOLDEN["about"]))
# What llama-quantize --help lists (without COPY, aliases and the Q4_0_N_M of other machines).
NAMES = """
    Q4_0 Q4_1 Q5_0 Q5_1 Q6_0 MXFP4 MXFP4_R8 IQ2_XXS IQ2_XXS_R4 IQ2_XS IQ2_XS_R4 IQ2_S IQ2_M IQ2_M_R4 IQ1_S IQ1_S_R4
    IQ1_M_R4 IQ1_M IQ1_BN IQ2_BN IQ2_BN_R4 Q2_K Q2_K_R4 Q2_K_S IQ3_XXS IQ3_KT IQ4_KT IQ3_XXS_R4 IQ3_S IQ3_S_R4 IQ3_M
    Q3_K_R4 IQ3_XS Q3_K_S Q3_K_M Q3_K_L IQ4_NL IQ4_NL_R4 IQ4_XS_R8 Q4_0_R8 Q5_0_R4 Q6_0_R4 Q8_0_R8 Q8_KV IQ4_XS IQ4_KS
    IQ4_KS_R4 IQ5_KS_R4 IQ4_KSS IQ5_KS IQ2_K IQ2_K_R4 IQ2_KS IQ1_KT IQ2_KT IQ2_KL IQ3_KS IQ3_K IQ3_K_R4 IQ3_KL IQ4_K
    IQ4_K_R4 IQ5_K IQ5_K_R4 IQ6_K Q4_K_R4 Q4_K_S Q4_K_M Q5_K_R4 Q5_K_S Q5_K_M Q6_K Q6_K_R4 Q8_K_R8 Q8_KV_R8 Q8_0 F16
    BF16 BF16_R16 F32
"""
UNKNOWN = 255  # llama-quantize's line was broken by a message about a fallback


def _traits(about, imatrix):
    arch = about["arch"]
    keys = {"block_count": "layers", "embedding_length": "embd", "expert_count": "experts"}
    heads = {"attention.head_count": "heads", "attention.head_count_kv": "kv"}
    metadata = {f"{arch}.{key}": about[name] for key, name in (keys | heads).items()}
    names = [name for name, _ in about["tensors"]]
    return ModelTraits.of(metadata | {"general.architecture": arch}, names, about["vocab"], imatrix)


def test_conditions_that_look_at_places_are_known():
    """Where none of them holds, tensors that differ in their place alone are looked at as one."""
    places = [LayerPosition(i, count, seen) for count in (8, 32, 80) for i in range(count) for seen in (0, i, count - 1)]
    models = [
        (_traits(about, imatrix), columns) for about in ABOUT["models"].values() for imatrix in (0, 1) for columns in (96, 256)
    ]
    found = {
        name
        for name, holds in mixes._CONDITIONS.items()
        if any(len({holds(model, at, columns) for at in places}) > 1 for model, columns in models)
    }
    assert found == mixes._OF_PLACE


def _selected(mix, name, shape):
    selected = mix.select(name, shape[0]).type
    if name == "token_embd.weight" and selected.rows > 1:
        selected = TYPES.plain(selected) if selected.base else TYPES.fallback_for(selected, (shape[0], 1))[0]
    return TYPES.fallback_for(selected, tuple(shape))[0].name


@pytest.mark.parametrize("inventory", ABOUT["models"])
def test_every_mix_matches_llama_quantize(inventory):
    about, golden = ABOUT["models"][inventory], GOLDEN[inventory]
    compared = 0
    for i, file_type in enumerate(ABOUT["file_types"]):
        for imatrix in (False, True):
            mix = Mix(file_type, _traits(about, imatrix))
            selected = [_selected(mix, name, shape) for name, shape in about["tensors"]]
            for (name, _), got, want in zip(about["tensors"], selected, golden[i, int(imatrix)], strict=True):
                if want != UNKNOWN:
                    compared += 1
                    assert got == ABOUT["types"][want], (file_type, imatrix, name)
    assert compared > 5000


@pytest.mark.parametrize("inventory", ABOUT["models"])
def test_every_exception_of_a_mix_has_a_reason(inventory):
    about = ABOUT["models"][inventory]
    for file_type in ABOUT["file_types"]:
        mix = Mix(file_type, _traits(about, False))
        for name, shape in about["tensors"]:
            kind, reason = mix.select(name, shape[0])
            assert (kind is mix.default) == (reason == ""), (file_type, name, kind.name, reason)


def test_reasons_name_the_role_and_what_held():
    attn_v = Mix("Q4_K_M", ModelTraits("llama", 16, 1, 0, False, False, 32000, "", 16))
    said = [attn_v.select(f"blk.{i}.attn_v.weight", 4096) for i in range(3)]
    assert said[0] == (TYPES["q6_K"], "attn_v (the outer eighths of the layers and every third between)")
    assert said[2].reason == ""
    assert attn_v.select("output.weight", 4096) == (TYPES["q6_K"], "output")
    experts = Mix("Q4_K_M", ModelTraits("llama", 16, 1, 8, False, False, 32000, "", 16))
    assert experts.select("blk.0.attn_v.weight", 4096) == (TYPES["q8_0"], "attn_v (4 experts or more)")


def test_file_type_names():
    assert file_type_name("q4_k") == "Q4_K_M"
    assert file_type_name("iq4_k") == "IQ4_K"
    assert file_type_name("q8_kv_r8") == "Q8_KV_R8"
    assert file_type_name("q8_k_r16") is None
    assert set(NAMES.split()) <= set(file_types())
    with pytest.raises(PlanError, match="no file type 'Q9'"):
        default_type("Q9")


@pytest.mark.parametrize(
    ("name", "default", "number"),
    [
        ("Q4_K_M", "q4_K", 15),
        ("Q4_K_S", "q4_K", 14),
        ("IQ2_M", "iq2_s", 29),
        ("IQ3_KL", "iq3_k", 146),
        ("IQ4_K_R4", "iq4_k_r4", 340),
        ("MXFP4_MOE", "mxfp4", 38),
        ("NVFP4", "nvfp4", 39),
        ("TQ1_0", "tq1_0", 36),
        ("Q2_0", "q2_0", 41),
    ],
)
def test_default_types_and_numbers(name, default, number):
    assert (default_type(name).name, file_type_id(name)) == (default, number)


# llama-quantize of llama.cpp (llama_tensor_get_type_impl) has no rows for these but those of embeddings and output; its NVFP4
# comes from conversion alone, which keeps embeddings and output in other types.
OF_LLAMA_CPP = {
    "MXFP4_MOE": {"ffn_up_exps": "mxfp4", "ffn_down_shexp": "q8_0", "attn_v": "q8_0", "attn_k_b": "q8_0"},
    "NVFP4": {"ffn_up_exps": "nvfp4", "ffn_down_shexp": "nvfp4", "attn_v": "nvfp4", "attn_k_b": "q8_0", "attn_q_a": "q8_0"},
    "TQ1_0": {"attn_q": "tq1_0", "ffn_down": "tq1_0", "attn_output": "tq1_0"},
    "TQ2_0": {"attn_q": "tq2_0", "ffn_down": "tq2_0", "attn_output": "tq2_0"},
    "Q2_0": {"attn_q": "q2_0", "ffn_down": "q2_0", "attn_output": "q2_0"},
}


@pytest.mark.parametrize("file_type", OF_LLAMA_CPP)
def test_mixes_that_only_llama_cpp_has(file_type):
    about = ABOUT["models"][next(iter(ABOUT["models"]))]
    mix = Mix(file_type, _traits(about, False))
    for name, expected in OF_LLAMA_CPP[file_type].items():
        assert mix.select(f"blk.3.{name}.weight", 4096).type.name == expected
    is_ternary = file_type in ("TQ1_0", "TQ2_0", "Q2_0")
    assert mix.select("output.weight", 4096).type.name == ("q6_K" if is_ternary else "q8_0")
    tied = mix.model.tied
    assert mix.select("token_embd.weight", 4096).type.name == ("q8_0" if not is_ternary else "q6_K" if tied else "q4_K")
