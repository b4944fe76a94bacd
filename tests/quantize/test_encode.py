"""encode and decode: errors, repacked types, and properties that every codec has to have."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, PlanError
from ggufmill.quantize import NonFiniteError, can_encode, decode, encode, encode_unchecked
from ggufmill.repack import pack, unpack

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_standard.npz")
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
STANDARD = ("f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "q5_1", "q4_1", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "q8_KV",
            "q2_K", "q3_K", "q4_K", "q5_K", "q6_K")  # fmt: skip
TERNARY = ("iq1_bn", "iq2_bn", "tq1_0", "tq2_0", "q2_0")
GUARDED = ("iq4_nl_r4", "q4_k_r4", "q6_k_r4")


def test_unknown_type():
    with pytest.raises(PlanError, match="'q9_z'"):
        encode(X, "q9_z")
    with pytest.raises(PlanError, match="'q9_z'"):
        decode(np.zeros((1, 34), np.uint8), "q9_z", 32)


def test_type_without_codec():
    assert not can_encode(TYPES["q8_1"])
    with pytest.raises(PlanError, match="q8_1 cannot be encoded"):
        encode(X, "q8_1")


def test_the_table_of_types_names_the_module_of_every_codec():
    modules = {t.codec for t in TYPES.values() if t.codec is not None}
    for module in modules:
        codecs = import_module(f"ggufmill.quantize.codecs.{module}").CODECS
        assert codecs.keys() == {t.name.lower() for t in TYPES.values() if t.codec == module}


def test_letter_case_of_type_names_is_ignored():
    assert np.array_equal(encode(X[:1], "Q6_k"), encode(X[:1], "q6_K"))


@pytest.mark.parametrize(
    ("shape", "name", "message"), [((1, 48), "q8_0", "multiple of 32"), ((2, 64), "q8_0_r8", "interleaves 8")]
)
def test_rows_that_the_type_cannot_hold(shape, name, message):
    with pytest.raises(PlanError, match=message):
        encode(np.zeros(shape, np.float32), name)


def test_arrays_of_other_dimensions():
    with pytest.raises(PlanError, match="3 dimensions"):
        encode(np.zeros((1, 2, 32), np.float32), "q8_0")


@pytest.mark.parametrize("name", ["q8_0", "f16", "bf16", "bf16_r16", "q8_KV", "q8_KV_r8"])
def test_nonfinite_weights_are_located_in_every_column(name):
    x = np.random.default_rng(1).standard_normal((16, 96)).astype(np.float32)
    for column in range(96):
        row = column % 16
        kept, x[row, column] = x[row, column], (np.nan, np.inf, -np.inf)[column % 3]
        with pytest.raises(NonFiniteError) as error:
            encode(x, name)
        assert (error.value.row, error.value.column) == (row, column)
        x[row, column] = kept


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_weights_are_located(value):
    x = X.copy()
    x[2, 77] = value
    with pytest.raises(NonFiniteError, match="row 2, column 77") as error:
        encode(x, "q8_0")
    assert (error.value.row, error.value.column) == (2, 77)


def test_the_largest_float_is_finite():
    x = np.full((1, 32), np.finfo(np.float32).max)
    assert np.array_equal(decode(encode(x, "f32"), "f32", 32), x)


def test_importance_is_checked():
    with pytest.raises(PlanError, match=r"\(3,\) does not fit rows of 1024"):
        encode(X, "q8_0", np.ones(3, np.float32))
    for bad in (-1, np.nan, np.inf):
        importance = IMATRIX.copy()
        importance[5] = bad
        with pytest.raises(PlanError, match="negative, infinite or NaN"):
            encode(X, "q5_0", importance)


def test_arrays_of_another_size_cannot_be_decoded():
    with pytest.raises(PlanError, match="take 34 bytes each"):
        decode(np.zeros((2, 33), np.uint8), "q8_0", 32)
    with pytest.raises(PlanError):
        decode(np.zeros((3, 34), np.uint8), "q8_0_r8", 32)


def test_no_rows():
    for name in ("q8_0", "q4_K", "q4_k_r4"):
        q = encode(np.zeros((0, 256), np.float32), name, np.ones(256, np.float32))
        assert q.shape == (0, TYPES[name].row_bytes(256))
        assert decode(q, name, 256).shape == (0, 256)


def test_float64_and_strided_input():
    x = np.asfortranarray(X.astype(np.float64))
    assert np.array_equal(encode(x, "q6_0"), encode(X, "q6_0"))


@pytest.mark.parametrize("name", GUARDED)
def test_packed_types_match_the_reference_byte_for_byte(name):
    assert np.array_equal(encode(X, name, IMATRIX), GOLDEN[f"{name}/im"])


PACKED = ("q8_0_r8", "q6_0_r4", "q5_0_r4", "q4_0_r8", "q4_0_4x4", "q4_0_4x8", "q4_0_8x8", "iq4_xs_r8", "mxfp4_r8", "q2_k_r4",
          "q3_k_r4", "q5_k_r4", *GUARDED)  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_types_decode_as_their_base(name):
    base = TYPES[TYPES[name].base].name
    q = encode(X, name, IMATRIX)
    assert np.array_equal(decode(q, name, 1024), decode(encode(X, base, IMATRIX), base, 1024))


def test_packed_types_guard_blocks_without_importance():
    """A block of q6_K without importance: q6_k_r4 gives it 1e-9, with the bytes that q6_K has for an importance of 1e-9."""
    importance = IMATRIX.copy()
    importance[32:48] = 0
    replaced = importance.copy()
    replaced[32:48] = 1e-9
    packed = encode(X, "q6_k_r4", importance)
    assert np.array_equal(packed, pack(encode(X, "q6_K", replaced), "q6_K", 1024)[0])
    # Where a block of x is zero in one row only, that row alone is guarded, which changes nothing else.
    x = X.copy()
    x[3, 64:96] = 0
    rows = unpack(encode(x, "iq4_nl_r4", IMATRIX), "iq4_nl_r4", 1024)[0]
    assert np.array_equal(rows, encode(x, "iq4_nl", IMATRIX))


BLOCKS = {  # of 32 normal numbers
    "zero": np.zeros_like,
    "minus zero": lambda noise: np.full(32, -0.0),
    "one": lambda noise: np.eye(1, 32, 7)[0],
    "same": lambda noise: np.full(32, 0.25),
    "spike": lambda noise: noise * 1e-3 + 50 * np.eye(1, 32, 31)[0],
    "denormal": lambda noise: noise * 1e-41,
    "tiny": lambda noise: noise * 1e-16,
    "small": lambda noise: noise * 1e-9,
    "huge": lambda noise: noise * 1e30,
    "normal": lambda noise: noise,
    "negative": lambda noise: -abs(noise),
    "cauchy": lambda noise: noise / noise[::-1],
}
IMPORTANCE = {
    "none": lambda rng: None,
    "zero": lambda rng: np.zeros(256),
    "half": lambda rng: np.repeat([0, 1], 128),
    "tiny": lambda rng: np.full(256, 1e-38),
    "random": lambda rng: rng.random(256) ** 30,
    "extreme": lambda rng: 10.0 ** rng.integers(-40, 38, 256),
}
SEARCHED = [name for name in TYPES if name.startswith(("iq1_", "iq2_", "iq3_")) and can_encode(TYPES[name])]


@pytest.mark.parametrize("name", list(dict.fromkeys([*STANDARD, *TERNARY, "q1_0_g128", "iq4_kss", "iq4_kt", *SEARCHED])))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=32, max_size=32), weights=st.sampled_from(sorted(IMPORTANCE)))
def test_extreme_blocks_give_finite_and_independent_rows(name, blocks, weights):
    rng = np.random.default_rng(len(set(blocks)))
    x = np.concatenate([BLOCKS[block](rng.standard_normal(32)) for block in blocks]).reshape(4, 256).astype(np.float32)
    importance = IMPORTANCE[weights](rng)
    if importance is not None:
        importance = importance.astype(np.float32)
    q = encode_unchecked(x, name, importance)
    assert np.isfinite(decode(q, name, 256)).all()
    assert np.array_equal(q, encode_unchecked(x, name, importance))
    assert np.array_equal(encode_unchecked(np.tile(x, (10, 1)), name, importance), np.tile(q, (10, 1)))
    if TYPES[name].rows == 1:
        assert np.array_equal(encode_unchecked(x[1:], name, importance), q[1:])


@pytest.mark.parametrize("name", [*STANDARD, *TERNARY])
def test_zeros_stay_zeros(name):
    x = np.zeros((2, 256), np.float32)
    for importance in (None, np.ones(256, np.float32), np.zeros(256, np.float32)):
        assert not decode(encode(x, name, importance), name, 256).any()


@pytest.mark.parametrize(("name", "limit"), [("f16", 3e-4), ("q8_0", 0.008), ("q6_0", 0.03), ("q5_0", 0.06), ("q6_K", 0.03)])
def test_relative_error_at_any_magnitude(name, limit):
    rng = np.random.default_rng(9)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    for magnitude in (1e-2, 1, 1e3):
        y = decode(encode(x * np.float32(magnitude), name), name, 256) / np.float32(magnitude)
        assert np.sqrt(((y - x) ** 2).mean()) < limit
