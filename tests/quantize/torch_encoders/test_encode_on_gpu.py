"""Rows encoded on a GPU, with a processor in its place: the processor's bytes, whatever the rows need."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from gpu_on_processor import DEVICE, use_it  # noqa: E402

from ggufmill.errors import MillError  # noqa: E402
from ggufmill.formats import TYPES, SourceTensor  # noqa: E402
from ggufmill.quantize import decode, encode  # noqa: E402
from ggufmill.quantize.codecs.codec import NonFiniteError  # noqa: E402
from ggufmill.quantize.row_producer import ErrorWeights, RowProducer  # noqa: E402
from ggufmill.quantize.torch_encoders import encode_on_gpu  # noqa: E402

pytestmark = pytest.mark.oracle
N = 512


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    use_it(monkeypatch)
    return DEVICE


def weights() -> np.ndarray:
    """float32 [12, 512]: normal rows, with outliers, zeros, of extreme size, and one that is worse than zeros."""
    x = (0.02 * np.random.default_rng(1).standard_t(4, (12, N))).astype(np.float32)
    x[1], x[2, 256:], x[3, 32:48] = 0, 0, 0
    x[4], x[5], x[6, ::2] = x[4] * 1e-7, x[5] * 1e4, 0
    x[7, 1:] *= 1e-12
    return x


def importance() -> np.ndarray:
    return np.random.default_rng(2).gamma(0.5, 1, N).astype(np.float32)


@pytest.mark.parametrize("name", ["q4_K", "iq4_k", "q4_0", "iq2_k_r4", "iq4_nl_r4"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_bytes_of_the_processor(name, weighted, gpu):
    weights_of_columns = importance() if weighted else None
    expected, actual = (encode(weights(), name, weights_of_columns, device=d, report=False) for d in (None, gpu))
    assert np.array_equal(actual, expected)


def test_few_rows_are_doubtful(gpu, monkeypatch):
    found = []
    plain = encode_on_gpu.encode_on_gpu
    monkeypatch.setattr(encode_on_gpu, "encode_on_gpu", lambda *given: found.append(plain(*given)) or found[-1])
    encode(weights()[8:], "iq4_k", importance(), device=gpu)
    ((_, doubtful),) = found
    assert len(doubtful) == 0


def test_bf16(gpu):
    words = (weights().view(np.uint32) >> 16).astype(np.uint16)
    x = (words.astype(np.uint32) << 16).view(np.float32)
    for device in (None, gpu):
        actual = encode(words, "q4_K", importance(), device=device, report=False, bf16=True)
        assert np.array_equal(actual, encode(x, "q4_K", importance(), report=False))


def test_what_is_not_finite_is_found_where_it_is(gpu):
    x = weights()
    x[9, 3] = np.inf
    with pytest.raises(NonFiniteError, match="row 9, column 3 is inf"):
        encode(x, "q4_K", device=gpu)


def test_rows_that_stay_coarse_are_reported_by_their_numbers(gpu):
    x = weights()
    x[9] *= 1e8
    reported = []
    encode(x, "q4_K", device=gpu, report=lambda coarse: reported.extend(coarse.rows.tolist()))
    assert 9 in reported
    with pytest.raises(MillError, match="row 9"):
        encode(x, "q4_K", device=gpu)


def test_pieces(gpu, monkeypatch):
    monkeypatch.setattr(encode_on_gpu, "PIECE", 2 * N)
    assert np.array_equal(encode(weights(), "q6_K", device=gpu, report=False), encode(weights(), "q6_K", report=False))
    assert decode(encode(weights(), "q6_K", device=gpu, report=False), "q6_K", N).shape == (12, N)


def test_several_callers(gpu, monkeypatch):
    monkeypatch.setattr(encode_on_gpu, "PIECE", 5 * N)
    names, x = ("q6_K", "q4_K") * 3, weights()
    with ThreadPoolExecutor(len(names)) as callers:
        made = callers.map(lambda name: encode(x, name, importance(), device=gpu, report=False), names)
        for name, q in zip(names, made, strict=True):
            assert np.array_equal(q, encode(x, name, importance(), report=False))


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_importance_that_encoders_scale(gpu, scale):
    weights_of_columns = importance() * np.float32(scale)
    expected, actual = (encode(weights(), "iq4_k", weights_of_columns, device=d, report=False) for d in (None, gpu))
    assert np.array_equal(actual, expected)


def test_bf16_of_a_source_is_sent_as_it_is_stored(gpu):
    words = (weights().view(np.uint32) >> 16).astype(np.uint16)
    x = (words.astype(np.uint32) << 16).view(np.float32)
    tensor = SourceTensor("w", (N, len(x)), "bf16", lambda a, b: x[a:b], lambda a, b: words[a:b].view(np.uint8), TYPES["bf16"])
    blind = replace(tensor, read=lambda *_: pytest.fail("decoded by the processor"))
    importance_of = ErrorWeights(importance()[None])
    expected = RowProducer(tensor, TYPES["q4_K"], importance_of, warn_on_range=False)(8, 12)
    assert np.array_equal(RowProducer(blind, TYPES["q4_K"], importance_of, device=gpu, warn_on_range=False)(8, 12), expected)
    bad = words.copy()
    bad[9, 3] = 0x7F80  # infinity
    tensor = replace(tensor, read=lambda a, b: (bad[a:b].astype(np.uint32) << 16).view(np.float32), raw=lambda a, b: bad[a:b])
    replaced = []
    RowProducer(tensor, TYPES["q4_K"], importance_of, device=gpu, replaced=replaced, warn_on_range=False)(8, 12)
    assert replaced == [("w", 1)]
