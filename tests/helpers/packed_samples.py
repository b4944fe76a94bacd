"""Random weights in a tensor type, as rows and as a weight of the cpu backend."""

import numpy as np

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime.backends.cpu.weights import WeightStore


def sample_of(name, rows, columns, seed=0):
    """(float32 rows as decoded, packed rows) of random weights."""
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    q = encode(x, name, np.ones(columns, np.float32))
    return decode(q, name, columns), q


def store_of(name, q, rows, columns, **settings_):
    def read(start, stop):
        group = TYPES[name].rows
        low, high = start // group * group, -(-stop // group) * group
        return decode(q[low:high], name, columns)[start - low : stop - low]

    shape = (columns, rows) if len(q) == rows else (columns, rows, len(q) // rows)
    tensor = SourceTensor("w", shape, name, read, lambda start, stop: q[start:stop], TYPES[name], q)
    return WeightStore(TensorSource("test", {}, {"w": tensor}, "test"), 1 << 20, **settings_)
