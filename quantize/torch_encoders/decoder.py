"""Packed rows of any tensor type to float32 by torch ops, on the device where they are: derived from `formats.layouts`.

The operations and their order are those of `formats.layouts.decode`, one rounding each, so that the results are equal bit for
bit on every device whose float32 arithmetic is that of IEEE.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...formats import TYPES
from ...formats.layouts import layout_of
from ...formats.layouts.byte_parts import BytePart, StraightLine, byte_parts, straight_line

_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@cache
def decoder_of(type_name: str, device: torch.device) -> Decoder:
    """The decoder of a type (any letter case) with its tables on a device. Raises KeyError for an unknown type."""
    return Decoder(type_name, device)


class _Numbers:
    """The numbers of one field of a layout, read from blocks."""

    def __init__(self, addresses: np.ndarray, device: torch.device, gray_words: bool = False):
        self.rows, self.count, self.width = addresses.shape
        bits = next(w for w in _INTEGERS if w >= self.width)
        self._dtype = _INTEGERS[bits]
        self._parts = [_Part(part, device) for part in byte_parts(addresses, gray_words)]

    def __call__(self, blocks: Tensor) -> Tensor:
        """uint8 [blocks, bytes] -> uint8, int16, int32 or int64 [blocks, rows, n], the narrowest that has the bits."""
        total = None
        for part in self._parts:
            bits = part(blocks)
            if part.up or self._dtype != torch.uint8:
                bits = bits.to(self._dtype) << part.up
            total = bits if total is None else total ^ bits
        assert total is not None
        return total.view(len(blocks), self.rows, self.count)

    def floats(self, blocks: Tensor, name: str) -> Tensor:
        """The same bits as numbers of a format ('f16', 'bf16', 'f32', 'f64') in float32."""
        return self(blocks).view(_FLOATS[name]).float()


class _Part:
    """A `BytePart` on a device; shifts and masks that all numbers share are Python numbers."""

    def __init__(self, part: BytePart, device: torch.device):
        byte, shift, mask = part.byte.reshape(-1), part.shift.reshape(-1), part.mask.reshape(-1)
        first = int(byte[0])
        self._slice = slice(first, first + len(byte)) if np.array_equal(byte, first + np.arange(len(byte))) else None
        self._byte = torch.from_numpy(byte).to(device)
        self._shift = self._shared(shift, device)
        self._mask = self._shared(mask, device)
        self.up = part.up

    @staticmethod
    def _shared(numbers: np.ndarray, device: torch.device) -> int | Tensor:
        return int(numbers[0]) if np.all(numbers == numbers[0]) else torch.from_numpy(numbers).to(device)

    def __call__(self, blocks: Tensor) -> Tensor:
        """uint8 [blocks, bytes] -> uint8 [blocks, numbers]."""
        bits = blocks[:, self._slice] if self._slice is not None else blocks.index_select(1, self._byte)
        if isinstance(self._shift, Tensor) or self._shift:
            bits = bits >> self._shift
        return bits if isinstance(self._mask, int) and self._mask == 255 else bits & self._mask


class Decoder:
    """Decodes groups of rows of one type. rows: interleaved rows of a group; block: weights of a block of one row."""

    def __init__(self, type_name: str, device: torch.device):
        kind, layout = TYPES[type_name], layout_of(type_name)
        self.kind, self.layout, self.rows, self.block, self.device = kind, layout, kind.rows, layout.block, device
        self._block_bytes = kind.rows * (kind.row_bytes(layout.block) - kind.row_meta)
        self._fields = {
            name: _Numbers(bits, device, gray_words=layout.gray_words and name == "codes")
            for name, bits in layout.bit_arrays().items()
            if name != "sums"
        }
        if layout.number is not None:
            return
        values = layout.decoded_values
        self._linear_values = straight_line(values)
        self._values = torch.from_numpy(values.astype(np.float32)).to(device)
        if layout.levels is not None:
            self._linear_levels = straight_line(layout.levels)
            self._levels = torch.from_numpy(layout.levels.astype(np.float32)).to(device)
        if layout.d_format == "e8m0":
            powers = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
            self._powers = torch.from_numpy(powers).to(device)
        if layout.digits is not None:
            self._digits = torch.from_numpy(layout.digits.astype(np.int16)).to(device)
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def __call__(self, groups: Tensor, n: int) -> Tensor:
        """uint8 [groups, bytes of a group of rows] of n weights each -> float32 [groups * rows, n]."""
        number = self.layout.number
        if number is not None and self.rows == 1:
            dtype = _FLOATS.get(number) or getattr(torch, f"int{number[1:]}")
            return groups.contiguous().view(dtype).float()
        meta = self.rows * self.kind.row_meta
        metas = groups[:, :meta].reshape(len(groups), self.rows, self.kind.row_meta)
        blocks = groups[:, meta:].reshape(-1, self._block_bytes)
        if number is not None:
            weights = self._fields["codes"].floats(blocks, number)
        else:
            weights = self._weights(metas, blocks)
        weights = weights.view(len(groups), n // self.block, self.rows, self.block)
        return weights.transpose(1, 2).reshape(len(groups) * self.rows, n)

    def _weights(self, metas: Tensor, blocks: Tensor) -> Tensor:
        """metas: uint8 [groups, rows, row_meta]; blocks: uint8 [blocks of all groups, bytes] -> [blocks, rows, block]."""
        layout, fields = self.layout, self._fields
        weights = self._values_of(blocks)
        if layout.flags is not None:
            flags = fields["flags"](blocks)
            plain, shifted = layout.shifts
            weights = _add(weights, flags.float() * (shifted - plain) + plain if plain else flags.float() * shifted)
        scale = self._block_scales(metas, blocks)
        if layout.scales is not None:
            codes = fields["scales"](blocks)
            scale = scale * _entries(codes, self._levels, self._linear_levels)[..., 0]
        weights = _multiply(weights, scale)
        if layout.signs is not None:
            weights = _negate(weights, fields["signs"](blocks) > 0)
        if layout.sign_codes is not None:
            weights = _negate(weights, self._eight_signs(fields["sign_codes"](blocks)))
        if layout.minima is not None:
            minima = fields["dmin"].floats(blocks, "f16") * fields["minima"](blocks).float()
            weights = _add(weights, -minima)
        if layout.offset is not None:
            weights = _add(weights, fields["offset"].floats(blocks, "f16"))
        return weights

    def _values_of(self, blocks: Tensor) -> Tensor:
        """What the codes stand for: float32 [blocks, rows, block]."""
        codes = self._fields["codes"](blocks)
        if self.layout.digits is not None:
            codes = ((codes.to(torch.int16) * self._digits & 255) * 3) >> 8
        return _entries(codes, self._values, self._linear_values).reshape(len(blocks), self.rows, self.block)

    def _block_scales(self, metas: Tensor, blocks: Tensor) -> Tensor:
        """float32 [blocks, rows, 1], times the layout's unit."""
        layout = self.layout
        if layout.row_scale is not None:
            dtype = _FLOATS[layout.row_scale]
            scale = metas[:, :, : dtype.itemsize].contiguous().view(dtype).float()
            scale = scale[:, None].expand(-1, len(blocks) // len(metas), -1, -1).reshape(len(blocks), self.rows, 1)
        elif layout.d is None:
            scale = torch.ones((len(blocks), self.rows, 1), device=self.device)
        elif layout.d_format == "e8m0":
            scale = self._powers[self._fields["d"](blocks).int()]
        else:
            scale = self._fields["d"].floats(blocks, layout.d_format)
        return scale * layout.unit

    def _eight_signs(self, codes: Tensor) -> Tensor:
        """Sign codes uint8 [blocks, rows, n] of seven bits -> bool [blocks, rows, 8 n]."""
        if self.layout.scrambled:
            eight = codes ^ codes << 1
        else:
            parity = codes ^ codes >> 4
            parity = parity ^ parity >> 2
            eight = codes | (parity ^ parity >> 1) << 7
        return (eight[..., None] >> self._bits & 1).bool().flatten(-2)


def _entries(codes: Tensor, table: Tensor, line: StraightLine) -> Tensor:
    """Entries [..., size] of a table [entries, size] or [entries], computed where these are equally spaced."""
    if line.step:
        codes = codes & 0xFFFF if codes.dtype == torch.int16 else codes
        values = (codes ^ line.flip if line.flip else codes).float()
        values = values * line.step if line.step != 1 else values
        return (values + line.first if line.first else values)[..., None]
    table = table.view(len(table), -1)
    flat = codes.reshape(-1).int()
    flat = flat & 0xFFFF if codes.dtype == torch.int16 else flat
    return table.index_select(0, flat).view(*codes.shape, table.shape[1])


def _runs(weights: Tensor, count: int) -> Tensor:
    """[blocks, rows, block] -> [blocks, rows, count, block / count]."""
    return weights.view(*weights.shape[:2], count, -1)


def _multiply(weights: Tensor, numbers: Tensor) -> Tensor:
    return (_runs(weights, numbers.shape[-1]) * numbers[..., None]).view(weights.shape)


def _add(weights: Tensor, numbers: Tensor) -> Tensor:
    return (_runs(weights, numbers.shape[-1]) + numbers[..., None]).view(weights.shape)


def _negate(weights: Tensor, negative: Tensor) -> Tensor:
    runs = _runs(weights, negative.shape[-1])
    return torch.where(negative[..., None], -runs, runs).view(weights.shape)
