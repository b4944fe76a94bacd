"""Operations on rows in one kernel each, where torch's take several: norms, rotations, gated activations, rows of caches.
They also make what products need of their results, bytes (`vector_bytes.py`) or bfloat16."""

# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bytes4 import store_bytes
from .dependent import begin, launched
from .vector_bytes import GROUP, VectorBytes, empty_bytes

_WIDEST = 1 << 14  # row of a norm
_TILE = 1024  # numbers of a gated activation, or of a rotation


@triton.jit
def _norm(
    x, added, total, weight, out, words, row_words, part_words, width, epsilon, scale,
    GROUPS: tl.constexpr, ADDS: tl.constexpr, WEIGHT: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: rows. ADDS: of x + scale * added, which becomes `total`."""
    row, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < width
    if WEIGHT:  # no kernel writes these
        factors = tl.load(weight + column, mask=inside, other=0.0)
    begin(DEPENDENT)
    numbers = tl.load(x + row * width + column, mask=inside, other=0.0)
    if ADDS:
        numbers += tl.load(added + row * width + column, mask=inside, other=0.0) * scale
        tl.store(total + row * width + column, numbers, mask=inside)
    squares = tl.sum(tl.sum(numbers * numbers, axis=1), axis=0)
    numbers = numbers * (1.0 / tl.sqrt(squares / width + epsilon))
    if WEIGHT:
        numbers = numbers * factors
    tl.store(out + row * width + column, numbers, mask=inside)
    if FORM == "bytes":
        store_bytes(numbers, group, group * 32 < width, words + row * row_words, part_words, GROUPS)
    elif FORM == "bf16":
        tl.store(words + row * width + column, numbers.to(tl.bfloat16), mask=inside)


@triton.jit
def _gated(
    gate, up, out, words, row_words, part_words, width,
    GROUPS: tl.constexpr, GELU: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, tiles)."""
    begin(DEPENDENT)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < width
    a = tl.load(gate + row * width + column, mask=inside, other=0.0)
    b = tl.load(up + row * width + column, mask=inside, other=0.0)
    if GELU:
        exponent = 1.5957691216057308 * (a + 0.044715 * a * a * a)
    else:
        exponent = a
    numbers = a / (1 + tl.exp(-exponent)) * b
    tl.store(out + row * width + column, numbers, mask=inside)
    if FORM == "bytes":
        store_bytes(numbers, group, group * 32 < width, words + row * row_words, part_words, GROUPS)
    elif FORM == "bf16":
        tl.store(words + row * width + column, numbers.to(tl.bfloat16), mask=inside)


@triton.jit
def _as_bytes(x, words, row_words, part_words, width, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid: (rows, tiles)."""
    begin(DEPENDENT)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    numbers = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    store_bytes(numbers, group, group * 32 < width, words + row * row_words, part_words, GROUPS)


@triton.jit
def turned(rows, column, token, cos, sin, first, pairs, inside, INTERLEAVED: tl.constexpr):
    """Numbers at columns of rows with the angles of their tokens, all of shapes that broadcast. pairs: of numbers that are
    rotated, from `first` on."""
    place = column - first
    is_turned = inside & (place >= 0) & (place < 2 * pairs)
    if INTERLEAVED:
        pair, is_first = place // 2, place % 2 == 0
        other = column + tl.where(is_first, 1, -1)
    else:
        pair, is_first = place % pairs, place < pairs
        other = column + tl.where(is_first, pairs, -pairs)
    a = tl.load(rows + column, mask=inside, other=0.0)
    b = tl.load(rows + other, mask=is_turned, other=0.0)
    c = tl.load(cos + token * pairs + pair, mask=is_turned, other=1.0)
    s = tl.load(sin + token * pairs + pair, mask=is_turned, other=0.0)
    return a * c + tl.where(is_first, -b, b) * s


@triton.jit
def _rotate(
    x, cos, sin, out, count, heads, pairs, first,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, which are heads of tokens."""
    begin(DEPENDENT)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < WIDTH)
    numbers = turned(x + row * WIDTH, column, row // heads, cos, sin, first, pairs, inside, INTERLEAVED)
    tl.store(out + row * WIDTH + column, numbers, mask=inside)


@triton.jit
def _write(
    rows, stored, rows1, stored1, positions, heads, room, room1,
    WIDTH: tl.constexpr, WIDTH1: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, heads, 1 or 2): into one memory, or into two."""
    begin(DEPENDENT)
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    at, place = (token * heads + head).to(tl.int64), tl.load(positions + token)
    if tl.program_id(2) == 0:
        row = tl.load(rows + at * WIDTH + column, mask=column < WIDTH, other=0.0)
        place = (head.to(tl.int64) * room + place) * WIDTH
        tl.store(stored + place + column, row.to(stored.dtype.element_ty), mask=column < WIDTH)
    else:
        row = tl.load(rows1 + at * WIDTH1 + column, mask=column < WIDTH1, other=0.0)
        place = (head.to(tl.int64) * room1 + place) * WIDTH1
        tl.store(stored1 + place + column, row.to(stored1.dtype.element_ty), mask=column < WIDTH1)


def can_norm(x: Tensor) -> bool:
    return x.shape[-1] <= _WIDEST


def norm(
    x: Tensor, weight: Tensor | None, epsilon: float, wanted: str, added: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor, VectorBytes | Tensor | None]:
    """RMS norm of the rows of the last axis of the sum of x and scale * added: the sum, its norm, and what products want of
    this. weight: of this axis."""
    x = x.contiguous()
    width, out, total = x.shape[-1], torch.empty_like(x), x if added is None else torch.empty_like(x)
    made, words, sizes = _prepared(x, wanted)
    groups = triton.next_power_of_2(-(-width // GROUP))
    _norm[x.numel() // width,](
        x, x if added is None else added.contiguous(), total, out if weight is None else weight, out, words, *sizes, width,
        epsilon, scale, groups, added is not None, weight is not None, wanted if made is not None else "",
        num_warps=8 if width > 2048 else 4 if width > 512 else 1, **launched(x.device),
    )  # fmt: skip
    return total, out, made


def gated(gate: Tensor, up: Tensor, is_gelu: bool, wanted: str) -> tuple[Tensor, VectorBytes | Tensor | None]:
    """silu(gate) * up, or gelu's approximation by tanh in place of silu."""
    gate, up = gate.contiguous(), up.contiguous()
    width, out = gate.shape[-1], torch.empty_like(gate)
    made, words, sizes = _prepared(gate, wanted)
    grid = gate.numel() // width, -(-width // _TILE)
    _gated[grid](
        gate, up, out, words, *sizes, width, _TILE // GROUP, is_gelu, wanted if made is not None else "", num_warps=4,
        **launched(gate.device),
    )  # fmt: skip
    return out, made


def as_bytes(x: Tensor) -> VectorBytes:
    """float [n, columns]; columns are a multiple of 32."""
    made = empty_bytes(*x.shape, x.device)
    grid = len(x), -(-x.shape[1] // _TILE)
    _as_bytes[grid](
        x.contiguous(), made.words, made.words.shape[1], made.part_words, x.shape[1], _TILE // GROUP, num_warps=4,
        **launched(x.device),
    )  # fmt: skip
    return made


def rotated(x: Tensor, cos: Tensor, sin: Tensor, first: int, is_interleaved: bool) -> Tensor:
    """x [n, ..., width] with pairs of numbers from `first` on rotated; cos, sin: [n, pairs]."""
    x = x.contiguous()
    width, out, count = x.shape[-1], torch.empty_like(x), x.numel() // x.shape[-1]
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    _rotate[-(-count // rows),](
        x, cos, sin, out, count, count // len(x), cos.shape[1], first, width, block, rows, is_interleaved, num_warps=4,
        **launched(x.device),
    )  # fmt: skip
    return out


def write(stored: Sequence[Tensor], rows: Sequence[Tensor], positions: Tensor) -> None:
    """One or two kinds of rows [n, heads, width], each into its memory [heads, room, width], at positions [n]."""
    n, heads, width = rows[0].shape
    block = triton.next_power_of_2(max(row.shape[2] for row in rows))
    _write[n, heads, len(rows)](
        rows[0].contiguous(), stored[0], rows[-1].contiguous(), stored[-1], positions, heads, stored[0].shape[1],
        stored[-1].shape[1], width, rows[-1].shape[2], block, num_warps=1, **launched(positions.device),
    )  # fmt: skip


def _prepared(x: Tensor, wanted: str) -> tuple[VectorBytes | Tensor | None, Tensor, tuple[int, int]]:
    """Memory for the bytes or the bfloat16 of x [n, width], if they are wanted and can be made."""
    if not wanted or x.ndim != 2 or x.shape[1] % GROUP:
        return None, x, (0, 0)
    if wanted == "bf16":
        rounded = torch.empty_like(x, dtype=torch.bfloat16)
        return rounded, rounded, (0, 0)
    made = empty_bytes(*x.shape, x.device)
    return made, made.words, (made.words.shape[1], made.part_words)
