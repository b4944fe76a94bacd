"""Rows of weights as tensors of blocks, elements first: [elements, blocks], so that sums over a block run along memory.

The operations are those of `quantize/codecs` (`block_lanes.py`, `importance.py`, `float_range.py`), which say why. Sums run in
element order as there, and what is fused there is computed in float64 and rounded: nearly always the same float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_F16 = 65504.0
_MIN_MEAN_SQUARE, _MIN_IMPORTANCE = 1e-18, 1e-9
_ORDINARY_IMPORTANCE = 20  # binary exponents up to this magnitude need no scaling


def to_blocks(x: Tensor, size: int) -> Tensor:
    """[rows, n] -> [size, rows * n / size], contiguous."""
    return x.reshape(-1, size).T.contiguous()


def signed_max(x: Tensor) -> Tensor:
    """[n, blocks] -> [blocks]: the element of largest magnitude, the first on ties."""
    return x.gather(0, x.abs().argmax(0, keepdim=True))[0]


def wide(device: torch.device) -> torch.dtype:
    """The type of sums where the codecs take float64, which Apple's GPUs have not."""
    return torch.float32 if device.type == "mps" else torch.float64


def quotient(a: float | Tensor, b: float | Tensor) -> Tensor:
    """a / b, rounded once: torch itself multiplies by a reciprocal where one of the two is a Python number."""
    if isinstance(b, Tensor):
        return torch.full_like(b, a) / b if isinstance(a, float | int) else a / b
    assert isinstance(a, Tensor)
    return a / torch.full_like(a, b)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once (rarely twice), of float32."""
    return (a.to(wide(a.device)) * b + c).float()


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded, as torch's own of float32 is not on every device."""
    return x.to(wide(x.device)).sqrt().float()


def sum_in_order(terms: Tensor) -> Tensor:
    """[n, ...] -> [...], one addition after the other."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def sum_by_halves(lanes: Tensor) -> Tensor:
    """[2^k, ...] -> [...]: the upper half is added to the lower until one is left, as `simd.lanes.sum_halves` does."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def fused_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b over the first axis, in order, each addition fused with its product: float32."""
    total = torch.zeros(a.shape[1:], device=a.device)
    for product in a.to(wide(a.device)) * b:
        torch.add(product, total, out=total)
    return total


def nearest_half(x: Tensor) -> Tensor:
    """The nearest finite float16."""
    return x.clamp(-LARGEST_F16, LARGEST_F16).half()


def importance_rows(importance: Tensor | None, x: Tensor) -> Tensor | None:
    """Importance [n] or [rows, n] for all rows of x."""
    return None if importance is None else importance.expand_as(x)


def sigma2(superblocks: Tensor, factor: float) -> Tensor:
    """factor times the mean square of each superblock: [superblocks, n] -> [superblocks, 1]."""
    columns = superblocks.T.contiguous()
    return (factor * fused_sum(columns, columns) / len(columns))[:, None]


def superblock_weights(x: Tensor, importance: Tensor | None, factor: float, share: float) -> Tensor:
    """Weights of the squared errors of superblocks [superblocks, n], as `codecs.iqk.fit.row_weights`.

    factor: of the mean square in the weights; share: of that, without importance.
    """
    mean = sigma2(x, factor)
    return fma(x, x, share * mean) if importance is None else importance * square_root(fma(x, x, mean))


def guarded_importance(x: Tensor, importance: Tensor | None, block: int) -> Tensor | None:
    """As `codecs.importance.guard_importance`: blocks without usable importance get the same small one. [rows, n]."""
    if importance is None:
        return None
    qw, xs = importance.expand_as(x).reshape(-1, block), x.reshape(-1, block)
    limit = block * _MIN_MEAN_SQUARE
    negligible = (qw.square().sum(1) <= limit) | (xs.square().sum(1) <= limit) | ((qw * xs.abs()).sum(1) <= limit)
    return torch.where(negligible[:, None], _MIN_IMPORTANCE, qw).view(x.shape)


def normalised_importance(importance: Tensor | None) -> Tensor | None:
    """Importance times a power of two, as `codecs.float_range.normalise_importance`."""
    if importance is None:
        return None
    exponent = torch.frexp(importance.max())[1]
    return torch.where(exponent.abs() > _ORDINARY_IMPORTANCE, torch.ldexp(importance, -exponent), importance)


def normalised_rows(x: Tensor, exponents: tuple[int, int], min_amax: float) -> tuple[Tensor, Tensor]:
    """x [rows, n] = result * 2^shifts, as `codecs.float_range.normalise_rows`: (float32 [rows, n], int32 [rows])."""
    amax = x.abs().amax(1)
    shifts = torch.frexp(amax)[1]
    ordinary = (amax < min_amax) | ((shifts > exponents[0]) & (shifts <= exponents[1]))
    shifts = torch.where(ordinary, 0, shifts)
    return scaled(x, -shifts[:, None]), shifts


def scaled(x: Tensor, exponents: Tensor) -> Tensor:
    """x * 2^exponents, in two steps, so that the powers are float32 themselves."""
    half = torch.div(exponents, 2, rounding_mode="floor")
    ones = torch.ones_like(half, dtype=torch.float32)
    return x * torch.ldexp(ones, half) * torch.ldexp(ones, exponents - half)
