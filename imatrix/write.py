"""Importance matrices as bytes: GGUF (llama.cpp) and the legacy .dat (FORMATS part F)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from ..formats import TYPES
from ..formats.gguf_header import header_bytes

SUMS, COUNTS = ".in_sum2", ".counts"  # what the names of an entry's tensors end in


def gguf_bytes(
    entries: Mapping[str, tuple[np.ndarray, np.ndarray]], datasets: Sequence[str], chunk_count: int, chunk_size: int
) -> bytes:
    """A whole file. entries: name -> (sums float32 [n_mat, n], counts int64 [n_mat]); the rest as in `Imatrix`."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": np.uint32(chunk_count),
        "imatrix.chunk_size": np.uint32(chunk_size),
    }
    arrays: list[tuple[str, tuple[int, ...], np.ndarray]] = []
    for name, (sums, counts) in sorted(entries.items()):
        arrays.append((name + SUMS, (sums.shape[1], sums.shape[0]), sums.astype("<f4")))
        arrays.append((name + COUNTS, (1, len(counts)), counts.astype("<f4")))
    header, offsets, size = header_bytes(metadata, [(name, shape, TYPES["f32"]) for name, shape, _ in arrays], 32)
    out = bytearray(size)
    out[: len(header)] = header
    for offset, (_, _, array) in zip(offsets, arrays, strict=True):
        out[offset : offset + array.nbytes] = array.tobytes()
    return bytes(out)


def dat_bytes(means: Mapping[str, np.ndarray], datasets: Sequence[str], chunk_count: int) -> bytes:
    """A whole file. means: name -> mean squared activations float32 [n_mat, n], all matrices in one row of the file."""
    ncall = max(chunk_count, 1)
    out = bytearray(struct.pack("<i", len(means)))
    for name, mean in sorted(means.items()):
        encoded, values = name.encode(), (mean * np.float32(ncall)).astype("<f4")
        out += struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", ncall, values.size) + values.tobytes()
    dataset = ", ".join(datasets).encode()
    return bytes(out + struct.pack("<ii", chunk_count, len(dataset)) + dataset)
