"""Reading and writing importance matrices: GGUF (llama.cpp) and the legacy .dat (FORMATS part F)."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from ..formats import TYPES, FormatError, open_gguf
from ..formats.gguf_header import header_bytes
from .entries import LEGACY_CHUNK, Entry, Imatrix

_SUMS = (".in_sum2", ".sums")  # the second is an older spelling
_COUNTS = ".counts"
_RESHAPED = " (reshaped)"  # ik_llama.cpp writes attn_k_b under the name of its view as a stack


def load(path: str | Path) -> Imatrix:
    """Reads either format, told apart by content. Raises FormatError for a file that is neither, truncated or of no use."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            imatrix = _read_gguf(path) if magic == b"GGUF" else _read_dat(path, magic + file.read())
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if not imatrix.entries:
        raise FormatError(f"{path}: an imatrix without entries")
    problem = imatrix.problem()
    if problem is not None:
        raise FormatError(f"{path}: {problem}")
    return imatrix


def save(imatrix: Imatrix, path: Path) -> None:
    data = _dat_bytes(imatrix) if path.suffix == ".dat" else _gguf_bytes(imatrix)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _read_gguf(path: Path) -> Imatrix:
    file = open_gguf(path)
    if file.metadata.get("general.type") != "imatrix":
        raise FormatError(
            f"{path}: a GGUF file, but not an imatrix (its general.type is {file.metadata.get('general.type')!r})"
        )
    entries: dict[str, Entry] = {}
    for key, tensor in file.tensors.items():
        suffix = next((s for s in _SUMS if key.endswith(s)), None)
        if suffix is None:
            continue
        name = key.removesuffix(suffix)
        counts = file.tensors.get(name + _COUNTS)
        if counts is None or tensor.type.name != "f32" or counts.type.name != "f32":
            raise FormatError(f"{path}: entry {name} lacks its counts, or is not of f32")
        sums = tensor.read(0, tensor.n_rows).view(np.float32)
        seen = counts.read(0, counts.n_rows).view(np.float32).reshape(-1)
        if len(seen) != len(sums):
            raise FormatError(f"{path}: entry {name} has {len(sums)} matrices and {len(seen)} counts")
        if not np.isfinite(seen).all():
            raise FormatError(f"{path}: entry {name} holds counts that are NaN or infinite; compute it again")
        entries[name] = (sums, np.rint(seen).astype(np.int64))
    try:
        datasets = [str(d) for d in file.metadata.get("imatrix.datasets", [])]
        chunks, size = (
            int(file.metadata.get(f"imatrix.chunk_{key}", other)) for key, other in (("count", 0), ("size", LEGACY_CHUNK))
        )
    except (TypeError, ValueError):
        raise FormatError(f"{path}: its imatrix.* keys are not of the types that an imatrix has") from None
    return Imatrix(entries, datasets, chunks, size)


def _gguf_bytes(imatrix: Imatrix) -> bytes:
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": imatrix.datasets,
        "imatrix.chunk_count": np.uint32(imatrix.chunk_count),
        "imatrix.chunk_size": np.uint32(imatrix.chunk_size),
    }
    arrays: list[tuple[str, tuple[int, ...], np.ndarray]] = []
    for name, (sums, counts) in sorted(imatrix.entries.items()):
        arrays.append((name + _SUMS[0], (sums.shape[1], sums.shape[0]), sums.astype("<f4")))
        arrays.append((name + _COUNTS, (1, len(counts)), counts.astype("<f4")))
    header, offsets, size = header_bytes(metadata, [(name, shape, TYPES["f32"]) for name, shape, _ in arrays], 32)
    out = bytearray(size)
    out[: len(header)] = header
    for offset, (_, _, array) in zip(offsets, arrays, strict=True):
        out[offset : offset + array.nbytes] = array.tobytes()
    return bytes(out)


class _Reader:
    """Little-endian fields of a .dat file, each checked against what is left."""

    def __init__(self, path: Path, data: bytes):
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise FormatError(f"{self.path}: not an imatrix, or truncated (at byte {self.at} of {len(self.data)})")
        self.at += size
        return self.data[self.at - size : self.at]

    def int32(self) -> int:
        return struct.unpack("<i", self.take(4))[0]


def _read_dat(path: Path, data: bytes) -> Imatrix:
    """Values are mean * ncall, the number of windows; one count stands for all columns and experts.

    Sums and counts are brought to tokens, for windows of the usual size (which is not recorded), so that they can be merged
    with those of a GGUF file.
    """
    reader = _Reader(path, data)
    entries: dict[str, Entry] = {}
    chunks = 0
    for _ in range(reader.int32()):
        name = reader.take(reader.int32()).decode("utf-8", "replace").removesuffix(_RESHAPED)
        ncall, width = reader.int32(), reader.int32()
        if width < 1 or name in entries:
            raise FormatError(f"{path}: not an imatrix (entry {name[:60]!r} has {width} values or is there twice)")
        values = np.frombuffer(reader.take(4 * width), "<f4")
        entries[name] = (values[None] * np.float32(LEGACY_CHUNK), np.array([max(ncall, 1) * LEGACY_CHUNK], np.int64))
        chunks = max(chunks, ncall)
    datasets = []
    if reader.at < len(data):
        chunks = reader.int32()
        datasets = [reader.take(reader.int32()).decode("utf-8", "replace")]
    return Imatrix(entries, datasets, chunks)


def _dat_bytes(imatrix: Imatrix) -> bytes:
    means = imatrix.means()
    ncall = max(imatrix.chunk_count, 1)
    out = bytearray(struct.pack("<i", len(means)))
    for name, mean in sorted(means.items()):
        encoded, values = name.encode(), (mean * np.float32(ncall)).astype("<f4")
        out += struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", ncall, values.size) + values.tobytes()
    dataset = ", ".join(imatrix.datasets).encode()
    return bytes(out + struct.pack("<ii", imatrix.chunk_count, len(dataset)) + dataset)
