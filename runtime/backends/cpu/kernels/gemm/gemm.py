"""Matrix products of many tokens with weights of any type (GEMM), as programs for a team of threads.

Weights are taken from their packed bytes, a few hundred rows at a time, and every row is unpacked once for all tokens:

* f32 and f16 weights are multiplied as float32, and so are weights of any type that were decoded to rows of float32.
* On a processor with bf16 tiles (AMX) everything else is multiplied as bf16, which rounds activations far less than eight bits
  do. bf16 weights, which are exact then, get activations as sums of two bf16 numbers: their products are those of float32 up to
  about 2^-16 of the largest.
* Elsewhere types that have a `PanelLayout` are multiplied as bytes (byte_products.py), with activations of 8 bits and a scale
  per 32. bf16 weights, and those of other quantised types once decoded, are multiplied as bf16 where there are dot products of
  those (AVX512-BF16), as float32 where there are none.

Sums have an order that the number of columns fixes: an element of a result depends on its row of weights and its token alone,
not on threads, on other tokens, or on how they are divided into batches. Nothing here uses the BLAS of numpy.

What is to be done is entered in a `Program`, and no step of it takes one thread longer than the others. Weights that have no
`Plan`, because only Python can decode them, are multiplied a run of rows at a time (`multiply_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ......formats import TensorType
from ......simd import amx, team
from ......simd.memory import aligned_empty, scratch
from . import parts as gemm_parts
from .byte_products import BLOCK, TILE_TOKENS
from .float_panels import STEP, TOKENS, columns_part, panel_part
from .panel_layout import panel_layout
from .parts import BF16, BYTES, FIELDS, FLOAT32, INPUTS, SPAN
from .unpack_panels import PANEL, unpacker
from .vector_products import UNIT, has_bf16_dots

ROWS = 2 * PANEL  # rows are multiplied in multiples of it: where a matrix is divided among threads
_CHUNK = 1 << 19  # bytes of panels unpacked at a time (of the tile unit's twice as many): they stay in the second-level cache
_EACH = 8  # parts that a thread gets of a stage: what the last to end waits for is half of one, so a sixteenth
_KEPT = 64 << 20  # bytes of results in between that a thread keeps for the next time

# The form of activations: FLOAT32 or BF16, how many numbers are added up and the tokens of a block; or BYTES, zero and group.
Way = tuple[int, int, int]


class Tokens:
    """Activations float32 [n, columns], and what products need of them, made when first asked for and then shared by all
    matrices that multiply them."""

    def __init__(self, x: np.ndarray):
        self.x = np.ascontiguousarray(x, np.float32)
        self.made: dict[Way, Inputs] = {}

    def __len__(self) -> int:
        return len(self.x)


class Inputs:
    """Activations in the form that a way of multiplying wants: memory for `rows` rows, whole units, and the table that parts
    read (see gemm_parts).

    x: float32 [any, columns], C-contiguous. places: int64 [rows] or None, which rows of x they are (-1: zeros); None: the first
    ones, and zeros. name: of the memory, if this thread may keep it.
    """

    def __init__(self, way: Way, x: np.ndarray, rows: int, places: np.ndarray | None = None, name: str = ""):
        columns, (form, first, second) = x.shape[1], way
        ends = np.cumsum(input_bytes(way, rows, columns))
        memory = room(name, (int(ends[-1]),), np.uint8)
        starts = (memory.ctypes.data + np.concatenate([[0], ends[:-1]])).tolist()
        given = 0 if places is None else places.ctypes.data
        self.table = np.array([x.ctypes.data, given, len(x), columns, form, *starts, first, second], np.int64)
        assert len(self.table) == INPUTS
        self._kept = memory, x, places
        self.parts = rows // unit_of(way) * -(-columns // SPAN)


def input_bytes(way: Way, rows: int, columns: int) -> list[int]:
    """Bytes that activations take in a form: numbers or codes, and for BYTES scales, offsets and totals; whole cache lines."""
    form, first, second = way
    if form == BYTES:
        groups = columns // second
        sizes = (rows * columns, 4 * rows * columns // BLOCK, 4 * rows * groups, 4 * rows * groups)
    else:
        sizes = ((4 if form == FLOAT32 else 2 * first) * rows * -(-columns // STEP) * STEP, 0, 0, 0)
    return [-(-size // 64) * 64 for size in sizes]


def unit_of(way: Way) -> int:
    """Rows that inputs are made and multiplied in."""
    return TILE_TOKENS if way[0] == BYTES else way[2]


def room(name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Memory for results in between: of the name, kept by this thread, unless it has none or that is much."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return scratch(name, shape, dtype) if name and size <= _KEPT else aligned_empty(shape, dtype)


@dataclass(frozen=True, eq=False)
class Plan:
    """A matrix, or a stack of them: what does not change from product to product.

    function: address of the part; words: the table of a product (see gemm_parts), as far as it is known; size: bytes of a
    number in panels
    """

    function: int
    words: np.ndarray
    way: Way
    rows: int
    columns: int
    size: int = 1


_FLOATS = ("f32", "f16", "bf16", "bf16_r16")


def plan(packed: np.ndarray, stored: TensorType, columns: int, matrices: int = 1, exact: bool = False) -> Plan | None:
    """What products need to know of a matrix, or of a stack of them; None if the type has to be decoded (see multiply_rows).

    packed: uint8 [rows of all matrices, row bytes]: it has to be kept as long as the plan is used. exact: multiply as float32.
    """
    if not packed.flags.c_contiguous or not stored.is_known:
        return None
    if stored.name in _FLOATS:
        return _float_plan(packed, stored.name, columns, matrices, 0 if exact or not stored.name.startswith("bf16") else 2)
    layout = panel_layout(stored.name)
    if exact or layout is None or columns % BLOCK:
        return None
    numbers = [unpacker(stored.name).address, layout.zero, layout.group, int(layout.m is not None)]
    if amx.permitted():
        return _plan_of(packed, columns, matrices, gemm_parts.expanded_part.address, (BF16, 1, TOKENS), numbers)
    function, known = gemm_parts.bytes_parts[layout.group].address, (BYTES, layout.zero, layout.group)
    return _plan_of(packed, columns, matrices, function, known, numbers)


def _float_plan(packed: np.ndarray, name: str, columns: int, matrices: int, parts: int) -> Plan:
    """parts: numbers of bf16 that an activation is the sum of, where those can be multiplied; 0: always float32."""
    panels = name == "bf16_r16"  # multiplied as they lie
    if parts and (amx.permitted() or has_bf16_dots()) and not (panels and columns % STEP):
        fill = 0 if panels else panel_part(name, True).address
        part, unit = (gemm_parts.tiles_part, TOKENS) if amx.permitted() else (gemm_parts.dots_part, UNIT)
        return _plan_of(packed, columns, matrices, part.address, (BF16, parts, unit), [fill, parts, 0, 0])
    fill = panel_part(name, False).address
    return _plan_of(packed, columns, matrices, gemm_parts.floats_part.address, (FLOAT32, 1, UNIT), [fill, 0, 0, 0], 2)


def _plan_of(
    packed: np.ndarray, columns: int, matrices: int, function: int, way: Way, numbers: list[int], size: int = 1
) -> Plan:
    rows = len(packed) // matrices
    known = [packed.ctypes.data, rows * packed.shape[1], packed.shape[1], rows, columns, *numbers]
    return Plan(function, np.array(known + [0] * (FIELDS - len(known)), np.int64), way, rows, columns, size)


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

    def product(
        self,
        stage: int,
        plan: Plan,
        inputs: Inputs,
        out: np.ndarray,
        jobs: np.ndarray,
        column: int = 0,
        stride: int | None = None,
    ) -> None:
        """out float32 [any, rows of the plan], or wider: then its columns from `column` on are written (not for BYTES). stride:
        numbers from one row of out to the next, if that is not out.shape[1].

        jobs int64 [jobs, 4]: MATRIX, FIRST, COUNTED, TARGET. So many rows of the inputs from the first on (a multiple of their
        unit) times a matrix go to the rows from TARGET on of out.
        """
        words, parts = product_words(
            plan, inputs.table.ctypes.data, out.ctypes.data + 4 * column, stride or out.shape[1], jobs, self.threads
        )
        self.task(stage, plan.function, words, parts, out, jobs, inputs)

    def run(self, address: int) -> None:
        """address: of the team (see Workers.ready)."""
        team.run(address, np.array(sorted(self._tasks, key=lambda task: task[0]), np.int64))


def product_words(plan: Plan, inputs: int, out: int, stride: int, jobs: np.ndarray, threads: int) -> tuple[np.ndarray, int]:
    """The table of a product, and how many parts it has, enough for so many threads.

    inputs, out: addresses of the table of inputs, and of the result, whose rows are `stride` numbers apart; jobs: as for
    Program.product.
    """
    words, tokens = plan.words.copy(), jobs[:, gemm_parts.COUNTED]
    most = max(1, _CHUNK // (plan.columns * plan.size * ROWS)) * ROWS
    step = most
    if threads > 1:
        slices = max(1, int(_EACH * threads * tokens.max() // tokens.sum()))
        step = min(most, -(-plan.rows // (slices * ROWS)) * ROWS)
    slices = -(-plan.rows // step)
    words[gemm_parts.STEP_ROWS], words[gemm_parts.SLICES] = step, slices
    words[gemm_parts.OUT], words[gemm_parts.STRIDE] = out, stride
    words[gemm_parts.JOBS], words[gemm_parts.INPUT] = jobs.ctypes.data, inputs
    return words, len(jobs) * slices


def one_job(n: int, matrix: int = 0) -> np.ndarray:
    """All n rows times a matrix."""
    return np.array([[matrix, 0, n, 0]], np.int64)


def multiply(q: np.ndarray, stored: TensorType, tokens: Tokens, out: np.ndarray) -> None:
    """Writes tokens times the rows q, uint8 [rows, row_bytes] and whole groups, to out float32 [n, rows], on this thread."""
    made, program = plan(q, stored, tokens.x.shape[1]), Program(1)
    assert made is not None
    program.product(1, made, program.of(0, made.way, tokens), out, one_job(len(tokens)))
    program.run(0)


def rows_at_once(columns: int) -> int:
    """Rows that had better be decoded and given to `multiply_rows` at a time, on one thread."""
    return max(1, _CHUNK // (columns * ROWS)) * ROWS


def row_way(exact: bool) -> Way:
    """The form of activations that `multiply_rows` wants: before threads share tokens, one has to ask for it (Program.of)."""
    rows = np.empty((0, 4), np.uint8)
    return _float_plan(rows, "f32", 1, 1, 0 if exact else 1).way


def multiply_rows(
    rows: np.ndarray, exact: bool, tokens: Tokens, out: np.ndarray, column: int, address: int = 0, threads: int = 1
) -> None:
    """Writes tokens times decoded rows, float32 [rows, columns], to the columns of out [n, all rows] from `column` on.

    exact: as float32; else rows and activations may be rounded to bf16. address, threads: of the team that does it.
    """
    made, program = _float_plan(rows.view(np.uint8), "f32", rows.shape[1], 1, 0 if exact else 1), Program(threads)
    program.product(1, made, program.of(0, made.way, tokens), out, one_job(len(tokens)), column)
    program.run(address)


def matmul(
    x: np.ndarray, matrices: np.ndarray, out: np.ndarray | None = None, address: int = 0, threads: int = 1
) -> np.ndarray:
    """np.matmul(x, matrices, out=out) in float32, with the order of sums of all products here.

    x [matrices, n, inner], or [n, inner] for all alike; matrices [matrices, inner, outer]; out [matrices, n, outer]. Arrays are
    copied where their strides are out of the ordinary. address, threads: of the team that does it.
    """
    (count, columns, rows), n = matrices.shape, x.shape[-2]
    out = np.empty((count, n, rows), np.float32) if out is None else out
    if not out.size:
        return out
    stride = (out.strides[1] if n > 1 else out.strides[0] if count > 1 else 4 * rows) // 4
    if out.strides[2] != 4 or stride < rows or (count > 1 and out.strides[0] % (4 * stride)):
        out[...] = matmul(x, matrices, None, address, threads)
        return out
    if 4 not in matrices.strides[1:]:
        matrices = np.ascontiguousarray(matrices)
    fill = panel_part("f32", False).address if matrices.strides[1] == 4 else columns_part.address
    known = [matrices.ctypes.data, matrices.strides[0], matrices.strides[2], rows, columns, fill, 0, matrices.strides[1]]
    words = np.array(known + [0] * (FIELDS - len(known)), np.int64)
    made = Plan(gemm_parts.floats_part.address, words, (FLOAT32, 1, UNIT), rows, columns, 2)
    padded = -(-n // UNIT) * UNIT
    places = np.full((count if x.ndim == 3 else 1, padded), -1, np.int64)
    places[:, :n] = np.arange(len(places) * n).reshape(len(places), n)
    jobs = np.zeros((count, 4), np.int64)
    jobs[:, gemm_parts.MATRIX], jobs[:, gemm_parts.COUNTED] = np.arange(count), n
    jobs[:, gemm_parts.FIRST] = np.arange(count) * (padded if x.ndim == 3 else 0)
    jobs[:, gemm_parts.TARGET] = np.arange(count) * (out.strides[0] // (4 * stride))
    program = Program(threads)
    inputs = program.inputs(0, made.way, np.ascontiguousarray(x.reshape(-1, columns), np.float32), places.size, places)
    program.product(1, made, inputs, out, jobs, 0, stride)
    program.run(address)
    return out


def make_inputs(way: Way, tokens: Tokens, address: int = 0, threads: int = 1) -> None:
    """Brings tokens into a form, unless they have it."""
    program = Program(threads)
    program.of(0, way, tokens)
    program.run(address)
