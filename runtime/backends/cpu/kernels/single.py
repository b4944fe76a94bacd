"""Parts for programs that hold a whole pass of one token: small tasks in turn, rows from place to place, its experts."""

from __future__ import annotations

import numpy as np

from .....simd.memory import view
from .....simd.team import ARGUMENT, FUNCTION, PARTS, atomic_load, call_part, part
from .elementwise import route
from .gemv.gemv import FIRST, MATRIX, TARGET, TOKENS


@part
def in_turn(argument, number):
    """Runs tasks one after the other on this thread. Table: how many; then, for each, a row as of a program."""
    for task in range(atomic_load(argument)):
        row = argument + 8 + 32 * task
        for i in range(atomic_load(row + 8 * PARTS)):
            call_part(atomic_load(row + 8 * FUNCTION), atomic_load(row + 8 * ARGUMENT), i)


@part
def move(argument, number):
    """Copies rows of float32, or adds them to what is there.

    Table, int64: address of the first row and bytes from row to row; the same of where they go; how many, and numbers of each;
    address of int64 [count], which rows to take (0: one after the other); whether they are added.
    """
    table = view(argument, 8, np.int64)
    count, width = table[4], table[5]
    for i in range(count):
        row = view(table[6], count, np.int64)[i] if table[6] else i
        values, out = view(table[0] + row * table[1], width, np.float32), view(table[2] + i * table[3], width, np.float32)
        for j in range(width):
            out[j] = out[j] + values[j] if table[7] else values[j]


CHOICE_FIELDS = (
    "scores",  # address of float32 [experts], overwritten
    "experts",
    "sigmoid",
    "bias",  # address of float32 [experts], or 0
    "groups",
    "groups_used",
    "normalised",
    "scale",  # float64
    "used",
    "factors",  # addresses of the results: float32 [used], int64 [used], int64 [2, used, 4]
    "matrices",
    "jobs",
    "sums",  # address and size of float32 to be set to 0
    "n_sums",
)


@part
def choose(argument, number):
    """One token's experts as `small.route` chooses them, by number, and their jobs (as for `products.feed_forward`)."""
    table = view(argument, 14, np.int64)
    experts, used = table[1], table[8]
    scores, bias = (
        view(table[0], experts, np.float32).reshape(1, experts),
        view(table[3], experts if table[3] else 0, np.float32),
    )
    chosen, weights = np.empty((1, used), np.int64), np.empty((1, used), np.float32)
    scale = view(argument, 14, np.float64)[7]
    route(scores, table[2] != 0, bias, table[4], table[5], table[6] != 0, scale, chosen, weights)
    factors, matrices = view(table[9], used, np.float32), view(table[10], used, np.int64)
    jobs = view(table[11], 8 * used, np.int64).reshape(2, used, 4)
    for i in range(used):
        at = i
        while at > 0 and matrices[at - 1] > chosen[0, i]:
            matrices[at], factors[at] = matrices[at - 1], factors[at - 1]
            at -= 1
        matrices[at], factors[at] = chosen[0, i], weights[0, i]
    for i in range(used):
        for stage in range(2):
            jobs[stage, i, MATRIX], jobs[stage, i, TOKENS], jobs[stage, i, TARGET] = matrices[i], 1, i
        jobs[0, i, FIRST], jobs[1, i, FIRST] = 0, i
    sums = view(table[12], table[13], np.float32)
    sums[:] = 0
