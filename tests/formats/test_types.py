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
    ],
)
def test_fallbacks(requested, shape, expected):
    chosen, reason = TYPES.fallback_for(TYPES[requested], shape)
    assert chosen.name == expected
    assert bool(reason) == (requested != expected)


def test_a_shape_without_fallback_is_an_error():
    with pytest.raises(PlanError, match="q8_0 cannot hold a tensor of 33 x 4"):
        TYPES.fallback_for(TYPES["q8_0"], (33, 4))
    with pytest.raises(PlanError, match="multiple of 256"):
        TYPES["q4_K"].row_bytes(np.int64(100))
