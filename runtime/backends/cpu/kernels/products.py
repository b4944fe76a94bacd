"""Matrix products of a few tokens, as programs for a team of threads (see `team` and `gemv`): one call for several matrices of
the same input, and one for a whole gated feed-forward block, of experts too.

A *plan*, int64 [PLAN_WORDS], says what does not change from token to token: `plan` makes it from a matrix's packed bytes.
"""

from __future__ import annotations

import numpy as np

from .....formats import TensorType
from .....simd.compile import kernel
from .....simd.memory import view
from .....simd.team import part, run
from .activations import RUN, quantise_run
from .elementwise import gate_run
from .gemv import gemv as g

FUNCTION, WEIGHTS, MATRIX_BYTES, ROW_BYTES, ROWS, COLUMNS, SLICES, BLOCK, ABREAST = range(9)
PLAN_WORDS = 9
FEW = 8  # tokens up to which products are made this way

_SLICE_BYTES = 32 << 10  # of weights, in the last slices: a stage ends with threads waiting for half of one, a microsecond
CHUNK = 1024  # activations quantised at a time, a multiple of all blocks


def plan(
    packed: np.ndarray,
    kind: TensorType,
    columns: int,
    matrices: int = 1,
    part: tuple[int, int] | None = None,
    threads: int = 1,
) -> np.ndarray | None:
    """What products need to know of a matrix, or of a stack of them; None if there is no product for it.

    packed: uint8 [rows of all matrices, row bytes], contiguous: it has to be kept as long as the plan is used.
    part: only the rows from ... to of each matrix take part; all if None. threads: among which products are shared out.
    """
    found, whole = g.gemv(kind.name), len(packed) // matrices
    first, stop = part or (0, whole)
    if found is None or columns % found.columns or not packed.flags.c_contiguous:
        return None
    if whole % found.rows or first % found.rows or stop % found.rows:
        return None
    rows, size = stop - first, packed.shape[1]
    abreast = max(1, min(threads, rows // found.rows, -(-rows * size // _SLICE_BYTES)))
    slices = abreast if threads == 1 else abreast * max(1, (rows * size // (abreast * _SLICE_BYTES)).bit_length())
    start = packed.ctypes.data + first * size
    return np.array([found.address, start, whole * size, size, rows, columns, slices, found.activations, abreast], np.int64)


@part
def quantise_part(argument, number):
    """Table: x, codes, scales, sums, block, elements."""
    table = view(argument, 6, np.int64)
    first, block = number * CHUNK, table[4]
    size = min(CHUNK, table[5] - first)
    quantise_run(
        view(table[0] + 4 * first, size, np.float32),
        block,
        view(table[1] + first, size, np.uint8),
        view(table[2] + 4 * (first // block), size // block, np.float32),
        view(table[3] + 2 * (first // RUN), size // RUN, np.int16),
    )


@part
def gate_part(argument, number):
    """The activation of a feed-forward block, and its quantisation for the product that follows.

    Table: gate, codes, scales, sums, block (0: not quantised), elements per row, up, kind, limit (float64), biases of gate and
    of up (0: none), matrix of each row. Parts: rows x chunks.
    """
    table, limit = view(argument, 12, np.int64), np.float32(view(argument, 12, np.float64)[8])
    columns, block = table[5], table[4]
    chunks = -(-columns // CHUNK)
    row, start = number // chunks, number % chunks * CHUNK
    size, first = min(CHUNK, columns - start), row * columns + start
    gate, up = view(table[0] + 4 * first, size, np.float32), view(table[6] + 4 * first, size, np.float32)
    matrix = view(table[11], row + 1, np.int64)[row]
    if table[9]:
        _add(gate, table[9] + 4 * (matrix * columns + start))
    if table[10]:
        _add(up, table[10] + 4 * (matrix * columns + start))
    gate_run(table[7], gate, up, gate, limit)
    if block:
        codes, scales = view(table[1] + first, size, np.uint8), view(table[2] + 4 * (first // block), size // block, np.float32)
        quantise_run(gate, block, codes, scales, view(table[3] + 2 * (first // RUN), size // RUN, np.int16))


@kernel
def _add(row, address):
    values = view(address, row.size, np.float32)
    for i in range(row.size):
        row[i] += values[i]


@kernel
def _room(rows, columns):
    """Memory for the quantised activations of so many rows, or for as many shares of them."""
    return np.empty(rows * (columns * 2 + 64), np.uint8)  # a code takes 1 byte, its shares of scale and sum 1/4; 64: a border


@kernel
def _activations(table, x, room, rows, columns, block):
    """The first six words of a table for quantising x into `room` (addresses)."""
    table[0] = x
    table[1] = (room + 63) // 64 * 64
    table[2] = table[1] + rows * columns
    table[3] = table[2] + 4 * rows * (columns // max(block, 1)) * (block > 0)
    table[4], table[5] = block, rows * columns


@kernel
def _task(program, row, stage, function, argument, parts):
    program[row, 0], program[row, 1], program[row, 2], program[row, 3] = stage, function, argument, parts


@kernel
def _product(program, row, stage, plan, activations, out, jobs, table):
    """The task of multiplying quantised activations (a table as above) with the matrices of a plan."""
    table[g.WEIGHTS], table[g.MATRIX_BYTES], table[g.ROW_BYTES] = plan[WEIGHTS], plan[MATRIX_BYTES], plan[ROW_BYTES]
    table[g.ROWS], table[g.COLUMNS], table[g.SLICES] = plan[ROWS], plan[COLUMNS], plan[SLICES]
    table[g.CODES] = activations[1] if plan[BLOCK] else activations[0]
    table[g.SCALES], table[g.SUMS] = activations[2], activations[3]
    table[g.OUT], table[g.OUT_STRIDE], table[g.JOBS], table[g.ABREAST] = out, plan[ROWS], jobs.ctypes.data, plan[ABREAST]
    _task(program, row, stage, plan[FUNCTION], table.ctypes.data, len(jobs) * plan[SLICES])


@kernel
def multiply(team, quantise, plans, matrix, x, out):
    """The products of x float32 [n, columns] with `matrix` of each of the plans [m, PLAN_WORDS], of the same columns.

    out: float32 [n * rows of all], the result [n, rows] of one plan after the other. quantise: address of quantise_part.
    """
    n, columns = x.shape
    m = len(plans)
    program, tables, inputs = np.empty((2 * m, 4), np.int64), np.empty((m, g.FIELDS), np.int64), np.empty((m, 6), np.int64)
    jobs = np.empty((1, 4), np.int64)
    jobs[0, g.MATRIX], jobs[0, g.FIRST], jobs[0, g.TOKENS], jobs[0, g.TARGET] = matrix, 0, n, 0
    room = _room(n * m, columns)
    at = out.ctypes.data
    for i in range(m):
        first = 0  # the first plan with the same kind of activations, whose own are then used
        while plans[first, BLOCK] != plans[i, BLOCK]:
            first += 1
        _activations(inputs[i], x.ctypes.data, room.ctypes.data + i * (len(room) // m), n, columns, plans[i, BLOCK])
        chunks = -(-n * columns // CHUNK) if first == i and plans[i, BLOCK] else 0
        _task(program, i, 0, quantise, inputs[i].ctypes.data, chunks)
        _product(program, m + i, 1, plans[i], inputs[first], at, jobs, tables[i])
        at += 4 * n * plans[i, ROWS]
    run(team, program)


@kernel
def feed_forward(team, functions, plans, jobs, matrices, kind, limit, gate_bias, up_bias, x, out):
    """down(activation(gate(x)) * up(x)) for a few tokens, each with its expert's matrices.

    functions: addresses of quantise_part and gate_part; plans [3, PLAN_WORDS]: gate, up, down; jobs int64 [2, jobs, 4] as for a
    Gemv, the first for gate and up with inputs from x, the second for down with inputs from the rows that the first ones made;
    matrices int64 [rows]: the matrix of each of these rows; kind, limit: as for gate_run; biases float32 [matrices, n_ff] or
    [0, 0]; x float32 [n, n_embd]; out float32 [rows, n_embd].
    """
    n, columns = x.shape
    rows, hidden = len(matrices), plans[0, ROWS]
    program, tables = np.empty((6, 4), np.int64), np.empty((3, g.FIELDS), np.int64)
    inputs, gates = np.empty((2, 6), np.int64), np.empty(12, np.int64)
    room_x, room_y = _room(2 * n, columns), _room(rows, hidden)
    values = np.empty((2, rows, hidden), np.float32)
    _activations(inputs[0], x.ctypes.data, room_x.ctypes.data, n, columns, plans[0, BLOCK])
    _activations(inputs[1], x.ctypes.data, room_x.ctypes.data + len(room_x) // 2, n, columns, plans[1, BLOCK])
    chunks = -(-n * columns // CHUNK)
    _task(program, 0, 0, functions[0], inputs[0].ctypes.data, chunks if plans[0, BLOCK] else 0)
    differ = plans[1, BLOCK] != plans[0, BLOCK]
    _task(program, 1, 0, functions[0], inputs[1].ctypes.data, chunks if differ and plans[1, BLOCK] else 0)
    for i in range(2):
        _product(program, 2 + i, 1, plans[i], inputs[i if differ else 0], values[i].ctypes.data, jobs[0], tables[i])
    _activations(gates, values[0].ctypes.data, room_y.ctypes.data, rows, hidden, plans[2, BLOCK])
    gates[5], gates[6], gates[7] = hidden, values[1].ctypes.data, kind
    gates.view(np.float64)[8] = limit
    gates[9] = gate_bias.ctypes.data if gate_bias.size else 0
    gates[10] = up_bias.ctypes.data if up_bias.size else 0
    gates[11] = matrices.ctypes.data
    _task(program, 4, 2, functions[1], gates.ctypes.data, rows * -(-hidden // CHUNK))
    _product(program, 5, 3, plans[2], gates, out.ctypes.data, jobs[1], tables[2])
    run(team, program)


@kernel
def multiply_each(team, quantise, plan, jobs, x, out):
    """The products of x float32 [n, columns] with the matrices of one plan, as the jobs int64 [jobs, 4] say (see `gemv`).

    out: float32 [rows of all jobs, rows of a matrix]. quantise: address of quantise_part.
    """
    n, columns = x.shape
    program, table, inputs = np.empty((2, 4), np.int64), np.empty(g.FIELDS, np.int64), np.empty(6, np.int64)
    room = _room(n, columns)
    _activations(inputs, x.ctypes.data, room.ctypes.data, n, columns, plan[BLOCK])
    _task(program, 0, 0, quantise, inputs.ctypes.data, -(-n * columns // CHUNK) if plan[BLOCK] else 0)
    _product(program, 1, 1, plan, inputs, out.ctypes.data, jobs, table)
    run(team, program)
