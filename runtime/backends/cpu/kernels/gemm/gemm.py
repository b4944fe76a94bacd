"""Matrix products of many tokens with packed weights of any type, as programs for a team of threads.

Weights are taken from their packed bytes, a few hundred rows at a time, and every row is unpacked once for all tokens:

* On a processor with bf16 tiles (AMX) everything is multiplied as bf16, which rounds activations far less than eight bits do.
  bf16 weights, which are exact then, get activations as sums of two bf16 numbers: their products are those of float32 up to
  about 2^-16 of the largest.
* Elsewhere types of tile_types.py are multiplied as bytes (gemm_bytes.py), with activations of 8 bits and a scale per 32. Other
  quantised types are decoded and multiplied as bf16 where there are dot products of those, as float32 where there are none.

f32 and f16 weights are left to float32, and so is bf16 without a tile unit.

Types that are decoded (`multiply_decoded`) go through Python, a run of rows at a time. All others have a `Plan`; what is to be
done is entered in a `Program`, and no step of it takes one thread longer than the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ......formats import TensorType
from ......quantize import decode
from ......simd import amx, team
from ......simd.memory import aligned_empty, scratch
from . import parts as gemm_parts
from .block_layouts import kind_of
from .byte_products import BLOCK, TILE_TOKENS
from .float_panels import STEP, TOKENS, panels_of, round_rows
from .float_products import STRETCH, has_dots, multiply_dots, multiply_tiles
from .parts import BYTES, FIELDS, INPUTS, ROUNDED, SPAN, SPLIT
from .unpack_panels import PANEL, unpacker

ROWS = 2 * PANEL  # rows are multiplied in multiples of it: where a matrix is divided among threads
_CHUNK = 1 << 19  # codes unpacked at a time: they stay in the second-level cache
_SUMS = (8, 512, ROWS)  # pairs of panels, tokens and rows whose sums are kept until all columns are done: half a megabyte
_EACH = 8  # parts that a thread gets of a stage: what the last to end waits for is half of one, so a sixteenth
_KEPT = 64 << 20  # bytes of results in between that a thread keeps for the next time

Way = tuple[int, int, int]  # ROUNDED, SPLIT or BYTES; zero and group of BYTES, else 0


class Tokens:
    """Activations float32 [n, columns], and what products need of them, made when first asked for and then shared by all
    matrices that multiply them."""

    def __init__(self, x: np.ndarray):
        self.x = np.ascontiguousarray(x, np.float32)
        self.made: dict[Way, Inputs] = {}

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def rounded(self) -> np.ndarray:
        """As bf16, in blocks."""
        return round_rows(self.x)


class Inputs:
    """Activations in the form that a way of multiplying wants: memory for `rows` rows, whole units, and the table that parts
    read (see gemm_parts).

    x: float32 [any, columns], C-contiguous. places: int64 [rows] or None, which rows of x they are (-1: zeros); None: the first
    ones, and zeros. name: of the memory, if this thread may keep it.
    """

    def __init__(self, way: Way, x: np.ndarray, rows: int, places: np.ndarray | None = None, name: str = ""):
        columns, (self.way, zero, group) = x.shape[1], way
        if self.way == BYTES:
            groups = columns // group
            sizes = (rows * columns, 4 * rows * columns // BLOCK, 4 * rows * groups, 4 * rows * groups)
        else:
            sizes = (2 * rows * -(-columns // STEP) * STEP * (2 if self.way == SPLIT else 1), 0, 0, 0)
        ends = np.cumsum([-(-size // 64) * 64 for size in sizes])
        memory = room(name, (int(ends[-1]),), np.uint8)
        starts = (memory.ctypes.data + np.concatenate([[0], ends[:-1]])).tolist()
        given = 0 if places is None else places.ctypes.data
        self.table = np.array([x.ctypes.data, given, len(x), columns, self.way, *starts, zero, group], np.int64)
        assert len(self.table) == INPUTS
        self._kept = memory, x, places
        self.parts = rows // unit_of(way) * -(-columns // SPAN)


def unit_of(way: Way) -> int:
    """Rows that inputs are made and multiplied in."""
    return TILE_TOKENS if way[0] == BYTES else TOKENS


def room(name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Memory for results in between: of the name, kept by this thread, unless it has none or that is much."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return scratch(name, shape, dtype) if name and size <= _KEPT else aligned_empty(shape, dtype)


@dataclass(frozen=True, eq=False)
class Plan:
    """A matrix, or a stack of them: what does not change from product to product.

    function: address of the part; words: the table of a product (see gemm_parts), as far as it is known
    """

    function: int
    words: np.ndarray
    way: Way
    rows: int
    columns: int


def plan(packed: np.ndarray, stored: TensorType, columns: int, matrices: int = 1) -> Plan | None:
    """What products need to know of a matrix, or of a stack of them; None if products of the type are not made by programs.

    packed: uint8 [rows of all matrices, row bytes]: it has to be kept as long as the plan is used.
    """
    rows, kind = len(packed) // matrices, kind_of(stored.name)
    if not packed.flags.c_contiguous or not stored.is_known:
        return None
    if stored.name in ("bf16", "bf16_r16"):
        if columns % STEP or not amx.permitted():
            return None
        part, way = gemm_parts.floats_part, (SPLIT, 0, 0)
        numbers = [int(stored.name == "bf16"), 0, 0, 0]
    elif kind is None or columns % BLOCK:
        return None
    else:
        numbers = [unpacker(stored.name).address, kind.zero, kind.group, int(kind.m is not None)]
        if amx.permitted():
            part, way = gemm_parts.expanded_part, (ROUNDED, 0, 0)
        else:
            part, way = gemm_parts.bytes_parts[kind.group], (BYTES, kind.zero, kind.group)
    known = [packed.ctypes.data, rows * packed.shape[1], packed.shape[1], rows, columns, *numbers]
    words = np.array(known + [0] * (FIELDS - len(known)), np.int64)
    return Plan(part.address, words, way, rows, columns)


def multiplies_decoded(stored: TensorType) -> bool:
    """Whether `multiply_decoded` takes a tensor stored so, for which there is no plan. What is neither is decoded to float32
    and multiplied as that."""
    if stored.is_float or stored.name == "bf16_r16" or not stored.is_known:
        return False
    return amx.permitted() or has_dots()


class Program:
    """Products and what goes with them, in stages: those of one stage run side by side, on `threads` threads."""

    def __init__(self, threads: int):
        self.threads = threads
        self._tasks: list[tuple[int, int, int, int]] = []
        self._kept: list[object] = []

    def task(self, stage: int, function: int, table: np.ndarray, parts: int, *kept: object) -> None:
        """Parts of a table, in any order with those of the same stage; kept: what has to stay in memory until then."""
        self._tasks.append((stage, function, table.ctypes.data, parts))
        self._kept += [table, kept]

    def inputs(
        self, stage: int, way: Way, x: np.ndarray, rows: int, places: np.ndarray | None = None, name: str = ""
    ) -> Inputs:
        """Activations x float32 [n, columns] as `way` wants them (see Inputs)."""
        made = Inputs(way, x, rows, places, name)
        self.task(stage, gemm_parts.prepare_part.address, made.table, made.parts, made)
        return made

    def of(self, stage: int, way: Way, tokens: Tokens) -> Inputs:
        """As inputs, of all tokens, kept with them."""
        if way not in tokens.made:
            unit = unit_of(way)
            tokens.made[way] = self.inputs(stage, way, tokens.x, -(-len(tokens) // unit) * unit)
        return tokens.made[way]

    def product(self, stage: int, plan: Plan, inputs: Inputs, out: np.ndarray, jobs: np.ndarray) -> None:
        """out float32 [any, rows of the plan]; jobs int64 [jobs, 4]: MATRIX, FIRST, COUNTED, TARGET. So many rows of the inputs
        from the first on (a multiple of their unit) times a matrix go to the rows from TARGET on of out."""
        words, tokens = plan.words.copy(), jobs[:, gemm_parts.COUNTED]
        most = max(1, _CHUNK // (plan.columns * ROWS)) * ROWS
        step = most
        if self.threads > 1:
            slices = max(1, int(_EACH * self.threads * tokens.max() // tokens.sum()))
            step = min(most, -(-plan.rows // (slices * ROWS)) * ROWS)
        slices = -(-plan.rows // step)
        words[gemm_parts.STEP_ROWS], words[gemm_parts.SLICES] = step, slices
        words[gemm_parts.OUT], words[gemm_parts.STRIDE] = out.ctypes.data, plan.rows
        words[gemm_parts.JOBS], words[gemm_parts.INPUT] = jobs.ctypes.data, inputs.table.ctypes.data
        self.task(stage, plan.function, words, len(jobs) * slices, out, jobs, inputs)

    def run(self, address: int) -> None:
        """address: of the team (see Workers.ready)."""
        team.run(address, np.array(sorted(self._tasks, key=lambda task: task[0]), np.int64))


def one_job(n: int, matrix: int = 0) -> np.ndarray:
    """All n rows times a matrix."""
    return np.array([[matrix, 0, n, 0]], np.int64)


def multiply(q: np.ndarray, stored: TensorType, tokens: Tokens, out: np.ndarray) -> None:
    """Writes tokens times the rows q, uint8 [rows, row_bytes] and whole groups, to out float32 [n, rows], on this thread."""
    made, program = plan(q, stored, tokens.x.shape[1]), Program(1)
    if made is None:
        assert multiplies_decoded(stored)
        multiply_decoded(q, stored, tokens, out, 0)
        return
    program.product(1, made, program.of(0, made.way, tokens), out, one_job(len(tokens)))
    program.run(0)


def rows_at_once(columns: int) -> int:
    """Rows that `multiply_decoded` had better be given at a time."""
    return max(1, _CHUNK // (columns * ROWS)) * ROWS


def multiply_decoded(q: np.ndarray, stored: TensorType, tokens: Tokens, out: np.ndarray, column: int) -> None:
    """As multiply, for types that have no plan, to the columns of out [n, all rows] from `column` on.

    If the number of rows is no multiple of ROWS, they have to be the last ones. Before threads share the tokens one has to ask
    for `tokens.rounded`.
    """
    sums, stretch = scratch("sums", _SUMS, np.float32), scratch("stretch", (ROWS * STRETCH,), np.uint16)
    panels = panels_of(np.ascontiguousarray(decode(q, stored.name, tokens.x.shape[1])))
    if amx.permitted():
        multiply_tiles(panels, tokens.rounded, sums, stretch, out, column)
    else:
        multiply_dots(panels, tokens.rounded, sums, out, column)
