"""Products with weight matrices as tasks: GEMV for generated tokens, else GEMM."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from .....data_classes import dataclass
from .....simd.memory import CACHE_LINE
from ....graph import Value
from ..kernels import row_kernels
from ..kernels.activations import RUN
from ..kernels.gemm import gemm, gemm_kernels
from ..kernels.gemv_plan import GemvPlan
from ..memory import Partition, View
from ..pass_memory import PassValue
from ..pass_program import PassProgram

# Bytes between codes, scales and sums: without them, with 4096 codes, all three begin at the same offset of a page, and
# products take a tenth longer (Zen 4).
_GAPS = 5 * CACHE_LINE, 3 * CACHE_LINE
EXPERT_ROWS = "tokens by expert"  # the axis of rows that are arranged by expert


@dataclass(frozen=True)
class Codes:
    """The input of a GEMV: addresses of 8-bit codes, scales and sums, or of float32 numbers; and the views of these."""

    words: tuple[int, int, int]
    views: tuple[View, ...]


@dataclass(frozen=True)
class PanelInput:
    """The input of a GEMM: the address of its table of inputs, and the view that contains the numbers."""

    table: int
    view: View


def gemv_inputs(out: PassProgram, x: View, block: int, partition: Partition, take: Callable[[View], View]) -> Codes:
    """x as the input of a GEMV. block: numbers that share a scale, 0: float32. take: makes memory live as long as x."""
    if not block:
        view = x
        if not x.is_dense:  # not `copied`: later products with the same x read this too
            view = take(out.allocate(x.rows, x.heads, x.width, x.axis))
            out.copy(x, view)
        return Codes((view.address, 0, 0), (view,))
    n = x.rows * x.size
    parts = (n, _GAPS[0]), (4 * (n // block), _GAPS[1]), (2 * (n // RUN), 0)
    sizes = [-(-size // CACHE_LINE) * CACHE_LINE + gap for size, gap in parts]
    memory = take(out.allocate(1, 1, sum(sizes) // 4))
    words = memory.address, memory.address + sizes[0], memory.address + sizes[0] + sizes[1]
    out.task(row_kernels.quantise, partition, x=x, codes=memory, scales=words[1], sums=words[2], block=block)
    return Codes(words, (memory,))


def gemv_task(
    out: PassProgram,
    plan: GemvPlan,
    codes: Codes,
    to: View,
    jobs: int,
    n_jobs: int,
    several: bool,
    reads: tuple[View, ...] = (),
    stride: int = 0,
) -> None:
    """Multiplies with the weights of a plan.

    jobs: address of int64 [n_jobs, 4] (see gemv.gemv); several: whether one of them may have more tokens than one; stride:
    numbers from one row of the result to the next, 0: as in `to`.
    """
    table = plan.table(codes.words, to.address, stride or to.row_bytes // 4, jobs, several)
    argument = out.schedule.numbers(table)
    out.schedule.place(plan.product.address, argument, n_jobs * plan.slices, (*codes.views, *reads), (to,))


def gemm_inputs(
    out: PassProgram, x: View, form: gemm.InputForm, take: Callable[[View], View], places: View | None = None, spare: int = 0
) -> PanelInput:
    """x [rows, columns], or its rows by number (places: int64, -1: zeros), in the form that a product reads. spare: rows of
    zeros after them, for which places has numbers too."""
    tokens, columns = form.block_tokens, x.size
    count = (x.rows if places is None else places.width) + spare
    rows = -(-count // tokens) * tokens
    sizes = form.nbytes(rows, columns)
    memory = take(out.allocate(1, 1, sum(sizes) // 4))
    starts = [memory.address + at for at in accumulate(sizes[:-1], initial=0)]
    at_places = 0 if places is None else places.address
    table = out.schedule.numbers([x.address, at_places, x.rows, columns, rows, *starts, *form.parameters])
    partition = Partition(x.axis if places is None else EXPERT_ROWS, count, tokens, columns, gemm_kernels.SPAN)
    reads = (x,) if places is None else (x, places)
    out.schedule.place(gemm_kernels.PREPARE_KERNELS[form.kind].address, table, partition, reads, (memory,))
    return PanelInput(table, memory)


def panels_of(out: PassProgram, x: Value, form: gemm.InputForm) -> PanelInput:
    """A value of the tokens as the input of a GEMM, made when it is first asked for."""
    stored = out.values[x.index]
    if form not in stored.inputs:
        stored.inputs[form] = gemm_inputs(out, out.dense(x), form, lambda memory: out.keep_with(x, memory))
    return stored.inputs[form]


def gemm_task(
    out: PassProgram, plan: gemm.GemmPlan, panels: PanelInput, to: View, jobs: gemm.Jobs, reads: tuple[View, ...] = ()
) -> None:
    """Multiplies with the weights of a plan, into `to`. reads: memory of the jobs, if tasks write them."""
    words, parts = gemm.product_words(plan, panels.table, to.address, to.row_bytes // 4, jobs, out.threads)
    out.schedule.keep(plan)
    out.schedule.place(plan.function, out.schedule.record(words.tobytes()), parts, (panels.view, *reads), (to,))


def input_partition(out: PassProgram, stored: PassValue) -> Partition:
    """The partition for quantising a value: that of the task which writes it, if it has one."""
    return stored.partition or out.by_cells(stored.view)


def scale_and_add_bias(
    out: PassProgram,
    x: View,
    partition: Partition,
    factors: np.ndarray | None,
    bias: np.ndarray | None,
    matrices: View | None = None,
) -> bool:
    """What follows a product x: it is multiplied with factors float32 [matrices], and bias float32 [matrices, columns] is
    added, where there are any; those of each row's matrix (None: the first). Returns whether there were."""
    if factors is not None:
        out.task(row_kernels.scale_rows, partition, x=x, factors=factors, matrices=matrices)
    if bias is not None:
        out.task(row_kernels.add_bias, partition, x=x, bias=bias, matrices=matrices)
    return factors is not None or bias is not None
