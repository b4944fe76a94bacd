"""Weights of any magnitude: what a type's scales cannot hold is told, with tensor and row."""

import logging
import re

import numpy as np
import pytest
from covariances import covariance
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, MillError, SourceTensor
from ggufmill.formats.floats import f32_to_bf16
from ggufmill.quantize import can_encode, decode, encode, encode_unchecked
from ggufmill.quantize.codecs.row_errors import rows_not_nearer
from ggufmill.quantize.plain_rows import codec_of, plain_rows
from ggufmill.quantize.row_producer import ErrorWeights, RowProducer
from ggufmill.quantize.scale_range import _LEAST_ROUNDED, plain_range
from ggufmill.quantize.subnormal_scales import encode_small, has_float16_scales
from ggufmill.quantize.verify import reference_error

ENCODED = [t.name for t in TYPES.values() if can_encode(t) and not (t.name[0] == "i" and t.name[1:].isdigit())]
# One type or more of each module of encoders.
OF_EACH_CODEC = list({kind.codec: kind.name for kind in TYPES.values() if kind.codec}.values())
# Interleaved rows are encoded as plain ones are, then packed; one of these types stands for all.
PLAIN = ["q4_k_r4", *(name for name in ENCODED if TYPES.plain(TYPES[name]).name == name)]
NAME = "blk.0.ffn_up.weight"


def _encoded(x, name, shape=None):
    tensor = SourceTensor(NAME, shape or x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    importance = np.ones((1, x.shape[1]), np.float32)
    with np.errstate(over="ignore"):
        return decode(RowProducer(tensor, TYPES[name], ErrorWeights(importance))(0, len(x)), name, x.shape[1])


def _weights(rows=16, seed=3):
    return np.random.default_rng(seed).standard_t(5, (rows, 256)).astype(np.float32)


@pytest.mark.slow(keep=PLAIN)
@pytest.mark.parametrize("name", ENCODED)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(exponent=st.integers(-12, 12))
def test_weights_of_any_magnitude_are_close_or_told(name, exponent):
    x = (_weights() * 10.0**exponent).astype(np.float32)
    logging.getLogger("ggufmill").addHandler(handler := _Records())
    try:
        y, told = _encoded(x, name), ""
    except MillError as error:
        y, told = x, str(error)
    finally:
        logging.getLogger("ggufmill").removeHandler(handler)
    error = np.sqrt(np.square(y.astype(float) - x).sum() / np.square(x.astype(float)).sum())
    reference = reference_error(name)
    assert handler.texts or error < min(2 * reference + 0.02, (1 + reference) / 2 + 0.02)
    if told:
        assert plain_range(name) is not None  # other types hold every magnitude
        assert re.search(rf"{NAME}: row \d+ .*: .*--custom-q '{NAME}=bf16'", told)


ROUNDED = [name for name in ENCODED if name in TYPES and TYPES[name].codec and codec_of(name).rounds_without_importance]


@pytest.mark.parametrize("name", ROUNDED)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(-26, 14), st.integers(-26, 14), st.integers(0, 3))
def test_rows_that_are_rounded_need_no_look(name, seed, least, most, ones):
    """Codecs that say so make no row that zeros would be nearer to, whatever their blocks are beside the largest weight."""
    rng, n = np.random.default_rng(seed), 1 << 13
    x = np.ldexp(rng.standard_t(2, (4, n)), rng.integers(min(least, most), max(least, most) + 1, (4, n // 32)).repeat(32, 1))
    x[rng.random(x.shape) < ones / 4] = 2.0 ** min(least, most)
    x[np.arange(4), rng.integers(n, size=4)] = _LEAST_ROUNDED * 2.0 ** rng.integers(0, 20, 4)
    x = np.clip(x, -(2.0**15), 2.0**15).astype(np.float32)
    q, amax = encode_unchecked(x, name), np.abs(x).max(1)
    assert not len(rows_not_nearer(x, q, name, amax))


def test_encoders_without_a_search_round():
    assert set(ROUNDED) == {"q4_0", "q4_1", "q5_0", "q5_1"}


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("name", ["q8_0", "q2_K", "iq2_xs", "q4_k_r4", "f16"])
def test_one_huge_weight_is_an_error(name):
    x = _weights()
    x[5, 77] = 1e38
    with pytest.raises(MillError, match=r"row 5 \(largest weight 1e\+38\) is too large for"):
        _encoded(x, name)


def test_rows_are_counted_within_their_matrix():
    x = _weights()
    x[6] *= np.float32(1e30)
    tensor = SourceTensor(NAME, (256, 4, 4), "f32", lambda start, stop: x[start:stop])
    with pytest.raises(MillError, match="row 2 of matrix 1"):
        RowProducer(tensor, TYPES["q4_0"])(4, 8)


@pytest.mark.parametrize("name", ["q6_K", "q8_0", "q4_k_r4"])
def test_rows_that_are_negligible_are_a_warning(name, caplog):
    x = _weights(16)
    x[4:7] *= np.float32(1e-9)
    x[9] = 0
    with caplog.at_level(logging.WARNING, "ggufmill"):
        logging.getLogger("ggufmill").addHandler(caplog.handler)
        _encoded(x, name)
        logging.getLogger("ggufmill").removeHandler(caplog.handler)
    assert f"{NAME}: 3 of the rows 4 to" in caplog.text


def test_zeros_are_no_error():
    assert not _encoded(np.zeros((8, 256), np.float32), "q4_K").any()


F16_SCALED = [name for name in ENCODED if has_float16_scales(name) and TYPES[name].codec is not None]


def _error(x, q, name, importance):
    return np.sqrt((np.square(decode(q, name, x.shape[1]).astype(float) - x) * importance).sum())


@pytest.mark.parametrize("name", F16_SCALED)
def test_subnormal_scales_cost_little(name):
    x = np.ldexp(_weights(), -3 - np.frexp(np.abs(_weights()).max(1))[1][:, None])
    x[3] = x[5, :32] = 0
    importance = np.random.default_rng(5).random(256, np.float32)
    ordinary = _error(x, encode(x, name, importance), name, importance)
    small = np.ldexp(x, -10)  # largest weights of 6e-5 to 1.2e-4
    q = encode_small(small, plain_rows(TYPES[name]), importance)
    assert np.ldexp(_error(small, q, name, importance), 10) < 1.1 * ordinary + 0.003 * np.linalg.norm(x)
    assert not decode(q, name, 256)[3].any()


@pytest.mark.parametrize("name", F16_SCALED)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(exponent=st.integers(-30, -4), seed=st.integers(0, 99))
def test_nothing_is_worse_than_zeros(name, exponent, seed):
    x = np.ldexp(_weights(seed=seed), exponent)
    assert _error(x, encode_small(x, plain_rows(TYPES[name]), None), name, 1) <= 1.0001 * np.linalg.norm(x)


@pytest.mark.parametrize("name", ["q6_K", "iq4_k", "q8_0"])
def test_only_coarse_rows_are_encoded_again(name):
    x = _weights()
    x[2] *= np.float32(1e-6)
    tensor = SourceTensor(NAME, x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    actual, expected = RowProducer(tensor, TYPES[name])(0, len(x)), encode_unchecked(x, name)
    assert np.flatnonzero((actual != expected).any(1)).tolist() == [2]
    assert _error(x[2:3], actual[2:3], name, 1) < 0.9 * _error(x[2:3], expected[2:3], name, 1)


@pytest.mark.slow
def test_rows_under_a_covariance_too():
    x = _weights() * np.float32(1e-5)
    h = covariance(256, rank=32)
    tensor = SourceTensor(NAME, x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    q = RowProducer(tensor, TYPES["q6_K"], ErrorWeights(covariance_of=lambda matrix: h))(0, len(x))
    assert _error(x, q, "q6_K", 1) < 0.04 * np.linalg.norm(x)


# Rows of one kind each, float64 [4, n]; the largest weight is 1.
SHAPES = {
    "one": lambda rng, n: np.eye(1, n, 9).repeat(4, 0) * rng.choice([-1, 1], (4, 1)),
    "two": lambda rng, n: np.eye(1, n, 8).repeat(4, 0) + np.eye(1, n, 9),
    "one in each block": lambda rng, n: np.tile(np.eye(1, 32, 3), (4, n // 32)),
    "outlier": lambda rng, n: np.where(np.arange(n) == 77, 1, 1e-3 * rng.standard_t(5, (4, n)).clip(-9, 9)),
    "equal": lambda rng, n: np.full((4, n), rng.choice([-1.0, 1.0])),
    "alternating": lambda rng, n: np.tile([1.0, -1.0], (4, n // 2)),
    "every other": lambda rng, n: np.tile([1.0, 0.0], (4, n // 2)),
    "ramp": lambda rng, n: np.tile(np.linspace(-1, 1, n), (4, 1)),
    "zero blocks": lambda rng, n: np.repeat(np.eye(4, n // 32, 1), 32, 1) * rng.uniform(-1, 1, (4, n)),
    "decades": lambda rng, n: rng.uniform(-1, 1, (4, n)) * 10.0 ** -rng.uniform(0, 9, (4, n)),
    "sparse": lambda rng, n: rng.uniform(-1, 1, (4, n)) * (rng.random((4, n)) < 0.02),
    "ordinary": lambda rng, n: rng.standard_t(5, (4, n)).clip(-9, 9) / 9,
}
IMPORTANCE = {
    "none": lambda rng, n: None,
    "ones": lambda rng, n: np.ones(n),
    "uneven": lambda rng, n: np.exp(2 * rng.standard_normal(n)),
    "halves": lambda rng, n: rng.random(n) * (rng.random(n) < 0.5),
    "one column": lambda rng, n: np.where(np.arange(n) == 300, 10.0 ** rng.integers(6, 38), 1 + rng.random(n)),
    "one in each block": lambda rng, n: np.where(np.arange(n) % 37 == 5, 10.0 ** rng.integers(6, 38), 1 + rng.random(n)),
    "only one": lambda rng, n: 1e30 * np.eye(1, n, 300)[0],
    "40 decades": lambda rng, n: 10.0 ** rng.uniform(-20, 20, n),
}
EXPONENTS = [0, *range(-149, 128, 7), 127]


def _norm(r):
    return np.linalg.norm(r, axis=1)


def _told_or_close(name, shape, exponent, importance, seed, route, norms=(_norm,)):
    """Encodes rows and holds them against zeros, in one of the norms, or the message against its form."""
    rng = np.random.default_rng(seed)
    n = 512
    rows = max(4, TYPES[name].rows)
    with np.errstate(over="ignore", under="ignore"):
        ones = np.concatenate([SHAPES[shape](rng, n) for _ in range(0, rows, 4)])
        x = np.clip(np.ldexp(ones, exponent), -3.4028234e38, 3.4028234e38).astype(np.float32)
    v = IMPORTANCE[importance](rng, n)
    v = None if v is None else v.astype(np.float32)
    logging.getLogger("ggufmill").addHandler(handler := _Records())
    y, told = None, ""
    try:
        y = decode(route(x, name, v), name, n).astype(np.float64)
    except MillError as error:
        told = str(error)
    finally:
        logging.getLogger("ggufmill").removeHandler(handler)
    if y is None:
        assert re.search(r"row \d+ .*is too (large|small) for", told)
        assert exponent < -8 or exponent > 10  # what lies within every type's range is encoded
    elif not handler.texts:
        assert np.isfinite(y).all()
        assert np.any([norm(y - x) <= 1.001 * norm(x.astype(np.float64)) for norm in norms], axis=0).all()


def _produce(x, name, v):
    tensor = SourceTensor(NAME, x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    return RowProducer(tensor, TYPES[name], ErrorWeights(None if v is None else v[None]))(0, len(x))


def _with_covariance(x, name, v):
    return encode(x, name, v, covariance(x.shape[1], rank=32))


def _damped_norm(r):
    damped = covariance(r.shape[1], rank=32).damped().astype(np.float64)
    return np.sqrt(np.einsum("ri,ij,rj->r", r, damped, r))


def _on_torch(x, name, v):
    return encode(x, name, v, device="cpu")


@pytest.mark.parametrize("power", [-1, 1])
def test_what_a_source_rounds_to_bf16_itself_is_looked_at_too(power):
    x = np.ldexp(_weights(4), -136 if power < 0 else 120)
    x[1] = 3.4e38 if power > 0 else 0
    words = f32_to_bf16(x).view(np.uint8).reshape(4, -1)
    tensor = SourceTensor(NAME, (256, 4), "f8_e4m3", lambda a, b: x[a:b], read_bf16=lambda a, b: words[a:b])
    with pytest.raises(MillError, match=rf"{NAME}: row \d \(.* is too (small|large) for bf16 .*{NAME}=f32"):
        RowProducer(tensor, TYPES["bf16"])(0, 4)


_CASE = {
    "shape": st.sampled_from(sorted(SHAPES)),
    "exponent": st.sampled_from(EXPONENTS),
    "importance": st.sampled_from(sorted(IMPORTANCE)),
    "seed": st.integers(0, 99),
}


@pytest.mark.slow(keep=PLAIN)
@pytest.mark.parametrize("name", ENCODED)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(**_CASE)
def test_no_row_is_lost_silently(name, shape, exponent, importance, seed):
    if importance == "none" and TYPES.imatrix_need(TYPES[name]):
        importance = "ones"
    for route in (encode, _produce):
        _told_or_close(name, shape, exponent, importance, seed, route)


@pytest.mark.slow(keep=[f"*-{name}" for name in OF_EACH_CODEC])
@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_rows_of_ordinary_magnitude_are_nearer_than_zeros(name, shape):
    for importance in IMPORTANCE:
        if importance != "none" or not TYPES.imatrix_need(TYPES[name]):
            _told_or_close(name, shape, 0, importance, 1, encode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bf16", "mxfp4", "q4_K", "q8_KV_r8", "iq2_kl", "iq3_kt", "iq4_ks", "iq4_kss", "iq5_ks_r4", "iq2_s"]
)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(**_CASE)
def test_no_row_is_lost_silently_under_a_covariance(name, shape, exponent, importance, seed):
    _told_or_close(name, shape, exponent, importance, seed, _with_covariance, (_norm, _damped_norm))


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["q2_K", "q4_K", "q6_K", "iq2_k", "iq4_k_r4", "iq4_ks", "iq5_ks", "iq4_kss", "iq2_kl"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(**_CASE)
def test_no_row_is_lost_silently_on_a_device(name, shape, exponent, importance, seed):
    _told_or_close(name, shape, exponent, importance, seed, _on_torch)
