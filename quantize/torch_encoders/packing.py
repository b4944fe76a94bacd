"""Numbers to the bytes of plain types on a device: the inverse of decoding, derived from `formats.layouts`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ...formats import TYPES
from ...formats.layouts import layout_of
from ...formats.layouts.byte_parts import byte_parts


class Packer:
    """Writes superblocks of one plain type. fields: the names of the layout's fields; `d` may instead belong to the row."""

    def __init__(self, type_name: str, device: torch.device):
        self._block_bytes = TYPES[type_name].block_bytes
        self._fields = {}
        for name, bits in layout_of(type_name).bit_arrays().items():
            parts = [(torch.from_numpy(p.byte[0]), p.shift[0], p.mask[0], p.up) for p in byte_parts(bits)]
            self._fields[name] = [
                (byte.to(device), torch.from_numpy(shift).to(device), torch.from_numpy(mask).to(device), up)
                for byte, shift, mask, up in parts
            ]

    def __call__(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """Unsigned whole numbers of any dtype, [blocks, n] for each field -> uint8 [blocks, block_bytes]."""
        assert numbers.keys() == self._fields.keys()
        count = len(next(iter(numbers.values())))
        device = next(iter(numbers.values())).device
        out = torch.zeros((count, self._block_bytes), dtype=torch.int32, device=device)
        for name, values in numbers.items():
            values = values.to(torch.int32)
            for byte, shift, mask, up in self._fields[name]:
                out.index_add_(1, byte, ((values >> up) & mask) << shift)  # no two numbers share a bit
        return out.to(torch.uint8)


@cache
def packer_of(type_name: str, device: torch.device) -> Packer:
    """The packer of a plain type with its tables on a device."""
    return Packer(type_name, device)


def half_bits(d: Tensor) -> Tensor:
    """float16 [blocks] -> its bits, int32 [blocks, 1]."""
    return (d.view(torch.int16).int() & 0xFFFF)[:, None]


def number_bytes(d: Tensor) -> Tensor:
    """float16 or float32 [rows] -> uint8 [rows, 2 or 4], little-endian."""
    return d.contiguous().view(torch.uint8).view(len(d), -1)
