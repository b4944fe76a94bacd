"""Matrix products of many tokens with weights of any type (GEMM), as programs for a team of threads.

Weights are taken from their packed bytes, a few hundred rows at a time, and every row is unpacked once for all tokens:

* f32 and f16 weights are multiplied as float32, and so are weights of any type that were decoded to rows of float32.
* On a processor with bf16 tiles (AMX) everything else is multiplied as bf16, which rounds activations far less than eight bits
  do. bf16 weights, which are exact then, get activations as sums of two bf16 numbers: their products are those of float32 up to
  about 2^-16 of the largest. With `fast` activations are rounded to one, and so are f16 weights, which changes none that was
  bf16 once.
* Elsewhere types that have a `panel_form` are multiplied as bytes (byte_products.py), with activations of 8 bits and a scale
  per 32; with `fast`, some of them with one scale per 256 of weights, and some of activations, too (round_panels.py). bf16
  weights, and those of other quantised types once decoded, are multiplied as bf16 where there are dot products of those
  (AVX512-BF16), as float32 where there are none.

Sums have an order that the number of columns fixes: an element of a result depends on its row of weights and its token alone,
not on threads, on other tokens, or on how they are divided into batches. Nothing here uses the BLAS of numpy.

What is to be done is entered in a `ProductList`, cut into parts so small that all threads end at nearly the same time. Weights
that have no `GemmPlan`, because only Python can decode them, are multiplied a run of rows at a time (`multiply_rows`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import lcm
from typing import NamedTuple

import numpy as np

from ......data_classes import dataclass
from ......formats import TYPES, TensorType
from ......simd import team
from ......simd.compile.background import Unit, compiling
from ......simd.instructions import amx
from ......simd.memory import aligned_empty
from . import gemm_kernels
from .byte_tiles import BLOCK, COLUMN_TILE, TILE_TOKENS, pair_sums
from .float_panels import AMX_TOKENS, COLUMNS_PARTS, STEP, panel_part
from .gemm_kernels import BF16, BYTE_ROWS, BYTES, FIELDS, FLOAT32, FLOAT_ROWS, INPUTS, SPAN
from .round_panels import ROUNDED, rounded_span, rounder
from .unpack_panels import PANEL, panel_form, unpacker
from .vector_products import BLOCK_TOKENS, has_bf16_dots

ROWS = 2 * PANEL  # rows are multiplied in multiples of it: where a matrix is divided among threads
_PANEL_BYTES = 1 << 19  # numbers of one byte, or half as many bf16, that are unpacked at a time: they stay in the L2 cache
_PARTS_PER_THREAD = 8  # of a stage: threads wait for the last one half a part on average, so a sixteenth of the stage


class InputForm(NamedTuple):
    """How a product takes activations.

    kind        FLOAT32, BF16 or BYTES
    parameters  of floats: how many numbers of bf16 are added up (1 or 2), and the tokens of a block; of BYTES: the number that
                stands for 0 in the weights, and the columns that share a scale of theirs, or fewer that share one of these
    """

    kind: int
    parameters: tuple[int, int]

    @property
    def block_tokens(self) -> int:
        """Activations are filled up to a multiple of so many rows."""
        return TILE_TOKENS if self.kind == BYTES else self.parameters[1]

    def nbytes(self, rows: int, columns: int) -> list[int]:
        """Bytes that activations take: numbers or codes, and for BYTES scales, offsets and totals; whole cache lines."""
        if self.kind == BYTES:
            columns = -(-columns // COLUMN_TILE) * COLUMN_TILE
            groups = columns // self.parameters[1]
            scales = columns // max(BLOCK, self.parameters[1])
            sizes = (rows * columns, 4 * rows * scales, 4 * rows * groups, 4 * rows * groups)
            return [-(-size // 64) * 64 for size in sizes]
        size = 4 if self.kind == FLOAT32 else 2 * self.parameters[0]
        return [-(-size * rows * -(-columns // STEP) * STEP // 64) * 64, 0, 0, 0]


class InputBlocks:
    """Activations in the form that a product takes, not yet filled in: memory for `rows` rows, whole blocks of tokens, and the
    table that parts read (see gemm_kernels).

    x: float32 [any, columns], C-contiguous. places: int64 [rows] or None, which rows of x they are (-1: zeros); None: the first
    ones, and zeros.
    """

    def __init__(self, form: InputForm, x: np.ndarray, rows: int, places: np.ndarray | None = None):
        columns, ends = x.shape[1], np.cumsum(form.nbytes(rows, x.shape[1]))
        memory = aligned_empty((int(ends[-1]),), np.uint8)
        starts = (memory.ctypes.data + np.concatenate([[0], ends[:-1]])).tolist()
        at_places = 0 if places is None else places.ctypes.data
        words = [x.ctypes.data, at_places, len(x), columns, rows, *starts, *form.parameters]
        self.table = np.array(words, np.int64)
        assert len(self.table) == INPUTS
        self._memory, self._inputs, self.form = memory, (x, places), form
        self.parts = rows // form.block_tokens * -(-columns // SPAN)

    def drop_inputs(self) -> None:
        """Once they are filled in: nothing reads x and places any longer."""
        self._inputs = ()


class Activations:
    """Activations float32 [n, columns], and the blocks that products take, made when first asked for and then shared by all
    matrices that multiply them."""

    def __init__(self, x: np.ndarray):
        self.x = np.ascontiguousarray(x, np.float32)
        self.blocks: dict[InputForm, InputBlocks] = {}

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class GemmPlan:
    """A matrix, or a stack of them: what does not change from product to product.

    function  address of the part that multiplies
    words     the table of a product (see gemm_kernels), as far as it is known
    form      of the activations
    most_rows of a slice: a multiple of ROWS
    """

    function: int
    words: np.ndarray
    form: InputForm
    rows: int
    columns: int
    most_rows: int


_FLOATS = ("f32", "f16", "bf16", "bf16_r16")
FLOAT32_FORM = InputForm(FLOAT32, (1, BLOCK_TOKENS))


def plan_gemm(
    packed: np.ndarray, stored: TensorType, columns: int, matrices: int = 1, exact: bool = False, fast: bool = False
) -> GemmPlan | None:
    """What products need to know of a matrix, or of a stack of them; None if the type has to be decoded (see multiply_rows).

    packed: uint8 [rows of all matrices, row bytes]: it has to be kept as long as the plan is used. exact: multiply as float32.
    fast: multiply bf16 weights with one bf16 number per activation instead of the sum of two, and f16 weights, rounded to
    bf16, too; and panels with one scale per 256, as `round_panels.rounded_span` says.
    """
    if not packed.flags.c_contiguous or not stored.is_known:
        return None
    with nullcontext() if exact else compiling(gemm_unit(stored.name, fast)):
        return _plan(packed, stored, columns, matrices, exact, fast)


def gemm_unit(type_name: str, fast: bool = False) -> Unit:
    """What is compiled for the products of a type."""
    return Unit(__name__, "fast_plan_of_type" if fast and type_name != "f32" else "plan_of_type", type_name)


def _compile_float32() -> None:
    """Compiles products with rows of float32, as decoded weights and latents have them, where it falls to this process."""
    with compiling(gemm_unit("f32")) as falls_here:
        if falls_here:
            plan_of_type("f32")


def plan_of_type(type_name: str, fast: bool = False) -> None:
    """Compiles the kernels of the products of a type, in no other way than `plan_gemm` does."""
    stored = TYPES[type_name]
    columns = lcm(ROUNDED.group, stored.block)
    plan_gemm(np.zeros((stored.rows, stored.row_bytes(columns)), np.uint8), stored, columns, fast=fast)


def fast_plan_of_type(type_name: str) -> None:
    """As `plan_of_type`, of products that round."""
    plan_of_type(type_name, True)


def _plan(packed: np.ndarray, stored: TensorType, columns: int, matrices: int, exact: bool, fast: bool) -> GemmPlan | None:
    if stored.name in _FLOATS:
        parts = 0 if exact or stored.name == "f32" else 1 if fast else 2 if stored.name != "f16" else 0
        return _float_plan(packed, stored.name, columns, matrices, parts)
    panels = panel_form(stored.name)
    if exact or panels is None or columns % BLOCK:
        return None
    numbers = [unpacker(stored.name).address, panels.zero, panels.group, int(panels.has_terms), stored.rows]
    if amx.permitted():
        return _plan_of(
            packed, columns, matrices, gemm_kernels.expanded_product.address, InputForm(BF16, (1, AMX_TOKENS)), numbers
        )
    span, group, zero = max(BLOCK, panels.group), panels.group, None
    if fast and not columns % ROUNDED.group and (rounded := rounded_span(stored, panels)):
        numbers += [panels.least, panels.most, rounder(panels.group, panels.has_terms).address]
        panels, zero, span, group = ROUNDED, ROUNDED.zero, rounded, rounded
    function = gemm_kernels.bytes_product(panels.group, span, pair_sums(panels.most), zero).address
    form = InputForm(BYTES, (panels.zero, group))
    return _plan_of(packed, columns, matrices, function, form, numbers, BYTE_ROWS)


def _float_plan(packed: np.ndarray, name: str, columns: int, matrices: int, parts: int) -> GemmPlan:
    """parts: numbers of bf16 that an activation is the sum of, where those can be multiplied; 0: always float32."""
    panels = name == "bf16_r16"  # multiplied as they lie
    column_bytes = PANEL * 2 if panels else TYPES[name].block_bytes
    if parts and (amx.permitted() or has_bf16_dots()) and not (panels and columns % STEP):
        fill = 0 if panels else panel_part(name, True).address
        words = [fill, parts, column_bytes, 0]
        if amx.permitted():
            return _plan_of(
                packed, columns, matrices, gemm_kernels.tiles_product.address, InputForm(BF16, (parts, AMX_TOKENS)), words
            )
        form = InputForm(BF16, (parts, BLOCK_TOKENS))
        return _plan_of(packed, columns, matrices, gemm_kernels.dots_product.address, form, words, FLOAT_ROWS)
    if name == "f32":
        _compile_float32()
    words = [panel_part(name, False).address, 0, column_bytes, 0]
    return _plan_of(packed, columns, matrices, gemm_kernels.floats_product.address, FLOAT32_FORM, words, FLOAT_ROWS)


def _plan_of(
    packed: np.ndarray, columns: int, matrices: int, function: int, form: InputForm, numbers: list[int], most_rows: int = 0
) -> GemmPlan:
    """most_rows: of a slice; 0: as many as `decoded_tile_rows`."""
    assert gemm_kernels.PREPARE_KERNELS[form.kind].address  # compiled with the product that needs it
    rows, most_rows = len(packed) // matrices, most_rows or decoded_tile_rows(columns)
    known = [packed.ctypes.data, rows * packed.shape[1], packed.shape[1], rows, columns, *numbers]
    return GemmPlan(function, np.array(known + [0] * (FIELDS - len(known)), np.int64), form, rows, columns, most_rows)


class ProductList:
    """Tasks for a team of `threads` threads, in stages: those of one stage run side by side."""

    def __init__(self, threads: int):
        self.threads = threads
        self._tasks: list[tuple[int, int, int, int]] = []
        self._arrays: list[object] = []

    def task(self, stage: int, function: int, table: np.ndarray, parts: int, *arrays: object) -> None:
        """Enters parts of a table, in any order with those of the same stage; arrays: what the table refers to by address."""
        self._tasks.append((stage, function, table.ctypes.data, parts))
        self._arrays += [table, arrays]

    def fill(self, stage: int, form: InputForm, x: np.ndarray, rows: int, places: np.ndarray | None = None) -> InputBlocks:
        """Enters the filling of blocks with activations x float32 [n, columns]; see InputBlocks."""
        if form.kind == FLOAT32:
            _compile_float32()
        blocks = InputBlocks(form, x, rows, places)
        self.task(stage, gemm_kernels.PREPARE_KERNELS[form.kind].address, blocks.table, blocks.parts, blocks)
        return blocks

    def blocks_of(self, stage: int, form: InputForm, activations: Activations) -> InputBlocks:
        """The blocks of all of the activations; enters their filling if there are none yet."""
        if form not in activations.blocks:
            rows = -(-len(activations) // form.block_tokens) * form.block_tokens
            activations.blocks[form] = self.fill(stage, form, activations.x, rows)
        return activations.blocks[form]

    def product(
        self,
        stage: int,
        plan: GemmPlan,
        inputs: InputBlocks,
        out: np.ndarray,
        jobs: np.ndarray,
        column: int = 0,
        stride: int | None = None,
    ) -> None:
        """Enters products. out float32 [any, rows of the plan], or wider: then its columns from `column` on are written (not
        for BYTES). stride: numbers from one row of out to the next, if that is not out.shape[1].

        jobs int64 [jobs, 4]: MATRIX, FIRST, N_ROWS, TARGET. N_ROWS rows of the inputs from FIRST on (a multiple of the tokens
        of a block) times a matrix go to the rows of out from TARGET on.
        """
        words, parts = product_words(
            plan, inputs.table.ctypes.data, out.ctypes.data + 4 * column, stride or out.shape[1], Jobs.of(jobs), self.threads
        )
        self.task(stage, plan.function, words, parts, out, jobs, inputs)

    def matmul(self, stage: int, inputs: InputBlocks, matrices: np.ndarray, out: np.ndarray, step: int = 0) -> None:
        """Enters products of inputs, float32 or bf16, with float32 matrices [matrices, inner, outer], of which one stride is 4
        bytes, rounded to bf16 for inputs of bf16.

        out [matrices, n, outer], in contiguous rows; step: rows of the inputs from one matrix's to the next's, 0: all alike.
        """
        (count, columns, rows), stride, is_bf16 = matrices.shape, _row_stride(out), inputs.form.kind == BF16
        part = panel_part("f32", is_bf16) if matrices.strides[1] == 4 else COLUMNS_PARTS[is_bf16]
        plan = _float_plan(np.empty((0, 4), np.uint8), "f32", columns, 1, inputs.form.parameters[0] if is_bf16 else 0)
        plan.words[: gemm_kernels.WEIGHT_COLUMNS] = matrices.ctypes.data, matrices.strides[0], matrices.strides[2], rows
        plan.words[gemm_kernels.UNPACKER], plan.words[gemm_kernels.GROUP] = part.address, matrices.strides[1]
        plan = replace(plan, rows=rows)
        jobs = _matrix_jobs(out, np.arange(count))
        jobs[:, gemm_kernels.FIRST] = np.arange(count) * step
        self._arrays.append(matrices)
        self.product(stage, plan, inputs, out, jobs, 0, stride)

    def matmul_packed(self, stage: int, inputs: InputBlocks, plan: GemmPlan, first: int, out: np.ndarray) -> None:
        """Enters products of inputs with the matrices of a plan from `first` on, as many as out has: [matrices, n, rows of the
        plan], in contiguous rows. Where these have others behind them in memory, they are a multiple of ROWS."""
        jobs = _matrix_jobs(out, np.arange(first, first + len(out)))
        self.product(stage, plan, inputs, out, jobs, 0, _row_stride(out))

    def run(self, address: int) -> None:
        """address: of the team (see Workers.ready)."""
        team.run(address, np.array(sorted(self._tasks, key=lambda task: task[0]), np.int64))


class Jobs(NamedTuple):
    """Products with matrices: the address of int64 [n_jobs, 4] as for ProductList.product; share: of the largest one in all."""

    address: int
    n_jobs: int
    share: float

    @classmethod
    def of(cls, jobs: np.ndarray) -> Jobs:
        """Those of an array, which has to be kept."""
        tokens = jobs[:, gemm_kernels.N_ROWS]
        return cls(jobs.ctypes.data, len(jobs), int(tokens.max()) / max(1, int(tokens.sum())))


def product_words(plan: GemmPlan, inputs: int, out: int, stride: int, jobs: Jobs, threads: int) -> tuple[np.ndarray, int]:
    """The table of a product, and how many parts it has, enough for so many threads.

    inputs, out: addresses of the table of inputs, and of the result, whose rows are `stride` numbers apart.
    """
    words = plan.words.copy()
    step = plan.most_rows
    if threads > 1:
        slices = max(1, int(_PARTS_PER_THREAD * threads * jobs.share))
        step = min(step, -(-plan.rows // (slices * ROWS)) * ROWS)
    slices = -(-plan.rows // step)
    words[gemm_kernels.STEP_ROWS], words[gemm_kernels.SLICES] = step, slices
    words[gemm_kernels.OUT], words[gemm_kernels.STRIDE] = out, stride
    words[gemm_kernels.JOBS], words[gemm_kernels.INPUT] = jobs.address, inputs
    return words, jobs.n_jobs * slices


def one_job(n: int, matrix: int = 0) -> np.ndarray:
    """All n rows times a matrix."""
    return np.array([[matrix, 0, n, 0]], np.int64)


def decoded_tile_rows(columns: int) -> int:
    """Rows to decode and give to `multiply_rows` at a time on one thread, so that they stay in its cache."""
    return max(1, _PANEL_BYTES // (columns * ROWS)) * ROWS


def decoded_form(exact: bool) -> InputForm:
    """The form of activations that `multiply_rows` takes: threads that share activations need blocks made before."""
    rows = np.empty((0, 4), np.uint8)
    return _float_plan(rows, "f32", 1, 1, 0 if exact else 1).form


def multiply_rows(
    rows: np.ndarray, exact: bool, activations: Activations, out: np.ndarray, column: int, address: int = 0, threads: int = 1
) -> None:
    """Writes activations times decoded rows, float32 [rows, columns], to the columns of out [n, all rows] from `column` on.

    exact: as float32; else rows and activations may be rounded to bf16. address, threads: of the team that does it.
    """
    made, program = _float_plan(rows.view(np.uint8), "f32", rows.shape[1], 1, 0 if exact else 1), ProductList(threads)
    program.product(1, made, program.blocks_of(0, made.form, activations), out, one_job(len(activations)), column)
    program.run(address)


def matmul(
    x: np.ndarray,
    matrices: np.ndarray,
    out: np.ndarray | None = None,
    address: int = 0,
    threads: int = 1,
    form: InputForm = FLOAT32_FORM,
) -> np.ndarray:
    """np.matmul(x, matrices, out=out) in float32, with the order of sums of all products here.

    x [matrices, n, inner], or [n, inner] for all alike; matrices [matrices, inner, outer]; out [matrices, n, outer]. Arrays are
    copied where their strides are out of the ordinary. address, threads: of the team that does it; form: how x is multiplied,
    of floats.
    """
    (count, columns, rows), n = matrices.shape, x.shape[-2]
    out = np.empty((count, n, rows), np.float32) if out is None else out
    if not out.size:
        return out
    if not _has_rows(out):
        out[...] = matmul(x, matrices, None, address, threads, form)
        return out
    if 4 not in matrices.strides[1:]:
        matrices = np.ascontiguousarray(matrices)
    padded = -(-n // form.block_tokens) * form.block_tokens
    places = np.full((count if x.ndim == 3 else 1, padded), -1, np.int64)
    places[:, :n] = np.arange(len(places) * n).reshape(len(places), n)
    program, flat = ProductList(threads), np.ascontiguousarray(x.reshape(-1, columns), np.float32)
    inputs = program.fill(0, form, flat, places.size, places)
    program.matmul(1, inputs, matrices, out, padded if x.ndim == 3 else 0)
    program.run(address)
    return out


def _matrix_jobs(out: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Jobs of the same inputs with these matrices, for out [matrices, n, rows]."""
    jobs = np.zeros((len(out), 4), np.int64)
    jobs[:, gemm_kernels.MATRIX], jobs[:, gemm_kernels.N_ROWS] = matrices, out.shape[1]
    jobs[:, gemm_kernels.TARGET] = np.arange(len(out)) * (out.strides[0] // (4 * _row_stride(out)))
    return jobs


def _row_stride(out: np.ndarray) -> int:
    """Numbers from one row to the next of float32 [matrices, n, rows]."""
    count, n, rows = out.shape
    return (out.strides[1] if n > 1 else out.strides[0] if count > 1 else 4 * rows) // 4


def _has_rows(out: np.ndarray) -> bool:
    """Whether a product can be written to float32 [matrices, n, rows]: contiguous rows that do not overlap, and all matrices'
    rows on one grid."""
    stride = _row_stride(out)
    return out.strides[2] == 4 and stride >= out.shape[2] and (len(out) == 1 or not out.strides[0] % (4 * stride))


def filled(x: np.ndarray, form: InputForm, address: int = 0, threads: int = 1) -> InputBlocks:
    """Blocks of x float32 [n, columns] for products with float32 matrices; they do not keep x."""
    program, x = ProductList(threads), np.ascontiguousarray(x, np.float32)
    blocks = program.fill(0, form, x, -(-len(x) // form.block_tokens) * form.block_tokens)
    program.run(address)
    blocks.drop_inputs()
    return blocks


def fill_blocks(form: InputForm, activations: Activations, address: int = 0, threads: int = 1) -> None:
    """Makes blocks of activations in a form, unless there are some."""
    program = ProductList(threads)
    program.blocks_of(0, form, activations)
    program.run(address)
