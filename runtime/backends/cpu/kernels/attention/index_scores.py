"""What an indexer's keys score for the queries of some tokens: products with panels of keys, folded while they are in the
processor's cache."""

from __future__ import annotations

import numpy as np

from ......simd.lanes import LANES, load, max_lanes, splat, store
from ......simd.memory import address, fill, keep_alive, view
from ......simd.team import TaskKernel
from .cache_rows import TYPE_IDS, decode_columns
from .running_softmax import round_up
from .tiles import PANEL, multiply_panels

_F32 = TYPE_IDS["f32"]
# Operands: queries float32 [tokens, heads, width]; keys, as the cache has them in float32, and how many; factors float32
# [tokens, heads], or 0: ones; out float32 [tokens, out_step], or, for runs of keys, [tokens, heads, out_step].
SCORES = np.dtype(
    [
        (name, np.int64)
        for name in (
            "queries", "tokens", "heads", "width", "keys", "row_bytes", "count",
            "factors",
            "run",  # 0: of each key the sum over heads of factor * max(0, score); n: of each n keys each head's largest score
            "out", "out_step",
            "step",  # keys of a part: a multiple of LANES and of `run`
        )
    ]
)  # fmt: skip


def _score(task, number):
    first = number * task.step
    count, queries, width = min(task.step, task.count - first), task.tokens * task.heads, round_up(task.width, LANES)
    panels = (count + PANEL - 1) // PANEL
    columns = panels * PANEL
    scratch = np.empty(columns * width + queries * (columns + width) + LANES, np.float32)
    panels_at = (address(scratch) + 63) // 64 * 64
    scores_at = panels_at + 4 * columns * width
    queries_at = scores_at + 4 * queries * columns
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
        queries_at, 4 * width, queries, panels_at, panels, width, scores_at, 4 * columns, every, panels_at, panels_at
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
