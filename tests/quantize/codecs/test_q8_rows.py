"""q8_KV, q8_KV_r8 and q8_k_r8 against bytes of the reference encoder and against their layouts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, PlanError
from ggufmill.quantize import NonFiniteError, can_encode, decode, encode, encode_unchecked
from ggufmill.repack import pack, unpack

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_q8_rows.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
NAMES = ("q8_KV", "q8_KV_r8", "q8_k_r8")


def test_row_meta_holds_the_sum_of_the_codes():
    q = encode(X, "q8_KV")
    assert np.array_equal(q[:, 4:8].copy().view(np.int32)[:, 0], q[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32))
    assert np.array_equal(unpack(encode(X, "q8_KV_r8"), "q8_KV_r8", 1024)[0], q)
    assert np.array_equal(pack(q, "q8_KV", 1024)[0], encode(X, "q8_KV_r8"))


@pytest.mark.parametrize("n", [32, 96, 1024])
def test_q8_kv_r8_is_q8_kv_interleaved(n):
    x = np.random.default_rng(n).standard_normal((16, n)).astype(np.float32)
    plain, packed = encode(x, "q8_KV"), encode(x, "q8_KV_r8")
    assert np.array_equal(packed, pack(plain, "q8_KV_r8", n)[0])
    assert np.array_equal(decode(packed, "q8_KV_r8", n), decode(plain, "q8_KV", n))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [256, 1280])
def test_bytes_do_not_depend_on_where_rows_begin(name, n):
    """Rows are read from the first cache line on."""
    x = np.random.default_rng(n).standard_normal((8, n)).astype(np.float32)
    expected, memory = encode(x, name), np.full(8 * n + 32, 1e9, np.float32)
    for start in range(16):
        moved = memory[start : start + 8 * n].reshape(8, n)
        moved[:] = x
        assert np.array_equal(encode(moved, name), expected), start
        moved[:] = 1e9


def test_decode_q8_k_r8_follows_the_layout():
    """Each block: eight float16 scales, then four codes of each of the eight rows in turn."""
    rng = np.random.default_rng(2)
    q = rng.integers(0, 256, (16, TYPES["q8_k_r8"].row_bytes(512)), np.uint8)
    blocks = q.reshape(2, 2, 2064)  # groups, blocks of a row
    scales = rng.standard_normal((2, 2, 8)).astype(np.float16)
    blocks[..., :16] = scales.view(np.uint8)
    got = decode(q, "q8_k_r8", 512)
    codes = blocks[..., 16:].view(np.int8).reshape(2, 2, 64, 8, 4).transpose(0, 3, 1, 2, 4)
    want = codes.reshape(2, 8, 2, 256).astype(np.float32) * scales.astype(np.float32).transpose(0, 2, 1)[..., None]
    assert np.array_equal(got, want.reshape(16, 512))


@pytest.mark.parametrize(("name", "limit"), [("q8_KV", 0.03), ("q8_k_r8", 0.015)])
def test_every_element_is_within_half_a_quantisation_step(name, limit):
    x = np.random.default_rng(9).standard_t(5, (8, 512)).astype(np.float32)
    y = decode(encode(x, name), name, 512)
    amax = np.abs(x.reshape(8, -1, 512 if name == "q8_KV" else 256)).max(axis=-1, keepdims=True)
    steps = np.broadcast_to(amax / 127, (8, amax.shape[1], 512 // amax.shape[1])).reshape(8, 512)
    assert np.all(np.abs(y - x) <= steps * 0.502 + 127 * steps * 2**-11 * (name == "q8_k_r8"))
    assert np.sqrt(((y - x) ** 2).sum() / (x**2).sum()) < limit


def test_q8_k_r8_needs_whole_groups_and_has_no_plain_form():
    assert can_encode(TYPES["q8_k_r8"])
    with pytest.raises(PlanError, match="interleaves 8"):
        encode(X[:4], "q8_k_r8")
    with pytest.raises(PlanError):
        decode(encode(X, "q8_k_r8")[:4], "q8_k_r8", 1024)
    with pytest.raises(PlanError, match="no plain form"):
        unpack(encode(X, "q8_k_r8"), "q8_k_r8", 1024)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(magnitudes=st.lists(st.sampled_from([0, 1e-41, 1e-38, 1e-16, 1e-3, 1, 1e30, 3e38]), min_size=16, max_size=16))
def test_extreme_rows_give_finite_and_independent_rows(name, magnitudes):
    x = np.random.default_rng(1).uniform(-1, 1, (16, 256)) * np.array(magnitudes)[:, None]
    x = x.astype(np.float32)
    q = encode_unchecked(x, name)
    y = decode(q, name, 256)
    assert np.isfinite(y).all()
    assert not y[[m == 0 for m in magnitudes]].any()
    assert np.array_equal(encode_unchecked(x[8:], name), q[8:])
    moderate = [1e-3 <= m <= 1e5 for m in magnitudes]
    assert np.abs(y - x)[moderate].max(initial=0) < 0.005


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 17), (7, 255), (5, 256), (15, 511)])
def test_nonfinite_weights_are_located(name, value, place):
    x = np.random.default_rng(2).standard_normal((16, 512)).astype(np.float32)
    x[place] = value
    with pytest.raises(NonFiniteError) as error:
        encode_unchecked(x, name)
    assert (error.value.row, error.value.column) == place
    x[place] = np.finfo(np.float32).max
    assert np.isfinite(decode(encode_unchecked(x, name), name, 512)).all()
