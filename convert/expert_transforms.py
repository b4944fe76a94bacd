"""Transforms of experts: separate matrices stacked, stacks with some of their rows, stacks that are stored transposed.

What a transform is, `tensor_transforms` says.
"""

from __future__ import annotations

import numpy as np

from ..formats import SourceTensor
from .quantization.stored_weights import Rows, StoredWeight
from .tensor_transforms import Transform, joined_scale, reordered, transposed_matrices


def stack_experts(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """Matrices [rows, columns] of one shape, one per expert -> ne shape (columns, rows, experts)."""
    first = weights[0]
    rows = first.rows

    def select(start: int, stop: int) -> tuple[StoredWeight, slice]:
        expert, first_row = divmod(start, rows)
        return weights[expert], slice(first_row, first_row + stop - start)

    def read(start: int, stop: int) -> np.ndarray:
        weight, run = select(start, stop)
        return weight.read(run)

    def raw(start: int, stop: int) -> np.ndarray:
        weight, run = select(start, stop)
        return weight.raw(run)

    def read_bf16(start: int, stop: int) -> np.ndarray:
        weight, run = select(start, stop)
        return weight.read_bf16(run)

    types = {w.ggml_type for w in weights}
    ggml_type = first.ggml_type if len(types) == 1 else None
    source_type = "+".join(sorted({w.source_type for w in weights}))
    return SourceTensor(
        name,
        (first.columns, rows, len(weights)),
        source_type,
        read,
        raw if ggml_type else None,
        ggml_type,
        read_bf16=read_bf16 if all(w.has_read_bf16 for w in weights) else None,
        scale=joined_scale([w.scale for w in weights]),
    )


def expert_rows(first: int = 0, step: int = 1) -> Transform:
    """From a stack [experts, rows, columns] every step-th row of each matrix -> ne shape (columns, rows / step, experts)."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]
        experts = weight.shape[0]
        rows = weight.rows // experts
        n_selected = rows // step

        def order(start: int, stop: int) -> Rows:
            if step == 1:
                return slice(start, stop)
            expert, row = np.divmod(np.arange(start, stop), n_selected)
            return expert * rows + first + step * row

        return reordered(name, (weight.columns, n_selected, experts), weight, order)

    return transform


def expert_half(half: int) -> Transform:
    """From a stack [experts, rows, columns] the first (0) or second (1) half of each matrix's rows."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]
        experts = weight.shape[0]
        n_selected = weight.rows // experts // 2

        def order(start: int, stop: int) -> Rows:
            expert, row = divmod(start, n_selected)
            first_row = (2 * expert + half) * n_selected + row
            return slice(first_row, first_row + stop - start)

        return reordered(name, (weight.columns, n_selected, experts), weight, order)

    return transform


def transposed_expert_rows(first: int = 0, step: int = 1) -> Transform:
    """As `expert_rows`, from a stack whose matrices are stored transposed: [experts, columns, rows]."""
    return transposed_matrices(lambda rows: slice(first, rows, step))


def split_experts(experts: int) -> Transform:
    """From the matrices of all experts in one, [experts * rows, columns] -> ne shape (columns, rows, experts)."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]
        return reordered(name, (weight.columns, weight.rows // experts, experts), weight, slice)

    return transform


def split_transposed_experts(experts: int) -> Transform:
    """As `split_experts`, of matrices that are stored transposed: [experts * columns, rows]."""
    return transposed_matrices(lambda rows: slice(0, rows), experts)


def transposed_expert_half(half: int) -> Transform:
    """As `expert_half`, from a stack whose matrices are stored transposed."""
    return transposed_matrices(lambda rows: slice(half * rows // 2, (half + 1) * rows // 2))
