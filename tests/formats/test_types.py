import gguf
import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError

# docs/formats/types.md: name, id, bytes of a row of 4096 elements
ROWS = [
    ("f32", 0, 16384),
    ("q8_0", 8, 4352),
    ("q4_K", 12, 2304),
    ("q6_K", 14, 3360),
    ("iq4_k_r4", 339, 2304),
    ("iq4_ks", 144, 2176 + 4),
    ("iq2_kl", 157, 86 * 16 + 2),
    ("q8_KV", 151, 4096 + 8),
    ("iq5_ks_r4", 352, 168 * 16 + 4),
    ("iq1_s_r4", 219, 6 * 128 + 2),
]


@pytest.mark.parametrize(("name", "type_id", "row_bytes"), ROWS)
def test_row_bytes(name, type_id, row_bytes):
    tensor_type = TYPES[name]
    assert tensor_type.id == type_id
    assert tensor_type.row_bytes(4096) == row_bytes
    assert TYPES.by_id(type_id) is tensor_type
    assert tensor_type.nbytes((4096, 3, 2)) == 6 * row_bytes


def test_sizes_agree_with_the_gguf_package():
    for ggml_type, (block, size) in gguf.GGML_QUANT_SIZES.items():
        ours = TYPES.by_id(int(ggml_type))
        if ours.is_known and ggml_type.name not in ("Q8_1", "Q8_K"):  # activation formats: layouts of ik_llama.cpp
            assert (ours.block, ours.block_bytes) == (block, size), ggml_type.name


def test_names_in_any_case_and_unknown_ids():
    assert TYPES["IQ4_K_R4"] is TYPES["iq4_k_r4"]
    assert "Q4_k" in TYPES
    assert "q4_z" not in TYPES
    unknown = TYPES.by_id(9999)
    assert not unknown.is_known
    assert unknown.name == "type-9999"


def test_packed_types_have_the_blocks_of_their_base():
    for name in TYPES:
        plain = TYPES[name]
        if plain.packed:
            packed = TYPES[plain.packed]
            assert packed.base == plain.name
            assert (packed.block, packed.block_bytes) == (plain.block, plain.block_bytes)
            assert packed.rows > 1


@pytest.mark.parametrize(
    ("requested", "shape", "expected"),
    [
        ("iq4_k_r4", (4096, 1024), "iq4_k_r4"),
        ("iq4_k_r4", (128, 65536), "q5_0"),  # the row length decides before the number of rows
        ("iq2_k", (128, 65536), "iq4_nl"),
        ("q6_K", (32, 4), "q8_0"),
        ("q5_K", (64, 4), "q6_0"),
        ("iq4_k_r4", (4096, 1022), "iq4_k"),
        ("q8_k_r8", (4096, 12), "q8_0"),
        ("iq1_s_r4", (4096, 5), "iq1_s"),
        ("nvfp4", (96, 4), "iq4_nl"),
        ("tq2_0", (128, 4), "q4_0"),
        ("q2_0", (32, 4), "q4_0"),
        ("iq2_bn_r4", (32, 4), "q8_0"),
        ("q1_0_g128", (64, 4), "q8_0"),
        ("q4_K", (33, 4), "f16"),
        ("q8_0_r8", (48, 8), "f16"),
    ],
)
def test_fallbacks(requested, shape, expected):
    chosen, reason = TYPES.fallback_for(TYPES[requested], shape)
    assert chosen.name == expected
    assert bool(reason) == (requested != expected)


def _each(value: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), value)


# Types of 256 weights to a block -> what takes rows of another multiple of 32: llama-quantize of ik_llama.cpp
# (change_type_if_necessary) and of llama.cpp (tensor_type_fallback).
IK_FALLBACKS = {
    **_each("iq4_nl", "iq2_xxs iq2_xs iq2_ks iq2_s iq3_xxs iq3_s iq1_s iq1_m q2_K q3_K iq2_k iq2_kl iq3_ks iq3_k"),
    **_each("iq4_nl", "iq4_kss iq4_ks iq1_kt iq2_kt iq3_kt iq4_kt iq4_xs"),
    **_each("q5_0", "iq4_k iq5_ks q4_K"),
    **_each("q6_0", "iq5_k q5_K"),
    **_each("q8_0", "iq6_k q6_K q8_k_r8"),
}
LLAMA_CPP_FALLBACKS = {
    **_each("iq4_nl", "iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs"),
    **_each("q4_0", "q2_0 q2_K q3_K tq1_0 tq2_0"),
    **{"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"},
}


@pytest.mark.parametrize("name", [t.name for t in TYPES.values() if t.block == 256 and t.has_codec])
def test_fallbacks_of_both_programs(name):
    """Where both have a rule and differ, that of ik_llama.cpp holds."""
    plain = TYPES.plain(TYPES[name]).name
    ours = TYPES[name].fallback
    rules = [rules[plain] for rules in (IK_FALLBACKS, LLAMA_CPP_FALLBACKS) if plain in rules]
    assert ours == rules[0]
    assert len(set(rules)) == 1 or plain in ("q2_K", "q3_K", "q5_K")


@pytest.mark.parametrize("name", [t.name for t in TYPES.values() if t.has_codec and t.block > 1])
def test_every_quantised_type_has_a_fallback_for_any_row(name):
    chosen, _ = TYPES.fallback_for(TYPES[name], (33, 16))
    assert chosen.name == "f16"


def test_a_shape_without_fallback_is_an_error():
    with pytest.raises(PlanError, match="q8_1 cannot hold a tensor of 33 x 4"):
        TYPES.fallback_for(TYPES["q8_1"], (33, 4))
    with pytest.raises(PlanError, match="multiple of 256"):
        TYPES["q4_K"].row_bytes(np.int64(100))
