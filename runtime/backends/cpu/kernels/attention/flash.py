"""Attention whose scores never leave the processor's cache (FlashAttention-2, arXiv:2307.08691, section 3.1).

A task takes some queries of one or more key heads through a range of keys, block by block: scores, running maximum and sum of
each query, weighted values. Keys and values of a block are decoded once for all queries of the task, whatever type they have in
memory. Where one query would leave threads idle, the keys are cut into ranges, whose results `merge` joins.
"""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.exponential import exp, exp_lanes
from ......simd.lanes import LANES, load, max_lanes, reduce_max, reduce_sum, splat, store
from ......simd.memory import view
from ......simd.team import call_part, part
from .cache_rows import KINDS, decode_columns, decode_rows
from .shared_values import FIELDS, KEYS, ROWS, UNIT, sum_squares
from .tiles import PANEL, capped, multiply

# Words of a job, int64: addresses, sizes in elements, steps in bytes, and two float64 by their bits.
JOB_FIELDS = (
    "tasks",  # address of int64 [parts, TASK_FIELDS]
    "q",  # float32 [n, heads, k_width]
    "k",  # of row 0 of key head 0
    "v",
    "out",  # float32 [n, heads, v_width]: of split 0, and in the end of all
    "out_splits",  # float32 [splits - 1, n, heads, v_width]: of the others
    "top",  # float32 [splits, n, heads]: the largest score
    "total",  # float32 [splits, n, heads]: the sum of exp(score - top)
    "sinks",  # float32 [heads], or 0
    "n",
    "group",  # queries per key head
    "kv_heads",
    "k_width",
    "v_width",
    "k_kind",
    "v_kind",
    "k_row",
    "v_row",
    "k_head",  # from one head's rows to the next
    "v_head",
    "past",  # tokens before the first query's
    "window",  # 0: none
    "splits",
    "shared",  # address of the part that weighs shared values (see flash_shared), or 0
    "shared_values",
    "shared_width",
    "shared_out",  # float32 [n, shared_heads, shared_width]: of the job's first head
    "shared_heads",  # 0: shared_out is float64 [tasks, shared_width], for the sums over a task's queries of the squares
    "scale",
    "softcap",  # 0: none
)
(
    _TASKS, _Q, _K, _V, _OUT, _OUT_SPLITS,
    _TOP, _TOTAL, _SINKS, _N, _GROUP, _KV_HEADS, _K_WIDTH, _V_WIDTH, _K_KIND, _V_KIND, _K_ROW, _V_ROW,
    _K_HEAD, _V_HEAD, _PAST, _WINDOW, _SPLITS, _SHARED, _SHARED_VALUES, _SHARED_WIDTH, _SHARED_OUT, _SHARED_HEADS, _SCALE,
    _SOFTCAP,
) = range(len(JOB_FIELDS))  # fmt: skip
_JOB_SIZE = len(JOB_FIELDS)
# Key heads, queries of a group, queries in time, keys: each from ... to; and which split of the keys.
TASK_FIELDS = ("head", "head_end", "member", "member_end", "first", "end", "key", "key_end", "split")
_TASK_SIZE = len(TASK_FIELDS)

_IN_BLOCKS = KINDS["q8_0"]  # the first of the kinds with blocks of 32
assert KEYS % PANEL == 0
_NEVER = np.float32(-1e30)  # below any score, and finite: its difference to itself is 0


@kernel
def _up(n, unit):
    return (n + unit - 1) // unit * unit


@kernel
def _take_queries(job, head, member, member_end, first, end, scale, out, to, width):
    """Copies the queries of a task times scale to rows of `width` of out[to:], zeros behind their own width."""
    given, heads = job[_K_WIDTH], job[_KV_HEADS] * job[_GROUP]
    q = view(job[_Q], job[_N] * heads * given, np.float32)
    for i in range(first, end):
        for g in range(member, member_end):
            at = (i * heads + head * job[_GROUP] + g) * given
            for j in range(given):
                out[to + j] = q[at + j] * scale
            for j in range(given, width):
                out[to + j] = np.float32(0)
            to += width


@kernel
def _weigh(scores, unseen, rows, members, position, window, key, count, softcap, top, total, mixed, width):
    """Scores of a block, [rows, KEYS] of scores, become exp(score - running maximum); what was summed so far is scaled to it.

    unseen: so many rows from the first are left out; position: of the first query, which `members` rows share; the keys are
    key ... key + count - 1; mixed: rows of `width`.
    """
    padded = _up(count, LANES)
    for r in range(unseen, rows):
        at, own = r * KEYS, position + r // members
        end = min(own + 1 - key, count)
        begin = max(own + 1 - window - key, 0) if window else 0
        if end <= begin:
            for j in range(0, padded, LANES):
                store(scores, at + j, splat(0))
            continue
        if softcap != 0:
            for j in range(0, padded, LANES):
                store(scores, at + j, capped(load(scores, at + j), softcap))
        for j in range(begin):
            scores[at + j] = -np.inf
        for j in range(end, padded):
            scores[at + j] = -np.inf
        highest = splat(_NEVER)
        for j in range(0, padded, LANES):
            highest = max_lanes(load(scores, at + j), highest)
        before = top[r]
        now = max(before, reduce_max(highest))
        sums = splat(0)
        for j in range(0, padded, LANES):
            weights = exp_lanes(load(scores, at + j) - now)
            store(scores, at + j, weights)
            sums = sums + weights
        if now != before:
            shrink = exp(before - now)
            top[r] = now
            total[r] *= shrink
            for j in range(r * width, (r + 1) * width, LANES):
                store(mixed, j, load(mixed, j) * shrink)
        total[r] += reduce_sum(sums)


@kernel
def _finish(job, task, head, rows, members, top, total, mixed, v_width, m_width):
    """Divides the sums of a task's rows, m_width apart, by their totals, and writes them where the job wants them: v_width for
    a head's own values, and behind them those for shared ones. total then is what they were multiplied with."""
    heads, width, first = job[_KV_HEADS] * job[_GROUP], job[_V_WIDTH], task[4]
    rows_each = job[_N] * heads
    results, split = job[_SPLITS] * rows_each, task[8]
    out = view(
        job[_OUT] if split == 0 else job[_OUT_SPLITS] + 4 * (split - 1) * rows_each * width, rows_each * width, np.float32
    )
    tops, totals = view(job[_TOP], results, np.float32), view(job[_TOTAL], results, np.float32)
    for r in range(rows):
        of_all = head * job[_GROUP] + task[2] + r % members
        row = (first + r // members) * heads + of_all
        to = split * rows_each + row
        highest, sum_, factor = top[r], total[r], np.float32(1)
        if job[_SINKS] and split == 0:  # counted once, however many splits there are
            sink = view(job[_SINKS], heads, np.float32)[of_all]
            highest = max(sink, top[r])
            factor = exp(top[r] - highest)
            sum_ = total[r] * factor + exp(sink - highest)
        tops[to], totals[to] = highest, sum_
        factor = np.float32(0) if sum_ == 0 else factor / sum_
        for j in range(width):
            out[row * width + j] = mixed[r * m_width + j] * factor
        total[r] = factor
        if job[_SHARED_HEADS]:
            place = (first + r // members) * job[_SHARED_HEADS] + of_all
            more = view(job[_SHARED_OUT] + 4 * place * job[_SHARED_WIDTH], job[_SHARED_WIDTH], np.float32)
            for j in range(more.size):
                more[j] = mixed[r * m_width + v_width + j] * factor


@kernel
def point(job, tasks, q, out, sums):
    """Writes where the arrays lie into a job; returns where the job lies. q and out: one-dimensional; sums: top and total.

    The same in Python takes a microsecond per array, in every layer of every token.
    """
    job[_TASKS], job[_Q], job[_OUT] = tasks.ctypes.data, q.ctypes.data, out.ctypes.data
    job[_OUT_SPLITS] = job[_OUT] + 4 * out.size // max(1, job[_SPLITS])
    job[_TOP] = sums.ctypes.data
    job[_TOTAL] = job[_TOP] + 2 * sums.size
    return job.ctypes.data


@part
def attend(argument, number):
    """A task of a job: argument the job's address, number the task's."""
    job = view(argument, _JOB_SIZE, np.int64)
    task = view(job[_TASKS] + 8 * _TASK_SIZE * number, _TASK_SIZE, np.int64)
    numbers = view(argument, _JOB_SIZE, np.float64)
    scale, softcap, window = np.float32(numbers[_SCALE]), np.float32(numbers[_SOFTCAP]), job[_WINDOW]
    members, position = task[3] - task[2], job[_PAST] + task[4]
    rows = (task[5] - task[4]) * members
    # Types in blocks have whole blocks in a row; the others are padded, and so are their rows in memory.
    k_width, v_width = _up(job[_K_WIDTH], LANES), _up(job[_V_WIDTH], PANEL)
    v_given = _up(job[_V_WIDTH], LANES if job[_V_KIND] < _IN_BLOCKS else 2 * LANES)
    shared = _up(job[_SHARED_WIDTH], UNIT) if job[_SHARED] else 0
    m_width, m_rows = v_width + shared, _up(rows, ROWS) if job[_SHARED] else rows
    sizes = (rows * k_width, rows * KEYS, m_rows * m_width, KEYS * max(k_width, v_width), LANES * k_width)
    scratch = np.empty(sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + LANES, np.float32)
    at = (-scratch.ctypes.data & 63) // 4
    queries, at = scratch[at : at + sizes[0]], at + sizes[0]
    scores, at = scratch[at : at + sizes[1]], at + sizes[1]
    mixed, at = scratch[at : at + sizes[2]], at + sizes[2]
    block, at = scratch[at : at + sizes[3]], at + sizes[3]
    few = scratch[at : at + sizes[4]]
    top, total = np.empty(rows, np.float32), np.empty(rows, np.float32)
    q_at, block_at = queries.ctypes.data, block.ctypes.data
    scores_at, mixed_at = scores.ctypes.data, mixed.ctypes.data
    weighing = np.empty(len(FIELDS), np.int64)
    for head in range(task[0], task[1]):
        _take_queries(job, head, task[2], task[3], task[4], task[5], scale, queries, 0, k_width)
        top[:], total[:], mixed[:] = _NEVER, 0, 0
        key = max(task[6], position + 1 - window) if window else task[6]
        end = min(task[7], position + task[5] - task[4])
        while key < end:
            count = min(KEYS, end - key)
            k = job[_K] + head * job[_K_HEAD] + key * job[_K_ROW]
            panels = _up(count, PANEL) // PANEL
            # Products also run over what is behind the last key or number: what lay there before may be subnormal, and slow.
            if _up(count, LANES) < panels * PANEL:
                block[(panels - 1) * k_width * PANEL : panels * k_width * PANEL] = 0
            decode_columns(job[_K_KIND], k, job[_K_ROW], count, k_width, block, 0, few)
            unseen = max(0, key - position) * members  # rows of the queries before these keys
            q, s, m = q_at + 4 * k_width * unseen, scores_at + 4 * KEYS * unseen, mixed_at + 4 * m_width * unseen
            multiply(q, 4 * k_width, rows - unseen, block_at, panels, k_width, s, 4 * KEYS, True)
            _weigh(scores, unseen, rows, members, position, window, key, count, softcap, top, total, mixed, m_width)
            v = job[_V] + head * job[_V_HEAD] + key * job[_V_ROW]
            panels = v_width // PANEL
            if v_given < v_width:
                block[(panels - 1) * count * PANEL : panels * count * PANEL] = 0
            decode_rows(job[_V_KIND], v, job[_V_ROW], count, v_given, block, 0, PANEL, count * PANEL)
            multiply(s, 4 * KEYS, rows - unseen, block_at, panels, count, m, 4 * m_width, False)
            if job[_SHARED]:
                weighing[0], weighing[1], weighing[2] = scores_at, mixed_at + 4 * v_width, 4 * m_width
                weighing[3], weighing[4], weighing[5], weighing[6] = rows, unseen, key, count
                weighing[7], weighing[8] = job[_SHARED_VALUES], shared
                weighing[9], weighing[10] = position, members
                call_part(job[_SHARED], weighing.ctypes.data, 0)
            key += count
        _finish(job, task, head, rows, members, top, total, mixed, v_width, m_width)
        if job[_SHARED] and not job[_SHARED_HEADS]:
            squares = view(job[_SHARED_OUT] + 8 * number * job[_SHARED_WIDTH], job[_SHARED_WIDTH], np.float64)
            sum_squares(mixed_at + 4 * v_width, 4 * m_width, rows, total, squares)


@part
def merge(argument, number):
    """Joins the splits of a job for one query in time; the result is in split 0."""
    job = view(argument, _JOB_SIZE, np.int64)
    heads, width, splits, n = job[_KV_HEADS] * job[_GROUP], job[_V_WIDTH], job[_SPLITS], job[_N]
    results = splits * n * heads
    out, others = (
        view(job[_OUT], n * heads * width, np.float32),
        view(job[_OUT_SPLITS], (splits - 1) * n * heads * width, np.float32),
    )
    top, total = view(job[_TOP], results, np.float32), view(job[_TOTAL], results, np.float32)
    for to in range(number * heads, (number + 1) * heads):
        highest = top[to]
        for split in range(1, splits):
            highest = max(highest, top[split * n * heads + to])
        sum_ = np.float32(0)
        for split in range(splits):
            from_ = split * n * heads + to
            sum_ += total[from_] * exp(top[from_] - highest)
        for split in range(splits):
            from_ = split * n * heads + to
            weight = total[from_] * exp(top[from_] - highest) / sum_
            for j in range(width):
                if split == 0:
                    out[to * width + j] = out[to * width + j] * weight
                else:
                    out[to * width + j] = out[to * width + j] + others[((split - 1) * n * heads + to) * width + j] * weight
