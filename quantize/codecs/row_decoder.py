"""The decoder of every type with codes: LLVM code around the readers of `formats.layouts.reader`.

The operations and their order are those of `formats.layouts.decode`, one rounding each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once

from ...formats import TYPES
from ...formats.layouts.reader.blocks import BlockReader, CodeVector
from ...formats.layouts.reader.emitter import BYTES, CACHE_LINE, F32, I8, I32, I64, LANES, Emitter, constant, vector
from ...formats.layouts.reader.grids import GridReader
from ...formats.layouts.reader.rows import TrellisReader, readers, row_scales
from ...simd.compile import intrinsic, kernel, native_entry
from ...simd.instructions.permute import lookup_floats
from ...simd.llvm import store


class _GroupNumbers:
    """Numbers of all groups of what a reader reads, vectors in the order of its `scale_vectors`.

    They are kept in memory, out of which a processor spreads one over all lanes as it loads it; LLVM, if it could tell what is
    there, would take it out of a register by a permutation.
    """

    def __init__(self, emit: Emitter, reader: BlockReader, vectors: list[Any]):
        self.emit, self.reader, self.vectors = emit, reader, vectors
        place = alloca_once(emit.builder, ir.ArrayType(vectors[0].type, len(vectors)))
        self._address = emit.builder.ptrtoint(place, I64)
        for i, vector_ in enumerate(vectors):
            store(emit.builder, vector_, self._address, 4 * LANES * i)
        barrier = ir.FunctionType(ir.VoidType(), [I64])
        emit.builder.asm(barrier, "", "r,~{memory}", [self._address], side_effect=True)

    def lanes(self, keys: list) -> Any:
        """Per lane the number of (row, group); group -1: any number."""
        numbers = np.array([group * self.reader.rows + row if group >= 0 else -1 for row, group in keys])
        number = np.where(numbers < 0, max(numbers.max(), 0), numbers)
        if (number == number[0]).all():
            return self.emit.splat(self.emit.load(self._address, 4 * int(number[0]), F32))
        return self.emit.pick(self.vectors, number // LANES, number % LANES)


def _values(reader: BlockReader, emit: Emitter, base: Any, codes: CodeVector, loaded: dict) -> list[Any]:
    """Four vectors <16 x float>: what the scales of 64 codes are multiplied by."""
    layout, builder = reader.layout, emit.builder
    if layout.polynomial is not None and layout.decoded is not None:
        raw = reader.raw_codes(emit, base, codes, loaded)
        tables = [constant(F32, layout.decoded[i : i + LANES].tolist()) for i in range(0, len(layout.decoded), LANES)]
        values = []
        for i in range(4):
            index = builder.zext(emit.shuffle(raw, range(LANES * i, LANES * (i + 1))), vector(I32, LANES))
            if emit.target.has_fma:
                code, *lower = emit.to_float(index), *layout.polynomial[::-1]
                value = constant(F32, [lower.pop(0)] * LANES)
                for coefficient in lower:
                    value = emit.fma(code, value, constant(F32, [coefficient] * LANES))
            else:
                value = lookup_floats(builder, tables, index, emit.target)
            values.append(value)
    else:
        subtracted = 0 if layout.codes is not None and reader.table is not None else reader.lowest
        if isinstance(reader, TrellisReader) and layout.magnitudes:
            total = reader.unsigned_codes(emit, base, codes, loaded)
        else:
            total = reader.codes_less(subtracted, emit, base, codes, loaded)
            total = builder.add(total, constant(I8, [subtracted] * BYTES)) if subtracted else total
        parts = [emit.shuffle(total, range(LANES * i, LANES * (i + 1))) for i in range(4)]
        values = [emit.to_float(builder.sext(part, vector(I32, LANES))) for part in parts]
        if isinstance(reader, TrellisReader) and layout.magnitudes:  # zeros have a sign too
            negative = reader.negative(emit, base, codes, loaded)
            signs = [emit.shuffle(negative, range(LANES * i, LANES * (i + 1))) for i in range(4)]
            values = [builder.select(sign, builder.fneg(v), v) for sign, v in zip(signs, values, strict=True)]
    return values


def _write_blocks(emit: Emitter, name: str, number: int, blocks: Any, row_head: Any, out: Any, row_step: Any) -> None:
    """LLVM code that decodes what a reader (of those of the type the one of this number) reads. Addresses of the blocks, of the
    bytes before the group's first block, and of the float32 of the first row; row_step: bytes to those of the next row."""
    reader, stored, builder = readers(name)[number], TYPES[name], emit.builder
    layout, row_scale = reader.layout, row_scales(emit, reader.layout, stored, row_head)
    scales, terms, flags = [], [], []
    for numbers in reader.scale_vectors:
        scale = reader.scale(emit, blocks, numbers)
        if row_scale is not None:
            scale = builder.fmul(scale, emit.shuffle(row_scale, reader.rows_and_groups(numbers)[0]))
        scales.append(scale)
        terms.append(reader.term(emit, blocks, numbers))
        if layout.flags is not None:
            shift = constant(F32, [float(layout.shift)] * LANES)
            is_set = reader.flags_set(emit, blocks, numbers)
            flags.append(builder.select(is_set, shift, constant(F32, [0.0] * LANES)))
    factors = _GroupNumbers(emit, reader, scales)
    added, shifts = (_GroupNumbers(emit, reader, v) if v and v[0] is not None else None for v in (terms, flags))
    places = [builder.add(out, builder.mul(row_step, I64(row))) for row in range(reader.rows)]
    loaded: dict = {}
    in_rows = reader.rows == 1 or isinstance(reader, GridReader)
    for codes in reader.code_vectors if in_rows else reader.row_vectors():
        for i, value in enumerate(_values(reader, emit, blocks, codes, loaded)):
            lanes = [key for key in reader.keys(codes)[4 * i : 4 * (i + 1)] for _ in range(4)]
            value = value if shifts is None else builder.fadd(value, shifts.lanes(lanes))
            value = builder.fmul(value, factors.lanes(lanes))
            value = value if added is None else builder.fadd(value, added.lanes(lanes))
            at = slice(LANES * i, LANES * (i + 1))
            _store_runs(emit, value, codes.rows[at], codes.columns[at], places)


def _store_runs(emit: Emitter, value: Any, rows: np.ndarray, columns: np.ndarray, places: list[Any]) -> None:
    """Stores lanes at their rows and columns (-1: nowhere), four neighbours or more together."""
    first = 0
    while first < LANES:
        count = LANES - first
        while (np.diff(columns[first : first + count]) != 1).any() or (rows[first : first + count] != rows[first]).any():
            count //= 2
        if columns[first] >= 0:
            part = emit.shuffle(value, range(first, first + count))
            store(emit.builder, part, places[rows[first]], 4 * int(columns[first]))
        first += count


@intrinsic
def _decode_blocks(typingctx, name, number, blocks, row_head, out, row_step):
    if not isinstance(name, types.StringLiteral) or not isinstance(number, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, args):
        _write_blocks(Emitter(builder), name.literal_value, number.literal_value, *args[2:])
        return context.get_dummy_value()

    i = types.int64
    return types.void(name, number, i, i, i, i), generate


@cache
def _entry(name: str) -> Any:
    stored, (wide, narrow) = TYPES[name], (readers(name)[0], readers(name)[-1])
    rows, head, last = stored.rows, stored.rows * stored.row_meta, len(readers(name)) - 1
    wide_columns, wide_size, columns, size = wide.columns, wide.size, narrow.columns, narrow.size

    def decode_rows(source, row_bytes, groups, n, out):
        whole = n // wide_columns
        for group in range(groups):
            row_head, to = source + group * rows * row_bytes, out + 4 * group * rows * n
            at = row_head + head
            for b in range(whole):
                _decode_blocks(name, 0, at + b * wide_size, row_head, to + 4 * b * wide_columns, 4 * n)
            if last:
                at, to = at + whole * wide_size, to + 4 * whole * wide_columns
                for b in range((n - whole * wide_columns) // columns):
                    _decode_blocks(name, last, at + b * size, row_head, to + 4 * b * columns, 4 * n)

    return native_entry(types.void(*[types.int64] * 5), decode_rows)


@cache
def decoder_address(name: str) -> int:
    """The address of a type's compiled decoder, for kernels: of (source, row_bytes, groups, n, out), int64; source and out are
    addresses."""
    return _entry(TYPES[name].name).address


@intrinsic
def call_decoder(typingctx, address, source, row_bytes, groups, n, out):
    """Calls the decoder at an address, see `decoder_address`."""

    def generate(context, builder, signature, args):
        i = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [i] * 5)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@kernel
def _decode_rows(decoder, q, rows_per_group, n, buffer):
    """Decodes to the first cache line that begins in a buffer of float32, and returns its place."""
    address = buffer.ctypes.data
    start = -address % CACHE_LINE // 4
    call_decoder(decoder, q.ctypes.data, q.shape[1], q.shape[0] // rows_per_group, n, address + 4 * start)
    return start


def row_decoder(name: str) -> Callable[[np.ndarray, int], np.ndarray]:
    """`Codec.decode` of a type that has a `CodeLayout`, compiled or loaded at the first call. Rows are aligned to a cache line:
    vector stores that cross two lines are slow."""
    name, rows = TYPES[name].name, TYPES[name].rows

    def decode(q: np.ndarray, n: int) -> np.ndarray:
        buffer = np.empty(len(q) * n + CACHE_LINE // 4, np.float32)
        # Addresses are taken by a kernel: numpy's `ctypes` takes longer than to decode a short row.
        start = _decode_rows(decoder_address(name), q, rows, n, buffer)
        return buffer[start : start + len(q) * n].reshape(len(q), n)

    return decode
