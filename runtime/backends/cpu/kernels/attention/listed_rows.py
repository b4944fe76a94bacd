"""Attention of single tokens to rows that lie in different places: those of the last tokens, and those of the cache, all or as
an indexer selects. A list of addresses stands for the rows; flash attention has those of a block of keys brought together when
it comes to them. Selected blocks of keys and values are brought together before."""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.lanes import LANES
from ......simd.memory import CACHE_LINE, address, keep_alive, line_address, view
from ......simd.team import TaskKernel, call_part
from ..recurrent import SEQUENCES
from ..task_kernel import CONSTANT, INT, REAL, ROWS, reads, row_of, task_kernel, writes
from .cache_rows import TYPE_IDS, decode_rows
from .flash import JOB_FIELDS, TASK_FIELDS
from .running_softmax import round_up
from .shared_values import KEYS
from .tiles import PANEL

(
    _TASKS, _Q, _K, _V, _OUT, _SINKS, _N, _GROUP, _KV_HEADS, _K_WIDTH, _V_WIDTH, _K_TYPE, _V_TYPE, _K_ROW_BYTES, _V_ROW_BYTES,
    _PAST, _SPLITS, _SPLIT_BLOCKS, _SCORE_PART, _VALUE_PART, _GATHER_PART, _GATHERED, _SCALE, _MAXIMA, _SUMS,
) = (
    JOB_FIELDS.index(name)
    for name in (
        "tasks", "q", "k", "v", "out", "sinks", "n", "group", "kv_heads", "k_width", "v_width", "k_type", "v_type",
        "k_row_bytes", "v_row_bytes", "past", "splits", "split_blocks", "score_part", "value_part", "gather_part", "gathered",
        "scale", "maxima", "sums",
    )
)  # fmt: skip
_JOB_SIZE, _TASK_SIZE, _F32 = len(JOB_FIELDS), len(TASK_FIELDS), TYPE_IDS["f32"]
# Address of the list, how many of its rows are float32, numbers of a row, numbers and words in memory, type of the others. If
# these are all there are, they stay what they are; else they are decoded.
_LISTED_SIZE = 6
# Of both attentions: widths of keys and values, the factor of the scores; attend: address of what flash.attend_of returns;
# score_part, value_part: see job_parts; is_split: whether sums have the order of generated tokens (see flash).
ATTENTION = dict.fromkeys(("k_width", "v_width", "attend", "score_part", "value_part", "is_split"), INT) | {"scale": REAL}


def _gather(argument, number):
    """Brings some of the rows of a list together. argument: the address of int64 [4]: that of the list's record, the first
    row's number, how many, and where they are written to, one after the other, filled up with zeros to their width in memory.
    """
    words = view(argument, 4, np.int64)
    listed, first, count, out = view(words[0], _LISTED_SIZE, np.int64), words[1], words[2], words[3]
    rows, width, padded = view(listed[0] + 8 * first, count, np.int64), listed[2], listed[3]
    for i in range(count if listed[1] == 0 else 0):
        source, copied = view(rows[i], listed[4], np.int64), view(out + 8 * listed[4] * i, listed[4], np.int64)
        for j in range(copied.size):
            copied[j] = source[j]
    for i in range(count if listed[1] else 0):
        to = view(out + 4 * padded * i, padded, np.float32)
        if first + i < listed[1]:
            source = view(rows[i], width, np.float32)
            for j in range(width):
                to[j] = source[j]
            for j in range(width, padded):
                to[j] = np.float32(0)
        else:
            decode_rows(listed[5], rows[i], 0, 1, padded, to, 0, 0, PANEL, 0)


gather = TaskKernel(_gather)


@kernel
def sequence_of(task, token):
    """The sequence that a row of the pass belongs to: its number, first row, and tokens before the pass."""
    sequence = 0
    while True:
        rows = view(task.ranges + 16 * sequence, 2, np.int64)
        if token < rows[0] + rows[1]:
            return sequence, rows[0], view(task.lengths + 8 * sequence, 1, np.int64)[0]
        sequence += 1


@task_kernel(
    **{"q": reads(ROWS), "kv": reads(ROWS), "out": writes(ROWS), "selection": reads(ROWS), "sinks": CONSTANT},
    **{**SEQUENCES, "lengths": CONSTANT, "entries": CONSTANT, "entry_step": INT},
    **dict.fromkeys(("heads", "members", "window", "stride", "every", "top", "type_id", "row_type", "gather"), INT),
    **ATTENTION,
)
def attend_listed(task, number):
    """One token's attention, of `members` heads, with one key head.

    q, out     rows of float32 [heads, k_width], and [heads, v_width]: values are the first numbers of keys
    kv         rows of float32 [k_width] of the tokens of the pass, of which a token sees the last `window` up to itself; the
               state has those of the tokens before, at their position modulo `window`, rows of `stride` numbers. window 0:
               there are none
    lengths    int64 [sequences], tokens before the pass
    entries    of each sequence, entry_step bytes apart, int64 [2]: address of its first entry and bytes of one. A token sees
               those of the runs of `every` tokens that are complete with it; 0: there are none
    selection  rows of float32 [top]: numbers of the entries that a token sees; below 0, or address 0: all
    sinks      float32 [heads], or 0
    type_id    of the entries; row_type: of all rows as they are multiplied, that of the entries or, with a window, f32
    gather     address of `gather`
    """
    parts = (task.heads + task.members - 1) // task.members
    token, head = number // parts, number % parts * task.members
    sequence, first, past = sequence_of(task, token)
    stop, ring = past + token - first + 1, view(task.states + 16 * sequence, 2, np.int64)[0] + task.offset
    recent, entries = min(stop, task.window), np.int64(0)
    chosen = row_of(task.selection, token, 0, task.top)
    is_chosen = task.selection.address != 0 and chosen[0] >= 0
    if task.every:
        entries = np.int64(task.top) if is_chosen else stop // task.every
    count = recent + entries
    rows = np.empty(count, np.int64)
    for i in range(recent):
        position = stop - recent + i
        if position < past:
            rows[i] = ring + 4 * task.stride * (position % task.window)
        else:
            rows[i] = task.kv.address + (first + position - past) * task.kv.row_bytes
    if entries:
        place = view(task.entries + task.entry_step * sequence, 2, np.int64)
        for i in range(entries):
            rows[recent + i] = place[0] + place[1] * (np.int64(chosen[i]) if is_chosen else i)
    padded = round_up(task.k_width, LANES)
    row_bytes = padded * (4 if task.row_type == _F32 else 2)
    listed = np.empty(_LISTED_SIZE, np.int64)
    listed[0], listed[1], listed[2], listed[3] = address(rows), recent, task.k_width, padded
    listed[4], listed[5] = row_bytes // 8, task.type_id
    job = np.zeros(_JOB_SIZE, np.int64)
    job[_Q], job[_OUT] = task.q.address + token * task.q.row_bytes, task.out.address + token * task.out.row_bytes
    job[_GROUP], job[_K_TYPE], job[_V_TYPE] = task.heads, task.row_type, task.row_type
    job[_K_ROW_BYTES], job[_V_ROW_BYTES], job[_SINKS] = row_bytes, row_bytes, task.sinks
    job[_GATHER_PART], job[_GATHERED] = task.gather, address(listed)
    _attend_rows(task, job, count, head, min(head + task.members, task.heads))
    keep_alive(rows)
    keep_alive(listed)


@kernel
def _copy_rows(place, head, first, count, out):
    """Copies rows of a head as they are. place: address of the first row, bytes of a row, and of a head."""
    source, copied = (
        view(place[0] + place[2] * head + place[1] * first, count * place[1], np.uint8),
        view(out, count * place[1], np.uint8),
    )
    for j in range(copied.size):
        copied[j] = source[j]


@kernel
def _attend_rows(task, job, count, head, head_end):
    """Attention of one token to `count` rows of one key head, of some of the heads that share it. task: has ATTENTION; job: has
    its addresses, types and bytes of rows, and how many heads there are."""
    part, sums, blocks = np.zeros(_TASK_SIZE, np.int64), np.empty(2 * job[_GROUP], np.float32), (count + KEYS - 1) // KEYS
    part[1], part[2], part[3], part[5], part[7] = 1, head, head_end, 1, blocks
    job[_TASKS], job[_MAXIMA], job[_SUMS] = address(part), address(sums), address(sums)
    job[_N], job[_KV_HEADS], job[_PAST], job[_SPLITS] = 1, 1, count - 1, 1
    job[_K_WIDTH], job[_V_WIDTH] = task.k_width, task.v_width
    if task.is_split:  # one split of all keys
        split_blocks = np.int64(1)
        while split_blocks < blocks:
            split_blocks *= 2
        job[_SPLIT_BLOCKS], job[_SCORE_PART], job[_VALUE_PART] = split_blocks, task.score_part, task.value_part
    view(address(job), _JOB_SIZE, np.float64)[_SCALE] = task.scale
    call_part(task.attend, address(job), 0)
    keep_alive(part)
    keep_alive(sums)
    keep_alive(job)


@task_kernel(
    **{"q": reads(ROWS), "out": writes(ROWS), "selection": reads(ROWS), "ranges": CONSTANT, "lengths": CONSTANT},
    **{"keys": CONSTANT, "values": CONSTANT, "row_step": INT},
    **dict.fromkeys(("heads", "kv_heads", "chosen", "units", "top", "block", "k_type", "v_type"), INT),
    **ATTENTION,
)
def attend_blocks(task, number):
    """One token's attention to the blocks that are selected for it, of one of `units` runs of its heads, each with one key head
    and one selection; where all blocks are seen, the result stays what it is.

    q, out        rows of float32 [heads, k_width], and [heads, v_width]
    selection     rows of float32 [chosen, top]: numbers of blocks of `block` keys, ascending; below 0: all are seen
    ranges        int64 [sequences, 2], first row of each and how many; lengths: int64 [sequences], tokens before the pass
    keys, values  of each sequence, row_step bytes apart, int64 [3]: address of its first row, bytes of a row, and of a head
    """
    token, unit = number // task.units, number % task.units
    sequence, first, past = sequence_of(task, token)
    chosen = row_of(task.selection, token, unit * task.chosen // task.units * task.top, task.top)
    if chosen[0] < 0:
        return
    seen, members = past + token - first + 1, task.heads // task.units
    kv_head, head = unit * task.kv_heads // task.units, unit * members
    job, count = np.zeros(_JOB_SIZE, np.int64), np.int64(0)
    for i in range(task.top):
        count += min(seen - np.int64(chosen[i]) * task.block, task.block)
    k_place = view(task.keys + task.row_step * sequence, 3, np.int64)
    v_place = view(task.values + task.row_step * sequence, 3, np.int64)
    k_rows, v_rows = np.empty(count * k_place[1] + CACHE_LINE, np.uint8), np.empty(count * v_place[1] + CACHE_LINE, np.uint8)
    job[_K], job[_V] = line_address(k_rows), line_address(v_rows)
    taken = np.int64(0)
    for i in range(task.top):
        at = np.int64(chosen[i]) * task.block
        rows = min(seen - at, task.block)
        _copy_rows(k_place, kv_head, at, rows, job[_K] + k_place[1] * taken)
        _copy_rows(v_place, kv_head, at, rows, job[_V] + v_place[1] * taken)
        taken += rows
    job[_Q] = task.q.address + token * task.q.row_bytes + 4 * head * task.k_width
    job[_OUT] = task.out.address + token * task.out.row_bytes + 4 * head * task.v_width
    job[_GROUP], job[_K_TYPE], job[_V_TYPE] = members, task.k_type, task.v_type
    job[_K_ROW_BYTES], job[_V_ROW_BYTES] = k_place[1], v_place[1]
    _attend_rows(task, job, count, 0, members)
    keep_alive(k_rows)
    keep_alive(v_rows)
