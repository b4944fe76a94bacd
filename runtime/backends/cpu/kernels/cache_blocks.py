"""Rows of caches of keys and values that are kept in blocks, written by tasks of a pass: of the types that are encoded without
a search. Others are written by Python."""

from __future__ import annotations

import numpy as np

from .....quantize.codecs.legacy.round_to_nearest import round_to_nearest
from .....quantize.codecs.legacy.symmetric import encode_q8_0_row
from .....quantize.codecs.q8_rows import encode_q8_kv_row
from .....simd.compile import kernel
from .....simd.memory import fill, view
from .task_kernel import CONSTANT, HEADS, cell, head_of, reads, task_kernel


@kernel
def _fill_unless_finite(row, out):
    """Whether a row has neither NaN nor infinity; if it does, all bits are set, which is NaN."""
    is_finite = True
    for i in range(row.size):
        is_finite &= abs(row[i]) < np.inf
    if not is_finite:
        fill(out, 0xFF)
    return is_finite


@kernel
def _place(task, row, head):
    """The address of a row of a head in the cache."""
    place = view(task.addresses + 16 * row, 2, np.int64)
    return place[0] + head * place[1]


@kernel
def _heads(task, row):
    """Heads of a row that are written: none where the row has no place."""
    return task.x.heads if view(task.addresses + 16 * row, 2, np.int64)[0] else 0


@kernel
def _store_rounded(task, number, max_code, block_bytes):
    """Of types whose codes are 0 to `max_code`, in blocks of 32 numbers."""
    first, stop, _, _ = cell(task, number)
    width = task.x.width
    for r in range(first, stop):
        for h in range(_heads(task, r)):
            row, out = head_of(task.x, r, h, 0, width), view(_place(task, r, h), width // 32 * block_bytes, np.uint8)
            if _fill_unless_finite(row, out):
                round_to_nearest(row, max_code, False, out)


# Of all: writes rows of heads of whole blocks. addresses: int64 [rows, 2], of head 0's row in the cache (0: it has none), and
# bytes from there to the next head's.


@task_kernel(x=reads(HEADS), addresses=CONSTANT)
def store_q8_0(task, number):
    first, stop, _, _ = cell(task, number)
    width = task.x.width
    for r in range(first, stop):
        for h in range(_heads(task, r)):
            row, out = head_of(task.x, r, h, 0, width), view(_place(task, r, h), width // 32 * 34, np.uint8)
            if _fill_unless_finite(row, out):
                encode_q8_0_row(row, out)


@task_kernel(x=reads(HEADS), addresses=CONSTANT)
def store_q5_0(task, number):
    _store_rounded(task, number, 31, 22)


@task_kernel(x=reads(HEADS), addresses=CONSTANT)
def store_q4_0(task, number):
    _store_rounded(task, number, 15, 18)


@task_kernel(x=reads(HEADS), addresses=CONSTANT)
def store_q8_kv(task, number):
    first, stop, _, _ = cell(task, number)
    width = task.x.width
    for r in range(first, stop):
        for h in range(_heads(task, r)):
            row, at, size = head_of(task.x, r, h, 0, width), _place(task, r, h), width + 8
            if _fill_unless_finite(row, view(at, size, np.uint8)):
                words = size // 4
                encode_q8_kv_row(row, view(at, size, np.uint8), view(at, words, np.float32), view(at, words, np.int32))


STORES = {"q8_0": store_q8_0, "q5_0": store_q5_0, "q4_0": store_q4_0, "q8_KV": store_q8_kv}
