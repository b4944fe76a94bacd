"""Encoders as GPUs run them, an item at a time, against the processor's: the same bytes."""

import pickle
from contextlib import ExitStack

import numpy as np
import pytest
from items_on_processor import ItemProcess

from ggufmill import quantize
from ggufmill.quantize.codecs.importance import guard_importance
from ggufmill.quantize.plain_rows import GPU_TYPES, codec_of
from ggufmill.simd.cuda.launch import request_of, work_of
from ggufmill.simd.cuda.work_items import launching

LANES_OF_ITEMS = {
    "q2_K": 1, "q3_K": 1, "q4_K": 1, "q5_K": 1, "q6_K": 1, "iq2_k": 1, "iq4_nl": 1, "iq4_xs": 1,
    "q4_0": 1, "q4_1": 1, "q5_0": 1, "q5_1": 1, "q6_0": 1, "iq1_s": 16, "iq1_m": 16, "iq2_xxs": 16, "iq2_xs": 16, "iq2_s": 16,
    "iq3_xxs": 16, "iq3_s": 16, "iq3_k": 16, "iq4_k": 16, "iq5_k": 16, "iq6_k": 16,
}  # fmt: skip
QUICK = ("iq4_nl",)
# Those tested without importance, too: of each kernel the first type.
BLIND = ("q2_K", "q3_K", "q6_K", "iq4_nl", "iq4_xs", "iq2_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq3_s", "iq4_k")
N = 512
SMALL = 6  # the row that some types cannot hold as it is: the processor encodes it again, scaled


def weights() -> np.ndarray:
    """float32 [24, 512]: normal rows, with outliers, of extreme size, with zeros."""
    rng = np.random.default_rng(1)
    x = (0.02 * rng.standard_t(4, (24, N))).astype(np.float32)
    x[1], x[2:4, 256:], x[:12, 32:48], x[5, ::2] = 0, 0, 0, 0
    x[SMALL], x[7] = x[SMALL] * 1e-4, x[7] * 1e4
    x[8:12] *= (2.0 ** rng.integers(-20, 10, (4, N))).astype(np.float32)
    return x


def importance() -> np.ndarray:
    """float32 [512]: of columns that differ a thousandfold, some of them without any, among them a whole group."""
    found = np.random.default_rng(2).gamma(0.5, 1, N).astype(np.float32)
    found[64:96], found[::37] = 0, 0
    return found


@pytest.fixture(scope="module")
def processes():
    """Lanes -> a process, started when it is first asked for."""
    with ExitStack() as started:

        class Processes(dict[int, ItemProcess]):
            def __missing__(self, lanes: int) -> ItemProcess:
                self[lanes] = started.enter_context(ItemProcess(lanes))
                return self[lanes]

        yield Processes()


class InPlaceOfGpu:
    """Launches kernels as a GPU would be given them, in a process for their lanes."""

    def __init__(self, process: ItemProcess, lanes: int):
        self.process, self.lanes, self.calls = process, lanes, 0

    def __call__(self, kernel, items, arguments):
        assert items.lanes == self.lanes
        work = work_of(kernel, items, arguments)
        outputs = self.process.run(pickle.dumps(request_of(kernel, arguments, work)), work)
        for array, values in zip([a.values for a in work.arrays if a.written], outputs, strict=True):
            array[...] = values
        self.calls += 1


def test_types_that_are_said_to_have_work_items():
    assert set(LANES_OF_ITEMS) == GPU_TYPES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LANES_OF_ITEMS]
)
def test_same_bytes_as_the_processor(name, processes):
    lanes, codec = LANES_OF_ITEMS[name], codec_of(name)
    for weights_of_columns in (importance(), None) if name in BLIND else (importance(),):
        gpu = InPlaceOfGpu(processes[lanes], lanes)
        given = weights_of_columns
        if given is not None and codec.items.guarded:  # rows that it changes are left to the processor (encode_on_gpu.py)
            given = guard_importance(weights(), given, codec.items.guarded)
        with launching(gpu):
            actual = codec.items.encode(weights(), given)
        assert gpu.calls
        expected = quantize.encode(weights(), name, weights_of_columns, report=False)
        assert np.flatnonzero((actual != expected).any(axis=1)).tolist() in ([], [SMALL])
