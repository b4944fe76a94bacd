"""Products of a few tokens with packed weights (GEMV): the plan of a matrix, and a product outside of a pass."""

from __future__ import annotations

import numpy as np

from .....formats import TensorType
from .....simd import team as team_words
from .....simd.compile import kernel
from .....simd.memory import CACHE_LINE, keep_alive, line_address
from .....simd.team import run
from . import row_kernels
from .gemv import gemv as g

FUNCTION, WEIGHTS, MATRIX_BYTES, ROW_BYTES, ROWS, COLUMNS, SLICES, BLOCK, EQUAL_SLICES, ONE_STREAM = range(10)
GEMV_TOKENS = 8  # up to which products are made this way

# Of weights: in a slice where threads share a small matrix, and in the last ones of a large one. At the end of a stage threads
# wait for half of one, some microseconds; but the first lines of each slice come late: 32 KiB cost a tenth to a fifth more.
_LEAST_BYTES, _LAST_BYTES = 32 << 10, 256 << 10
_QUANTISE = row_kernels.quantise.dtype
_CHUNK = 1024  # activations quantised at a time, a multiple of all blocks


def plan_gemv(
    packed: np.ndarray,
    stored: TensorType,
    columns: int,
    matrices: int = 1,
    part: tuple[int, int] | None = None,
    threads: int = 1,
) -> np.ndarray | None:
    """The plan of a matrix or a stack of them, int64 words as named above; None if there is no GEMV for it.

    packed: uint8 [rows of all matrices, row bytes], contiguous; the plan holds its address, so it has to live as long.
    part: products are with rows part[0] to part[1] - 1 of each matrix; with all if None. threads: that a product is divided
    among.
    """
    product, height = g.gemv(stored.name), len(packed) // matrices
    first, stop = part or (0, height)
    if product is None or columns % product.columns or not packed.flags.c_contiguous:
        return None
    if height % product.rows or first % product.rows or stop % product.rows:
        return None
    rows, size = stop - first, packed.shape[1]
    equal = max(1, min(threads, rows // product.rows, -(-rows * size // _LEAST_BYTES)))
    slices = equal if threads == 1 else equal * max(1, (rows * size // (equal * _LAST_BYTES)).bit_length())
    start = packed.ctypes.data + first * size
    sizes = height * size, size, rows, columns, slices, product.activations, equal
    return np.array([product.address, start, *sizes, g.reads_one_stream()], np.int64)


@kernel
def multiply_jobs(team, quantise, plan, jobs, x, out):
    """The products of x float32 [n, columns] with the matrices of a plan, as the jobs int64 [jobs, 4] say (see `gemv`).

    out: float32 [rows of all jobs, rows of a matrix]. quantise: address of row_kernels.quantise.
    """
    n, columns = x.shape
    program, table, inputs = np.empty((2, 4), np.int64), np.empty(g.FIELDS, np.int64), np.empty(1, _QUANTISE)
    block = plan[BLOCK]
    # Per activation: a code of 1 byte, and at most 1/4 byte of a scale and a sum.
    memory = np.empty(CACHE_LINE + (2 * n * columns if block else 0), np.uint8)
    record = inputs[0]
    cells = record.partition
    cells.rows, cells.row_step, cells.columns, cells.column_step = n, 1, columns, _CHUNK
    record.x.address, record.x.row_bytes, record.block = x.ctypes.data, 4 * columns, block
    record.codes = line_address(memory)
    record.scales = record.codes + n * columns
    record.sums = record.scales + (4 * n * (columns // block) if block else 0)
    program[0, team_words.STAGE], program[0, team_words.FUNCTION], program[0, team_words.ARGUMENT] = (
        0,
        quantise,
        inputs.ctypes.data,
    )
    program[0, team_words.PARTS] = n * ((columns + _CHUNK - 1) // _CHUNK) if block else 0
    table[g.WEIGHTS], table[g.MATRIX_BYTES], table[g.ROW_BYTES] = plan[WEIGHTS], plan[MATRIX_BYTES], plan[ROW_BYTES]
    table[g.ROWS], table[g.COLUMNS], table[g.SLICES] = plan[ROWS], plan[COLUMNS], plan[SLICES]
    table[g.CODES] = record.codes if block else x.ctypes.data
    table[g.SCALES], table[g.SUMS] = record.scales, record.sums
    table[g.OUT], table[g.OUT_STRIDE], table[g.JOBS] = out.ctypes.data, plan[ROWS], jobs.ctypes.data
    table[g.EQUAL_SLICES], table[g.ONE_STREAM] = plan[EQUAL_SLICES], plan[ONE_STREAM]
    program[1, team_words.STAGE], program[1, team_words.FUNCTION], program[1, team_words.ARGUMENT] = (
        1,
        plan[FUNCTION],
        table.ctypes.data,
    )
    program[1, team_words.PARTS] = len(jobs) * plan[SLICES]
    run(team, program)
    keep_alive(memory)
    keep_alive(inputs)
    keep_alive(table)
