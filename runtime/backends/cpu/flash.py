"""Flash attention over cached rows: how its work is divided into tasks, and attention outside of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ....data_classes import dataclass
from ....simd import team
from ....simd.lanes import LANES
from ....simd.workers import Workers
from .attention import AttentionParams, first_key
from .kernels.attention import flash
from .kernels.attention.job_parts import parts_of
from .kernels.attention.shared_values import SharedValues
from .kv_cache import CacheRows

_TASK_BYTES = 1 << 20  # for the rows of a task: half of the cache that is a core's own
_MAX_ROWS, _MIN_ROWS = 288, 48  # beyond, more gain nothing; below, decoding a block of keys takes longer than its products
_SPLIT_ROWS = 64  # at the most where keys are split (more, and sums of blocks leave the cache), if that makes enough tasks
_TASKS_PER_THREAD = 3
_MIN_NUMBERS = 1 << 14  # of keys and values, decoded by a task: some microseconds
_MERGE_NUMBERS = 1 << 12  # added by a part of `merge`
_POSITIONS = 32  # a generated token's tasks are the same for a run of this many positions: a divisor of flash.KEYS
_PARALLEL_THRESHOLD = 1 << 18  # multiplications: some ten microseconds


class Division(NamedTuple):
    """How attention of one sequence is divided.

    tasks         int64 [tasks, fields of flash.TASK_FIELDS], the longest first
    splits        results per query that `flash.merge` adds up
    split_blocks  blocks of keys of a split, a power of two; 0: one result per query, the blocks summed one after the other
    first_split   number of the first split, counted from key 0
    merge_heads   heads of a part of `flash.merge`
    merge_parts   parts of `flash.merge`, 0 if there is one split
    """

    tasks: np.ndarray
    splits: int
    split_blocks: int
    first_split: int
    merge_heads: int
    merge_parts: int


NOTHING = Division(np.zeros((0, len(flash.TASK_FIELDS)), np.int64), 1, 0, 0, 1, 0)


@dataclass(frozen=True)
class Segment:
    """The queries of one sequence: q float32 [n, heads, width], after `past` tokens; keys and values: the rows of these and of
    the n new ones; out: float32 [n, heads, width of values]. q and out are C-contiguous.

    shared: values of all heads, weighted as well, into shared_out: float32 [n, heads, their width], of which the tokens need
    not follow each other, or float64 [heads, their width] for the sums of the squares over all tokens. There is no window then.
    seen: uint8 [n, at least all keys], C-contiguous: 0 for keys that a query does not see; None: those up to its own token.
    """

    q: np.ndarray
    keys: CacheRows
    values: CacheRows
    past: int
    out: np.ndarray
    shared: SharedValues | None = None
    shared_out: np.ndarray | None = None
    seen: np.ndarray | None = None


def attend(
    segments: Sequence[Segment],
    kv_heads: int,
    params: AttentionParams,
    workers: Workers,
    generated: bool = False,
    rounds: bool = False,
) -> None:
    """Fills in the results of all segments: softmax(scale * q k^T, masked) v. generated: see `divide`; rounds: see
    `kernels.attention.job_parts`."""
    program: list[tuple[int, int, int, int]] = []
    merges: list[tuple[int, int, int, int]] = []
    arrays: list[np.ndarray] = []  # that the program refers to by address
    squares, products = [], 0
    enough = len(segments) >= _TASKS_PER_THREAD * workers.count and not generated
    sinks, slopes = (None if x is None else np.ascontiguousarray(x, np.float32) for x in (params.sinks, params.slopes))
    for segment in segments:
        n, heads, k_width = segment.q.shape
        v_width, total = segment.out.shape[2], segment.past + n
        shared, shared_out, seen, is_shared = segment.shared, segment.shared_out, segment.seen, segment.shared is not None
        sizes = (
            n,
            heads // kv_heads,
            kv_heads,
            segment.past,
            params.span,
            k_width,
            v_width + (shared.padded if shared else 0),
        )
        division = divide(AttentionShape(*sizes, workers.count, generated, enough or is_shared))
        if shared is not None and shared_out is not None and shared_out.dtype == np.float64:
            of_tasks = np.zeros((len(division.tasks), shared.width))
            squares.append((shared_out, of_tasks, division.tasks[:, 0]))
            shared_out = of_tasks
        splits = division.splits
        split_values = np.empty(splits * n * heads * padded_width(v_width) if splits > 1 else 0, np.float32)
        rows = np.empty(2 * splits * n * heads, np.float32)
        k_type, v_type = segment.keys.type_id, segment.values.type_id
        k_type, *parts = parts_of(k_type, v_type, generated, heads // kv_heads, k_width, rounds, is_shared)
        job = np.array(
            (
                *(0, 0, segment.keys.address, segment.values.address, 0, 0, 0, 0),
                *(0 if x is None else x.ctypes.data for x in (sinks, slopes)),
                *(n, heads // kv_heads, kv_heads, k_width, v_width, k_type, v_type),
                *(segment.keys.row_bytes, segment.values.row_bytes, segment.keys.head_bytes, segment.values.head_bytes),
                *(segment.past, params.ahead(n), params.span, *division[1:5]),
                *parts,
                *(_shared_fields(shared, shared_out) if shared is not None and shared_out is not None else (0,) * 5),
                *(0, 0),  # rows are not gathered
                *((0, 0) if seen is None else (seen.ctypes.data, seen.shape[1])),
                *(0, 0),
            ),
            np.int64,
        )
        job.view(np.float64)[-2:] = params.scale, params.softcap
        address = flash.set_addresses(job, division.tasks, segment.q.reshape(-1), segment.out.reshape(-1), split_values, rows)
        attend_rows = flash.attend_of(k_type, v_type)
        program.append((0, attend_rows.address, address, len(division.tasks)))
        arrays += [division.tasks, split_values, rows, job]
        products += heads * n * total * (k_width + v_width)
        if splits > 1:
            merges.append((1, flash.merge.address, address, division.merge_parts))
    team.run(workers.ready() if products >= _PARALLEL_THRESHOLD else 0, np.array(program + merges, np.int64))
    for sums, of_tasks, task_heads in squares:
        sums[...] = 0
        for head, of_task in zip(task_heads.tolist(), of_tasks, strict=True):
            sums[head] += of_task


def padded_width(v_width: int) -> int:
    """Numbers of a row of a job's `split_values`."""
    return -(-v_width // LANES) * LANES


def _shared_fields(shared: SharedValues, out: np.ndarray) -> tuple[int, ...]:
    """Fields of a job. out: float32 [n, heads, width], or float64 [tasks, width]."""
    heads = 0 if out.dtype == np.float64 else out.strides[0] // (4 * shared.width) if len(out) > 1 else out.shape[1]
    return shared.part, shared.values.ctypes.data, shared.width, out.ctypes.data, heads


class AttentionShape(NamedTuple):
    """The attention of n tokens of a sequence, after `past` others, for so many threads.

    How sums are ordered depends on `generated` alone: see kernels.attention.flash. generated: the keys are split, and not the
    tokens (as long as they are few). fixed: tasks have as many queries as they can, however many heads and threads there are,
    and the keys are not split.
    """

    n: int
    group: int
    kv_heads: int
    past: int
    window: int
    k_width: int
    v_width: int
    threads: int
    generated: bool = False
    fixed: bool = False


def divide(shape: AttentionShape) -> Division:
    """Divides it among the threads."""
    if shape.generated:  # the same for tokens that come one by one: `past` is the highest of a run of _POSITIONS
        shape = shape._replace(past=shape.past | _POSITIONS - 1)
    return _divide(shape)


@lru_cache(64)  # all layers of a pass ask for the same
def _divide(shape: AttentionShape) -> Division:
    n, group, kv_heads, past, window, k_width, v_width, threads, generated, fixed = shape
    is_split = generated and not fixed
    max_rows = _TASK_BYTES // (4 * (k_width + v_width + flash.KEYS))
    per_thread = max_rows if fixed else kv_heads * n * group // (_TASKS_PER_THREAD * threads)
    rows = max(_MIN_ROWS, min(_MAX_ROWS, max_rows, per_thread))
    first, blocks, busy = 0, -(-(past + n) // flash.KEYS), 1 if threads == 1 else 2 * threads
    if is_split:
        first = first_key(max(0, past + 1 - _POSITIONS), window) // flash.KEYS
        rows = _SPLIT_ROWS if kv_heads * -(-group // _SPLIT_ROWS) * (blocks - first) >= busy else _MIN_ROWS
    parts = -(-group // rows)
    members = -(-group // parts)  # queries of a group that a task takes
    tokens = min(n, max(1, rows // members))
    head_step, split_blocks = 1, 0
    if is_split:
        numbers = (blocks - first) * flash.KEYS * (k_width + v_width)
        head_step = max(1, kv_heads * parts // busy, min(kv_heads, _MIN_NUMBERS // numbers))
        target = min(busy // (-(-kv_heads // head_step) * parts), numbers // _MIN_NUMBERS)
        split_blocks = _split_blocks(first, blocks, target)
    split_step = split_blocks or blocks
    first_split = first // split_step
    splits = -(-blocks // split_step) - first_split
    tasks = [
        (
            *(head, min(head + head_step, kv_heads), member, min(member + members, group), token, min(token + tokens, n)),
            *(max(split * split_step, first), min((split + 1) * split_step, blocks), split - first_split),
        )
        for token in range(0, n, tokens)[::-1]
        for head in range(0, kv_heads, head_step)
        for member in range(0, group, members)
        for split in range(first_split, first_split + splits)
    ]
    heads = kv_heads * group
    merge_heads = max(1, min(heads, _MERGE_NUMBERS // (splits * v_width)))
    merge_parts = n * -(-heads // merge_heads) if splits > 1 else 0
    return Division(np.array(tasks, np.int64), splits, split_blocks, first_split, merge_heads, merge_parts)


def _split_blocks(first: int, stop: int, target: int) -> int:
    """Blocks of a split, a power of two: the smallest with at most 2 * target splits of the blocks from `first` to `stop`, or
    with one split if the target is 1."""
    max_splits, size = 2 * target if target > 1 else 1, 1
    while -(-stop // size) - first // size > max_splits:
        size *= 2
    return size
