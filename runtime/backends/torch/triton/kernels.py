"""Tiles of packed weights decoded in registers: stored, or multiplied with a vector.

FORMAT is a `BlockFormat`, known when a kernel is compiled, so that what a type lacks leaves no instruction. The operations and
their order are those of `formats.layouts.decode`. Source of the layouts: `formats.layouts`; none is written down here.
"""

# Arguments of kernels are pointers or constants to Triton, which Python's types cannot say.
# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def _place(index, PART: tl.constexpr):
    total = index * 0 + PART.first
    for i in tl.static_range(len(PART.digits)):
        total += (index >> PART.digits[i][0]) % PART.digits[i][1] * PART.digits[i][2]
    return total


@triton.jit
def _part(block, index, FIELD: tl.constexpr, N: tl.constexpr):
    part: tl.constexpr = FIELD.parts[N]
    at = _place(index, part)
    if part.aligned:
        bits = tl.load(block + at).to(tl.int32) >> part.shift
    else:
        bits = tl.load(block + (at >> 3)).to(tl.int32) >> (at & 7)
    return (bits & part.mask) << part.up


@triton.jit
def _number(block, index, FORMAT: tl.constexpr, NAME: tl.constexpr):
    """The numbers of a field at their indices: int32. block: pointers to the blocks, which broadcast with index."""
    field: tl.constexpr = getattr(FORMAT, NAME)
    total = index * 0
    for i in tl.static_range(len(field.parts)):
        total = total | _part(block, index, field, i)
    return total


@triton.jit
def _gray_code(block, index, FORMAT: tl.constexpr):
    """As _number, of the words x ^ (x >> 1) in place of x; numbers of one part, which lies in one word."""
    part: tl.constexpr = FORMAT.codes.parts[0]
    at = _place(index, part)
    if part.aligned:
        at = 8 * at + part.shift
    word = tl.load(block + (at >> 4) * 2).to(tl.int32) & 0xFE | tl.load(block + (at >> 4) * 2 + 1).to(tl.int32) << 8
    return ((word ^ (word >> 1)) >> (at & 15)) & part.mask


@triton.jit
def _as_float(bits, NAME: tl.constexpr):
    """int32 bits of a number of a format -> float32."""
    if NAME == "f16":
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif NAME == "f32":
        return bits.to(tl.float32, bitcast=True)
    else:  # half of 2^(E - 127), of which the two smallest are subnormal
        return tl.where(bits > 1, (bits - 1) << 23, (1 << 21) << bits).to(tl.float32, bitcast=True)


@triton.jit
def _entry(table, index, FORMAT: tl.constexpr, NAME: tl.constexpr):
    line: tl.constexpr = getattr(FORMAT, NAME)
    if line.step != 0:
        return ((index ^ line.flip) * line.step + line.first).to(tl.float32)
    else:
        return tl.load(table + index)


@triton.jit
def _index(row, run, weight, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    """Which number of a field each weight takes; one index per run where all weights of a run take the same."""
    if FORMAT.block // COUNT >= FORMAT.run:
        return row * COUNT + run // (FORMAT.block // COUNT)
    else:
        return row * COUNT + weight // (FORMAT.block // COUNT)


@triton.jit
def _eight_signs(codes, SCRAMBLED: tl.constexpr):
    if SCRAMBLED:
        return codes ^ (codes << 1)
    else:
        parity = codes ^ (codes >> 4)
        parity = parity ^ (parity >> 2)
        return codes | ((parity ^ (parity >> 1)) & 1) << 7


@triton.jit
def _tile(data, values, levels, rows, columns, stored_columns, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    """Weights of rows at columns ... columns + WIDTH - 1: float32 [rows, WIDTH / run, run].

    rows: int64 [rows, 1, 1], within the tensor; columns beyond stored_columns give those of the last block again.
    """
    run_of: tl.constexpr = FORMAT.run
    first = columns + run_of * tl.arange(0, WIDTH // run_of)[None, :, None]
    block_number = tl.minimum(first, stored_columns - run_of) // FORMAT.block
    run = first % FORMAT.block
    weight = run + tl.arange(0, run_of)[None, None, :]
    row = (rows % FORMAT.rows).to(tl.int32)
    group_bytes = FORMAT.meta_bytes + (stored_columns // FORMAT.block).to(tl.int64) * FORMAT.block_bytes
    group = data + rows // FORMAT.rows * group_bytes
    block = group + FORMAT.meta_bytes + block_number.to(tl.int64) * FORMAT.block_bytes
    code_index = row * FORMAT.codes.count + weight // FORMAT.size
    if FORMAT.gray_words:
        code = _gray_code(block, code_index, FORMAT)
    else:
        code = _number(block, code_index, FORMAT, "codes")
    value = _entry(values, code if FORMAT.size == 1 else code * FORMAT.size + weight % FORMAT.size, FORMAT, "values")
    if FORMAT.flags.count > 0:
        flag = _number(block, _index(row, run, weight, FORMAT.flags.count, FORMAT), FORMAT, "flags")
        value += (FORMAT.shifts[0] + flag * (FORMAT.shifts[1] - FORMAT.shifts[0])).to(tl.float32)
    d_format: tl.constexpr = FORMAT.d_format
    if d_format != "":
        if FORMAT.d_in_meta:
            scale = _as_float(_number(group, row, FORMAT, "d"), d_format)
        else:
            scale = _as_float(_number(block, row + run * 0, FORMAT, "d"), d_format)
        if FORMAT.unit != 1.0:
            scale = scale * FORMAT.unit
        if FORMAT.scales.count > 0:
            scale = scale * _level(levels, block, row, run, weight, FORMAT)
        value = value * scale
    elif FORMAT.scales.count > 0:
        value = value * _level(levels, block, row, run, weight, FORMAT)
    if FORMAT.signs.count > 0:
        sign = _number(block, _index(row, run, weight, FORMAT.signs.count, FORMAT), FORMAT, "signs")
        value = tl.where(sign != 0, -value, value)
    if FORMAT.sign_codes.count > 0:
        signs = _number(block, row * FORMAT.sign_codes.count + weight // 8, FORMAT, "sign_codes")
        value = tl.where((_eight_signs(signs, FORMAT.scrambled) >> weight % 8) & 1 != 0, -value, value)
    if FORMAT.minima.count > 0:
        minimum = _number(block, _index(row, run, weight, FORMAT.minima.count, FORMAT), FORMAT, "minima").to(tl.float32)
        value -= _as_float(_number(block, row + run * 0, FORMAT, "dmin"), "f16") * minimum
    if FORMAT.offset.count > 0:
        value += _as_float(_number(block, row + run * 0, FORMAT, "offset"), "f16")
    return value


@triton.jit
def _level(levels, block, row, run, weight, FORMAT: tl.constexpr):
    number = _number(block, _index(row, run, weight, FORMAT.scales.count, FORMAT), FORMAT, "scales")
    return _entry(levels, number, FORMAT, "levels")


@triton.jit
def decode_rows(
    data, values, levels, out, first_row, count, columns,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [count, columns]: rows first_row ... of the tensor, in out's type. Grid: (tiles of rows, tiles of columns)."""
    begin(DEPENDENT)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = first_row + tl.minimum(at, count - 1).to(tl.int64)
    start = tl.program_id(1) * WIDTH
    tile = _tile(data, values, levels, rows[:, None, None], start, columns, FORMAT, WIDTH)
    tile = tl.reshape(tile, (ROWS, WIDTH))
    column = start + tl.arange(0, WIDTH)[None, :]
    tl.store(out + at[:, None].to(tl.int64) * columns + column, tile, mask=(at[:, None] < count) & (column < columns))


@triton.jit
def matvec(
    data, values, levels, x, matrices, out, count, columns, x_per_matrix,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SAME: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out float32 [pairs, count]: matrix matrices[p], of `count` rows, times row p // x_per_matrix of x [any, columns].

    Grid: (tiles of rows, pairs). Sums are float32. SAME: of all pairs matrices[0].
    """
    begin(DEPENDENT)
    pair = tl.program_id(1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = (tl.load(matrices + (0 if SAME else pair)).to(tl.int64) * count + tl.minimum(at, count - 1))[:, None, None]
    run: tl.constexpr = FORMAT.run
    offsets = run * tl.arange(0, WIDTH // run)[None, :, None] + tl.arange(0, run)[None, None, :]
    vector = x + (pair // x_per_matrix).to(tl.int64) * columns
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, columns, WIDTH):
        factors = tl.load(vector + start + offsets, mask=start + offsets < columns, other=0.0).to(tl.float32)
        products = _tile(data, values, levels, rows, start, columns, FORMAT, WIDTH) * factors
        products = tl.where(start + offsets < columns, products, 0.0)
        total += tl.sum(tl.sum(products, axis=2), axis=1)
    tl.store(out + pair.to(tl.int64) * count + at, total, mask=at < count)
