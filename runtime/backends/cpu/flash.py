"""Attention over cached rows: who does which part of it, as a program for the kernels' team."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ....simd import team
from ....simd.workers import Workers
from .attention import Span
from .kernels.attention import flash
from .kernels.attention.shared_values import Shared
from .kv_cache import Rows

_ROW_BYTES = 1 << 20  # for the rows that a task has in hand: half of the cache that is a core's own
_MOST_ROWS, _FEWEST_ROWS = 288, 48  # beyond, more gain nothing; below, decoding a block of keys takes longer than its products
_WORTH_A_TASK = 1 << 14  # numbers of keys and values: some microseconds
_RUN = 32  # tokens: a divisor of flash.KEYS
_WORTH_SHARING = 1 << 18  # multiplications: some ten microseconds


@dataclass(frozen=True)
class Segment:
    """The queries of one sequence: q float32 [n, heads, width], after `past` tokens; keys and values: the rows of these and of
    the n new ones; out: float32 [n, heads, width of values]. q and out are C-contiguous.

    shared: values of all heads, weighed as well, into shared_out: float32 [n, heads, their width], of which tokens may lie
    apart, or float64 [heads, their width] for the sums of the squares over all tokens. There is no window then.
    """

    q: np.ndarray
    keys: Rows
    values: Rows
    past: int
    out: np.ndarray
    shared: Shared | None = None
    shared_out: np.ndarray | None = None


def attend(segments: Sequence[Segment], kv_heads: int, span: Span, workers: Workers) -> None:
    """softmax(scale * q k^T, causally masked) v for all segments."""
    program: list[tuple[int, int, int, int]] = []
    kept: list[np.ndarray] = []  # what the program refers to by address
    last, squares, products = [], [], 0
    sinks = None if span.sinks is None else np.ascontiguousarray(span.sinks, np.float32)
    for segment in segments:
        n, heads, k_width = segment.q.shape
        v_width, total = segment.out.shape[2], segment.past + n
        more, more_out = segment.shared, segment.shared_out
        shape = (n, heads // kv_heads, kv_heads, segment.past, span.window, k_width, v_width + (more.padded if more else 0))
        tasks, splits = split_up(*shape, workers.count, more is not None)
        if more is not None and more_out is not None and more_out.dtype == np.float64:
            parts = np.zeros((len(tasks), more.width))
            squares.append((more_out, parts, tasks[:, 0]))
            more_out = parts
        out = segment.out if splits == 1 else np.empty((splits, n, heads, v_width), np.float32)
        sums = np.empty(2 * splits * n * heads, np.float32)
        job = np.array(
            (
                *(0, 0, segment.keys.address, segment.values.address, 0, 0, 0, 0, 0 if sinks is None else sinks.ctypes.data),
                *(n, heads // kv_heads, kv_heads, k_width, v_width, segment.keys.kind, segment.values.kind),
                *(segment.keys.row_bytes, segment.values.row_bytes, segment.keys.head_bytes, segment.values.head_bytes),
                *(segment.past, span.window, splits),
                *(_shared_fields(more, more_out) if more is not None and more_out is not None else (0,) * 5),
                *(0, 0),
            ),
            np.int64,
        )
        job.view(np.float64)[-2:] = span.scale, span.softcap
        address = flash.point(job, tasks, segment.q.reshape(-1), out.reshape(-1), sums)
        program.append((0, flash.attend.address, address, len(tasks)))
        kept += [tasks, out, sums, job]
        products += heads * n * total * (k_width + v_width)
        if splits > 1:
            last.append((segment, out, (1, flash.merge.address, address, n)))
    program += [row for _, _, row in last]
    team.run(workers.ready() if products >= _WORTH_SHARING else 0, np.array(program, np.int64))
    for segment, out, _ in last:
        segment.out[...] = out[0]
    for sums, parts, of in squares:
        sums[...] = 0
        for head, part in zip(of.tolist(), parts, strict=True):
            sums[head] += part


def _shared_fields(shared: Shared, out: np.ndarray) -> tuple[int, ...]:
    """Fields of a job. out: float32 [n, heads, width], or float64 [tasks, width]."""
    heads = 0 if out.dtype == np.float64 else out.strides[0] // (4 * shared.width) if len(out) > 1 else out.shape[1]
    return shared.part, shared.values.ctypes.data, shared.width, out.ctypes.data, heads


def split_up(
    n: int, group: int, kv_heads: int, past: int, window: int, k_width: int, v_width: int, threads: int, fixed: bool = False
) -> tuple[np.ndarray, int]:
    """The tasks of a job, int64 [tasks, fields] as in kernels.flash, the longest first; and the splits of the keys.

    Keys may go beyond the last one that a query sees. fixed: each head's tasks are the same however many heads and threads
    there are, and the keys are not split.
    """
    if n == 1 and not window:  # the same for a run of tokens that come one by one
        past |= _RUN - 1
    return _split_up(n, group, kv_heads, past, window, k_width, v_width, threads, fixed)


@lru_cache(64)  # all layers of a pass ask for the same
def _split_up(
    n: int, group: int, kv_heads: int, past: int, window: int, k_width: int, v_width: int, threads: int, fixed: bool
) -> tuple[np.ndarray, int]:
    most = _ROW_BYTES // (4 * (k_width + v_width + flash.KEYS))
    wanted = most if fixed else kv_heads * n * group // (3 * threads)  # so that each thread gets several tasks
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS, most, wanted))
    parts = -(-group // rows)
    members = -(-group // parts)  # queries of a group that a task takes
    queries = max(1, rows // members)
    start = max(0, past + 1 - window) if window else 0
    end = past + n
    head_step, splits = 1, 1
    if n <= queries and not fixed:
        numbers = (end - start) * (k_width + v_width)
        busy = 1 if threads == 1 else 2 * threads
        head_step = max(1, kv_heads * parts // busy, min(kv_heads, _WORTH_A_TASK // numbers))
        splits = max(1, min(busy // (-(-kv_heads // head_step) * parts), numbers // _WORTH_A_TASK, (end - start) // flash.KEYS))
    key_step = -(-(end - start) // (splits * flash.KEYS)) * flash.KEYS
    splits = -(-(end - start) // key_step)
    tasks = [
        (
            *(head, min(head + head_step, kv_heads), member, min(member + members, group), first, min(first + queries, n)),
            *(start + split * key_step, min(start + (split + 1) * key_step, end), split),
        )
        for first in range(0, n, queries)[::-1]
        for head in range(0, kv_heads, head_step)
        for member in range(0, group, members)
        for split in range(splits)
    ]
    return np.array(tasks, np.int64), splits
