"""Reading importance matrices: GGUF (llama.cpp) and the legacy .dat (FORMATS part F)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ..formats import FormatError, open_gguf
from .entries import LEGACY_CHUNK, Entry, Imatrix
from .write import COUNTS, SUMS

_SUMS = (SUMS, ".sums")  # the second is an older spelling
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


def _read_gguf(path: Path) -> Imatrix:
    file = open_gguf(path)
    kind = file.metadata.get("general.type")
    if not isinstance(kind, str) or kind != "imatrix":
        raise FormatError(f"{path}: a GGUF file, but not an imatrix (its general.type is {kind!r:.60})")
    entries: dict[str, Entry] = {}
    for key, tensor in file.tensors.items():
        suffix = next((s for s in _SUMS if key.endswith(s)), None)
        if suffix is None:
            continue
        name = key.removesuffix(suffix)
        counts = file.tensors.get(name + COUNTS)
        if counts is None or tensor.type.name != "f32" or counts.type.name != "f32":
            raise FormatError(f"{path}: entry {name} lacks its counts, or is not of f32")
        sums = tensor.read(0, tensor.n_rows).view(np.float32)
        seen = counts.read(0, counts.n_rows).view(np.float32).reshape(-1)
        if len(seen) != len(sums):
            raise FormatError(f"{path}: entry {name} has {len(sums)} matrices and {len(seen)} counts")
        if not (np.abs(seen) < 2.0**62).all():
            raise FormatError(f"{path}: entry {name} holds counts that are NaN or infinite; compute it again")
        entries[name] = (sums, np.rint(seen).astype(np.int64))
    try:
        datasets = [str(d) for d in file.metadata.get("imatrix.datasets", [])]
        chunks, size = (
            int(file.metadata.get(f"imatrix.chunk_{key}", other)) for key, other in (("count", 0), ("size", LEGACY_CHUNK))
        )
    except (TypeError, ValueError, OverflowError):
        raise FormatError(f"{path}: its imatrix.* keys are not of the types that an imatrix has") from None
    return Imatrix(entries, datasets, chunks, size)


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
        with np.errstate(over="ignore", invalid="ignore"):  # `problem` tells of what is infinite then
            sums = values[None] * np.float32(LEGACY_CHUNK)
        entries[name] = (sums, np.array([max(ncall, 1) * LEGACY_CHUNK], np.int64))
        chunks = max(chunks, ncall)
    datasets = []
    if reader.at < len(data):
        chunks = reader.int32()
        datasets = [reader.take(reader.int32()).decode("utf-8", "replace")]
    return Imatrix(entries, datasets, chunks)
