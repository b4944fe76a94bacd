"""Sixteen blocks at a time from arrays of lanes (see block_lanes.py) to their bytes, by the layout of their type."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from ...formats import TYPES
from ...formats.layouts import layout_of
from ...formats.layouts.byte_parts import byte_parts
from ...simd.byte_lanes import load_bytes, store_bytes, transpose_bytes
from ...simd.compile import kernel
from ...simd.cuda.work_items import WorkItems
from ...simd.lanes import LANES
from .codec import Codec, ItemEncoder
from .importance import importance_rows
from .row_decoder import row_decoder

# The kernels of `lane_codec`: an item is a block.
BLOCK_ITEMS = WorkItems(
    ("x",), ("out",), shared_rows=("importance",), row_numbers=("mean_squares",), scratch=("lane_bytes",), lanes=1
)


@cache
def lane_parts(type_name: str, name: str) -> np.ndarray:
    """int64 [parts, 5]: for each byte that has bits of a number of a field: the number, the byte, and its shift, mask and place
    as in a `BytePart`."""
    parts = byte_parts(getattr(layout_of(type_name), name))
    columns = [(np.arange(p.byte.shape[1]), p.byte[0], p.shift[0], p.mask[0], np.full(p.byte.shape[1], p.up)) for p in parts]
    return np.concatenate([np.stack(column, axis=1).astype(np.int64) for column in columns])


@kernel
def put_lanes(numbers, first, parts, lane_bytes):
    """Enters a field's numbers, uint8 lanes from number `first` on, into the bytes of sixteen blocks, as lanes, 0 before."""
    for i in range(parts.shape[0]):
        at = LANES * parts[i, 1]
        bits = (load_bytes(numbers, LANES * (first + parts[i, 0])) >> parts[i, 4] & parts[i, 3]) << parts[i, 2]
        store_bytes(lane_bytes, at, load_bytes(lane_bytes, at) | bits)


@kernel
def put_words(words, first, parts, lane_bytes):
    """As put_lanes, of uint16 lanes: the bits of float16 numbers."""
    for i in range(parts.shape[0]):
        for lane in range(LANES):
            bits = (words[LANES * (first + parts[i, 0]) + lane] >> parts[i, 4] & parts[i, 3]) << parts[i, 2]
            lane_bytes[LANES * parts[i, 1] + lane] |= bits


@kernel
def take_blocks(lane_bytes, first, out):
    """Writes the blocks to out, uint8 [blocks, bytes], from block `first` on, as far as there are any, and clears the lanes."""
    count, size = min(LANES, out.shape[0] - first), out.shape[1]
    if LANES > 1 and count == LANES and size >= LANES:
        flat, last = out.reshape(-1), size - LANES
        for k in range(0, last, LANES):
            transpose_bytes(lane_bytes, LANES * k, flat, first * size + k, size)
        transpose_bytes(lane_bytes, LANES * last, flat, first * size + last, size)
    else:
        for lane in range(count):
            for k in range(size):
                out[first + lane, k] = lane_bytes[LANES * k + lane]
    lane_bytes[:] = 0


def lane_memory(type_name: str, *fields: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The `lane_parts` of fields, and lanes for the bytes of sixteen blocks, all 0."""
    return tuple(lane_parts(type_name, field) for field in fields), np.zeros(LANES * TYPES[type_name].block_bytes, np.uint8)


def lane_codec(type_name: str, encode_kernel: Callable[..., None], fields: tuple[str, ...], *options: object) -> Codec:
    """The codec of a type whose kernel is called as encode_kernel(x, importance, *options, parts, lane_bytes, out): parts and
    lane_bytes are the `lane_memory` of the fields, out is uint8 [blocks, bytes]."""
    stored = TYPES[type_name]

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        out = np.empty((len(x), stored.row_bytes(x.shape[1])), np.uint8)
        blocks = out.reshape(-1, stored.block_bytes)
        encode_kernel(x, importance_rows(importance), *options, *lane_memory(type_name, *fields), blocks)
        return out

    return Codec(encode, row_decoder(type_name), items=ItemEncoder(encode))
