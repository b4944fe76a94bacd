"""Encoders as GPUs run them, an item at a time, against the processor's: the same bytes."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggufmill import quantize
from ggufmill.quantize.plain_rows import GPU_TYPES, codec_of
from ggufmill.simd.cuda.compile_items import environment
from ggufmill.simd.cuda.launch import request_of, work_of
from ggufmill.simd.cuda.work_items import launching

HELPER = Path(__file__).parents[2] / "helpers" / "items_on_processor.py"
LANES_OF_ITEMS = {
    "q2_K": 1, "q3_K": 1, "q4_K": 1, "q5_K": 1, "q6_K": 1, "iq2_k": 1, "iq4_nl": 1, "iq4_xs": 1,
    "q4_0": 1, "q4_1": 1, "q5_0": 1, "q5_1": 1, "q6_0": 1, "iq1_s": 16, "iq1_m": 16, "iq2_xxs": 16, "iq2_xs": 16, "iq2_s": 16,
    "iq3_xxs": 16, "iq3_s": 16, "iq3_k": 16, "iq4_k": 16, "iq5_k": 16, "iq6_k": 16,
}  # fmt: skip
QUICK = ("iq4_nl",)
N = 512


def weights() -> np.ndarray:
    """float32 [24, 512]: normal rows, with outliers, of extreme size, with zeros."""
    rng = np.random.default_rng(1)
    x = (0.02 * rng.standard_t(4, (24, N))).astype(np.float32)
    x[1], x[2:4, 256:], x[:12, 32:48], x[5, ::2] = 0, 0, 0, 0
    x[6], x[7] = x[6] * 1e-4, x[7] * 1e4
    x[8:12] *= (2.0 ** rng.integers(-20, 10, (4, N))).astype(np.float32)
    return x


def importances() -> list[np.ndarray | None]:
    rng = np.random.default_rng(2)
    some = rng.gamma(0.5, 1, N).astype(np.float32)
    with_zeros = some.copy()
    with_zeros[64:128] = 0
    return [None, some, with_zeros]


class Recorded:
    """In place of a GPU: runs the kernel on the processor, and keeps what a GPU would have been given."""

    def __init__(self, lanes: int):
        self.lanes, self.calls, self.expected = lanes, [], []

    def __call__(self, kernel, items, arguments):
        work = work_of(kernel, items, arguments)
        request = pickle.dumps(request_of(kernel, arguments, work))
        assert items.lanes == self.lanes
        with launching(None):
            kernel(*arguments)
        self.expected.append([a.values.copy() for a in work.arrays if a.written])
        self.calls.append((request, work))


def test_types_that_are_said_to_have_work_items():
    assert set(LANES_OF_ITEMS) == GPU_TYPES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LANES_OF_ITEMS]
)
def test_same_outputs_as_the_processor(name, tmp_path):
    recorded, codec = Recorded(LANES_OF_ITEMS[name]), codec_of(name)
    given = [each for each in importances() if each is not None or not codec.rounds_without_importance]
    for importance in given:
        with launching(recorded):
            actual = codec.items.encode(weights(), importance)
        if importance is None or importance.all():  # which nothing has to be made up for
            assert np.array_equal(actual[12:], quantize.encode(weights()[12:], name, importance))
    assert len(recorded.calls) >= len(given)
    calls = tmp_path / "calls"
    calls.write_bytes(pickle.dumps(recorded.calls))
    subprocess.run([sys.executable, HELPER, calls], env=environment(recorded.lanes), check=True)
    results = pickle.loads(calls.read_bytes())
    for (request, work), expected, actual in zip(recorded.calls, recorded.expected, results, strict=True):
        for a, b in zip(expected, actual, strict=True):
            assert np.array_equal(a, b), (pickle.loads(request).name, work.items)
