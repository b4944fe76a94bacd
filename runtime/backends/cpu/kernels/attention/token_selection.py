"""The keys, or blocks of keys, that an indexer selects for single tokens, as parts for programs: what differs from run to run,
how many keys there are and where, is read from the pass's arrays."""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.memory import address, keep_alive, view
from ......simd.team import call_part
from ..task_kernel import CONSTANT, INT, ROWS, reads, row_of, task_kernel, writes
from .index_scores import SCORES
from .largest_scores import LARGEST
from .listed_rows import sequence_of

KEYS = 256  # that are scored at a time
# Of both: ranges int64 [sequences, 2], first row and how many; lengths int64 [sequences], tokens before the pass; scores int64
# [2], address of float32 [tokens, numbers] and these numbers; every: tokens that share a key; top: keys, or blocks, that are
# selected for each of `chosen` heads; block: keys of a block, whose highest score counts, by heads; 0: keys are selected, by
# the sums over the heads.
_TOKENS = {"ranges": CONSTANT, "lengths": CONSTANT, "scores": CONSTANT, "every": INT, "top": INT, "chosen": INT, "block": INT}


@kernel
def mark_selected(selection, out):
    """out uint8 [n, keys] = 1 for the keys that a token sees. selection: float32 [n, top_k], their numbers; below 0: all."""
    for t in range(out.shape[0]):
        all_keys = selection[t, 0] < 0
        for j in range(out.shape[1]):
            out[t, j] = np.uint8(all_keys)
        for j in range(0 if all_keys else selection.shape[1]):
            out[t, np.int64(selection[t, j])] = np.uint8(1)


@task_kernel(
    **{"q": reads(ROWS), "factors": reads(ROWS), "keys": CONSTANT, **_TOKENS},
    **dict.fromkeys(("key_step", "heads", "width", "shares", "score"), INT),
)
def score_tokens(task, number):
    """Scores of the keys that one token sees, if they are more than `top`: each `shares`-th run of KEYS.

    q: rows of float32 [heads, width]; factors: rows of float32 [heads], or 0: ones; keys: of each sequence, key_step bytes
    apart, int64 [2]: address of its first key and bytes of one; score: address of index_scores.score_keys.
    """
    token, share = number // task.shares, number % task.shares
    sequence, first, past = sequence_of(task, token)
    count = (past + token - first + 1) // task.every
    if count <= task.top * max(1, task.block):
        return
    keys, scores = view(task.keys + task.key_step * sequence, 2, np.int64), view(task.scores, 2, np.int64)
    record = np.zeros(1, SCORES)
    one, step = record[0], max(1, KEYS // task.block) * task.block if task.block else KEYS
    one.queries, one.tokens, one.heads, one.width = task.q.address + token * task.q.row_bytes, 1, task.heads, task.width
    one.keys, one.row_bytes, one.count, one.step, one.run = keys[0], keys[1], count, step, task.block
    one.factors = task.factors.address + token * task.factors.row_bytes
    one.out, one.out_step = scores[0] + 4 * scores[1] * token, scores[1] // task.chosen
    for run in range(share, (count + step - 1) // step, task.shares):
        call_part(task.score, address(record), run)
    keep_alive(record)


@task_kernel(out=writes(ROWS), **_TOKENS, **dict.fromkeys(("open_run", "always", "take"), INT))
def select_keys(task, number):
    """Numbers of the keys, or blocks, with a head's largest scores for one token, ascending, as float32 [top]; -1 first where
    all are seen.

    open_run: the number of keys follows, which is that of the run that is not complete; always: the last ones that are taken,
    whatever they score; take: address of largest_scores.take_largest.
    """
    token, head = number // task.chosen, number % task.chosen
    _, first, past = sequence_of(task, token)
    count, size = (past + token - first + 1) // task.every, task.top + task.open_run
    if task.block:
        count = (count + task.block - 1) // task.block
    out = row_of(task.out, token, head * size, size)
    if count <= task.top:
        out[0] = np.float32(-1)
        return
    scores, counts, record = view(task.scores, 2, np.int64), np.empty(1, np.int64), np.zeros(1, LARGEST)
    counts[0] = count
    one, step = record[0], scores[1] // task.chosen
    one.scores, one.heads, one.step, one.counts = scores[0] + 4 * (scores[1] * token + step * head), 1, step, address(counts)
    one.wanted, one.always, one.out = task.top, task.always, address(out)
    call_part(task.take, address(record), 0)
    for i in range(task.open_run):
        out[task.top + i] = np.float32(count)
    keep_alive(record)
    keep_alive(counts)
