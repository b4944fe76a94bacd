"""Products of a few tokens with packed weights (GEMV): the plan of a matrix, and a product outside of a pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .....formats import TensorType
from .....simd import team as team_words
from .....simd.compile import kernel
from .....simd.memory import CACHE_LINE, keep_alive, line_address
from .....simd.team import run
from . import row_kernels
from .gemv import gemv as g

GEMV_TOKENS = 8  # up to which products are made this way

# Of weights: in a slice where threads share a small matrix, and in the last ones of a large one. At the end of a stage threads
# wait for half of one, some microseconds; but the first lines of each slice come late: 32 KiB cost a tenth to a fifth more.
_LEAST_BYTES, _LAST_BYTES = 32 << 10, 256 << 10
_QUANTISE = row_kernels.quantise.dtype
_CHUNK = 1024  # activations quantised at a time, a multiple of all blocks


class GemvPlan(NamedTuple):
    """The products with a matrix or a stack of them, whichever tokens are multiplied: fields of a table of `gemv`.

    It holds an address, so the weights have to live as long."""

    product: g.Gemv
    weights: int
    matrix_bytes: int
    row_bytes: int
    rows: int
    columns: int
    slices: int
    equal_slices: int

    def table(self, codes: tuple[int, int, int], out: int, stride: int, jobs: int, several: bool) -> list[int]:
        """The table of a product. codes: addresses of activations; out: of the result, of which a row has `stride` numbers;
        several: whether a job may have more tokens than one, for which code is compiled at the first such table."""
        weights = self.weights, self.matrix_bytes, self.row_bytes, self.rows, self.columns, self.slices
        ways = self.equal_slices, g.reads_one_stream(), self.product.several if several else 0
        return [*weights, *codes, out, stride, jobs, *ways]


def plan_gemv(
    packed: np.ndarray,
    stored: TensorType,
    columns: int,
    matrices: int = 1,
    part: tuple[int, int] | None = None,
    threads: int = 1,
) -> GemvPlan | None:
    """The plan of a matrix or a stack of them; None if there is no GEMV for it.

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
    return GemvPlan(product, start, height * size, size, rows, columns, slices, equal)


def multiply_jobs(team: int, plan: GemvPlan, jobs: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """The products of x float32 [n, columns] with the matrices of a plan, as the jobs int64 [jobs, 4] say (see `gemv`).

    out: float32 [rows of all jobs, rows of a matrix].
    """
    several = bool((jobs[:, g.TOKENS] > 1).any())
    table = np.array(plan.table((0, 0, 0), out.ctypes.data, plan.rows, jobs.ctypes.data, several), np.int64)
    parts = len(jobs) * plan.slices
    _multiply_jobs(team, row_kernels.quantise.address, plan.product.address, parts, plan.product.activations, table, x)


@kernel
def _multiply_jobs(team, quantise, product, parts, block, table, x):
    """Quantises x and multiplies. quantise, product: addresses; table: without those of activations."""
    n, columns = x.shape
    program, inputs = np.empty((2, 4), np.int64), np.empty(1, _QUANTISE)
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
    table[g.CODES] = record.codes if block else x.ctypes.data
    table[g.SCALES], table[g.SUMS] = record.scales, record.sums
    program[1, team_words.STAGE], program[1, team_words.FUNCTION], program[1, team_words.ARGUMENT] = (
        1,
        product,
        table.ctypes.data,
    )
    program[1, team_words.PARTS] = parts
    run(team, program)
    keep_alive(memory)
    keep_alive(inputs)
    keep_alive(table)
