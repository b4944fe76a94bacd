"""Weights as quantisation methods store them: packed codes, scales, and the values that they stand for."""

import ml_dtypes
import numpy as np

DRAW = np.random.default_rng(11)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
F16, BF16, E4M3 = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ROWS, COLUMNS = 64, 192


def packed(codes, bits):
    """Codes [n, m], packed along the last axis into int32 words, bit by bit, lowest bits first."""
    n, m = codes.shape
    words = np.zeros((n, -(-m * bits // 32)), np.uint64)
    for i in range(m):
        for b in range(bits):
            bit = i * bits + b
            words[:, bit // 32] |= (codes[:, i].astype(np.uint64) >> np.uint64(b) & np.uint64(1)) << np.uint64(bit % 32)
    return words.astype(np.uint32).view(np.int32)


def random_scales(rows, groups, dtype=F16):
    return (0.01 + DRAW.random((rows, groups))).astype(dtype)


def gptq(bits, group, order=None, symmetric=False, version=1):
    """(tensors, values) as defined by Frantar's and AutoGPTQ's code."""
    codes = DRAW.integers(0, 1 << bits, (COLUMNS, ROWS))
    groups = COLUMNS // group
    zeros = np.full((groups, ROWS), 1 << (bits - 1)) if symmetric else DRAW.integers(1, 1 << bits, (groups, ROWS))
    scales = random_scales(groups, ROWS)
    index = np.arange(COLUMNS) // group if order is None else order
    tensors = {
        "qweight": np.ascontiguousarray(packed(codes.T, bits).T),
        "qzeros": packed(zeros - version, bits),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    return tensors, ((codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)).T


CT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}, "ignore": ["lm_head"]}


GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32}
