"""What an indexer's keys score for the queries of some tokens: products with panels of keys, folded while they are in the
processor's cache."""

from __future__ import annotations

import numpy as np

from ......simd.lanes import LANES, load, max_lanes, splat, store
from ......simd.memory import address, fill, keep_alive, line_address, view
from ......simd.team import TaskKernel, call_part
from .byte_keys import BYTE_SCORES
from .cache_rows import TYPE_IDS, decode_columns
from .running_softmax import round_up
from .tiles import ALL_KEYS, PANEL, multiply_panels

_F32 = TYPE_IDS["f32"]
# Operands: queries float32 [tokens, heads, width]; keys, float32 as the cache has them or rows of BYTES, and how many; factors
# float32 [tokens, heads], or 0: ones; out float32 [tokens, out_step], or, for runs of keys, [tokens, heads, out_step].
SCORES = np.dtype(
    [
        (name, np.int64)
        for name in (
            "queries", "tokens", "heads", "width", "keys", "row_bytes", "count",
            "factors",
            "run",  # 0: of each key the sum over heads of factor * max(0, score); n: of each n keys each head's largest score
            "out", "out_step",
            "step",  # keys of a part: a multiple of LANES and of `run`
            "rounded", "byte_part",  # queries as byte_keys rounds them, for keys of BYTES, and its part; 0: float32
        )
    ]
)  # fmt: skip


def _score(task, number):
    first = number * task.step
    count, queries, width = min(task.step, task.count - first), task.tokens * task.heads, round_up(task.width, LANES)
    panels = (count + PANEL - 1) // PANEL
    columns = panels * PANEL
    of_bytes = columns * width // 32 + LANES * width // 2 if task.rounded else 0
    scratch = np.empty(columns * width + queries * (columns + width) + LANES + of_bytes, np.float32)
    panels_at = line_address(scratch)
    scores_at = panels_at + 4 * columns * width
    queries_at = scores_at + 4 * queries * columns
    if task.rounded:
        record = np.zeros(1, BYTE_SCORES)
        one = record[0]
        one.rounded, one.rows, one.width, one.count = task.rounded, queries, width, count
        one.keys, one.key_step = task.keys + first * task.row_bytes, task.row_bytes
        one.scores, one.scores_step, one.panels = scores_at, 4 * columns, panels_at
        one.scales, one.scratch = queries_at, queries_at + columns * width // 8
        one.first, one.last = panels_at, panels_at
        call_part(task.byte_part, address(record), 0)
        keep_alive(record)
    else:
        given, rows = view(task.queries, queries * task.width, np.float32), view(queries_at, queries * width, np.float32)
        for r in range(queries):
            for j in range(task.width):
                rows[r * width + j] = given[r * task.width + j]
            for j in range(task.width, width):
                rows[r * width + j] = np.float32(0)
        if round_up(count, LANES) < columns:  # what lay there may be subnormal, and slow
            fill(view(panels_at + 4 * (panels - 1) * width * PANEL, width * PANEL, np.float32), 0)
        decode_columns(_F32, task.keys + first * task.row_bytes, task.row_bytes, count, width, panels_at, 0)
        every = np.bool_(True)
        multiply_panels(
            *(queries_at, 4 * width, queries, panels_at, panels, width, scores_at, 4 * columns, every, panels_at, panels_at),
            ALL_KEYS,
        )
    scores = view(scores_at, queries * columns, np.float32)
    for token in range(task.tokens):
        if task.run:
            for row in range(token * task.heads, (token + 1) * task.heads):
                out = view(task.out + 4 * (row * task.out_step + first // task.run), task.step // task.run, np.float32)
                for start in range(0, count, task.run):
                    highest = scores[row * columns + start]
                    for j in range(start + 1, min(start + task.run, count)):
                        highest = max(highest, scores[row * columns + j])
                    out[start // task.run] = highest
            continue
        factors = view(task.factors + 4 * token * task.heads, task.heads if task.factors else 0, np.float32)
        out = view(task.out + 4 * (token * task.out_step + first), round_up(count, LANES), np.float32)
        for j in range(0, count, LANES):
            total = splat(0)
            for head in range(task.heads):
                score = max_lanes(load(scores, (token * task.heads + head) * columns + j), splat(0))
                total = total + score * (factors[head] if task.factors else np.float32(1))
            store(out, j, total)
    keep_alive(scratch)


score_keys = TaskKernel(_score, SCORES)
