"""Products with weight matrices as tasks: GEMV for few tokens, GEMM for many, and a Python function for what has neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..kernels import gemv_plan, row_parts
from ..kernels.activations import RUN
from ..kernels.gemm import gemm
from ..kernels.gemm import parts as gemm_parts
from ..memory import Partition, View
from ..passes import Held, Pass

_LINE = 64
# Bytes between codes, scales and sums: with 4096 codes all three would begin at the same place of a page, and reading them in
# turn takes a tenth longer (Zen 4).
_GAPS = 5 * _LINE, 3 * _LINE
EXPERT_ROWS = "tokens by expert"  # the axis of rows that are arranged by expert


@dataclass(frozen=True)
class Codes:
    """What a GEMV takes: addresses of 8-bit codes, scales and sums, or of float32; and what these views cover."""

    words: tuple[int, int, int]
    views: tuple[View, ...]


@dataclass(frozen=True)
class Panels:
    """What a GEMM takes: the address of its table of inputs, and where the numbers lie."""

    table: int
    view: View


def gemv_inputs(out: Pass, x: View, block: int, partition: Partition, take: Callable[[View], View]) -> Codes:
    """x as rows that a GEMV takes. block: numbers that share a scale, 0: float32. take: has memory live as long as x."""
    if not block:
        view = x if x.is_dense else out.copied(x)
        return Codes((view.address, 0, 0), (view,))
    n = x.rows * x.size
    sizes = [
        -(-size // _LINE) * _LINE + gap for size, gap in ((n, _GAPS[0]), (4 * (n // block), _GAPS[1]), (2 * (n // RUN), 0))
    ]
    memory = take(out.allocate(1, 1, sum(sizes) // 4))
    words = memory.address, memory.address + sizes[0], memory.address + sizes[0] + sizes[1]
    table = (*partition.words(), x.address, x.row_bytes, *words, block)
    out.schedule.task(row_parts.quantise.address, table, partition, (x,), (memory,))
    return Codes(words, (memory,))


def gemv_task(
    out: Pass, plan: np.ndarray, codes: Codes, to: View, jobs: int, n_jobs: int, reads: tuple[View, ...] = (), stride: int = 0
) -> None:
    """Multiplies with the weights of a plan (see kernels.gemv_plan).

    jobs: address of int64 [n_jobs, 4] (see gemv.gemv); stride: numbers from one row of the result to the next, if these are not
    those of `to`.
    """
    p = plan.tolist()
    sizes = p[gemv_plan.ROWS], p[gemv_plan.COLUMNS], p[gemv_plan.SLICES]
    weights = p[gemv_plan.WEIGHTS], p[gemv_plan.MATRIX_BYTES], p[gemv_plan.ROW_BYTES]
    table = (*weights, *sizes, *codes.words, to.address, stride or to.row_bytes // 4, jobs, p[gemv_plan.ABREAST])
    out.schedule.task(p[gemv_plan.FUNCTION], table, n_jobs * p[gemv_plan.SLICES], (*codes.views, *reads), (to,))


def gemm_inputs(out: Pass, x: View, form: gemm.InputForm, take: Callable[[View], View], places: View | None = None) -> Panels:
    """x [rows, columns], or its rows by `places` (int64, -1: zeros), in the form that a product takes."""
    tokens, columns = form.block_tokens, x.size
    count = x.rows if places is None else places.width
    rows = -(-count // tokens) * tokens
    sizes = form.nbytes(rows, columns)
    memory = take(out.allocate(1, 1, sum(sizes) // 4))
    starts = (memory.address + np.concatenate([[0], np.cumsum(sizes)[:-1]])).tolist()
    at_places = 0 if places is None else places.address
    table = out.schedule.table([x.address, at_places, x.rows, columns, form.kind, *starts, *form.parameters])
    partition = Partition(x.axis if places is None else EXPERT_ROWS, count, tokens, columns, gemm_parts.SPAN)
    reads = (x,) if places is None else (x, places)
    out.schedule.place(gemm_parts.prepare_part.address, table, partition, reads, (memory,))
    return Panels(table, memory)


def gemm_task(out: Pass, plan: gemm.Plan, panels: Panels, to: View, jobs: np.ndarray) -> None:
    """jobs: int64 [jobs, 4] (see gemm.parts); to: rows that are filled, stride of a dense or a wider row."""
    words, parts = gemm.product_words(plan, panels.table, to.address, to.row_bytes // 4, jobs, out.threads)
    out.schedule.keep(plan, jobs)
    out.schedule.task(plan.function, words, parts, (panels.view,), (to,))


def input_partition(out: Pass, held: Held) -> Partition:
    """Of the quantisation of a value: that of the task which wrote it, if it has one."""
    return held.partition or out.by_cells(held.view)
