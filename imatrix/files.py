"""The two file formats of importance matrices, read and written: GGUF (llama.cpp) and the legacy .dat.

Both are described in docs/formats/imatrix-files.md. An entry is (sums float32 [matrices, columns], counts int64 [matrices]).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..data_classes import dataclass
from ..formats import TYPES, FormatError, TensorType, open_gguf
from ..formats.file_range import check_regular
from ..formats.gguf_header import header_bytes
from ..formats.metadata_values import text_of

Entry = tuple[np.ndarray, np.ndarray]

LEGACY_CHUNK = 512  # tokens per window, where a file does not say

_SUMS, _OLD_SUMS, _COUNTS = ".in_sum2", ".sums", ".counts"  # suffixes of an entry's tensors
_RESHAPED = " (reshaped)"  # ik_llama.cpp writes attn_k_b under the name of its 3-D view


@dataclass(frozen=True)
class ImatrixFile:
    """The content of a file; attributes as of `Imatrix`."""

    entries: dict[str, Entry]
    datasets: list[str]
    chunk_count: int
    chunk_size: int = LEGACY_CHUNK


def read_imatrix_file(path: Path, is_mapped: bool = False) -> ImatrixFile:
    """Reads either format, recognised by content. Raises FormatError for a file that is neither, or is truncated. is_mapped:
    sums of a GGUF stay in the file, which must not become shorter meanwhile."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            return _read_gguf(path, is_mapped) if magic == b"GGUF" else _read_dat(path, magic + file.read())
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def gguf_pieces(entries: Mapping[str, Entry], datasets: Sequence[str], chunk_count: int, chunk_size: int) -> Iterator[bytes]:
    """A complete GGUF file, piece by piece; arguments as of `Imatrix`."""
    shapes = {name: (len(counts), sums.shape[1]) for name, (sums, counts) in entries.items()}
    header, offsets, size = _gguf_layout(shapes, datasets, chunk_count, chunk_size)
    yield header
    at = len(header)
    arrays = (array.astype("<f4") for _, entry in sorted(entries.items()) for array in entry)
    for offset, array in zip(offsets, arrays, strict=True):
        yield bytes(offset - at)
        yield array.tobytes()
        at = offset + array.nbytes
    yield bytes(size - at)


def _gguf_layout(
    shapes: Mapping[str, tuple[int, int]], datasets: Sequence[str], chunk_count: int, chunk_size: int
) -> tuple[bytes, Sequence[int], int]:
    """(header, offset of the sums and of the counts of each entry by name, size of the file)."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": np.uint32(chunk_count),
        "imatrix.chunk_size": np.uint32(chunk_size),
    }
    arrays: list[tuple[str, tuple[int, ...], TensorType]] = []
    for name, (matrices, columns) in sorted(shapes.items()):
        arrays += [(name + _SUMS, (columns, matrices), TYPES["f32"]), (name + _COUNTS, (1, matrices), TYPES["f32"])]
    return header_bytes(metadata, arrays, 32)


def file_size(
    suffix: str, shapes: Mapping[str, tuple[int, int]], datasets: Sequence[str], chunk_count: int, chunk_size: int
) -> int:
    """Bytes of an importance matrix with data for entries of these shapes: name -> (matrices, columns). suffix: of the file's
    name, '.dat' for the legacy format."""
    if suffix != ".dat":
        return _gguf_layout(shapes, datasets, chunk_count, chunk_size)[2]
    entries = sum(12 + len(name.encode()) + 4 * matrices * columns for name, (matrices, columns) in shapes.items())
    return 4 + entries + 8 + len(", ".join(datasets).encode())


def dat_bytes(means: Mapping[str, np.ndarray], datasets: Sequence[str], chunk_count: int) -> bytes:
    """A complete .dat file. means: name -> mean squared activations float32 [matrices, columns], which become one row."""
    ncall = max(chunk_count, 1)
    out = bytearray(struct.pack("<i", len(means)))
    for name, mean in sorted(means.items()):
        encoded, values = name.encode(), (mean * np.float32(ncall)).astype("<f4")
        out += struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", ncall, values.size) + values.tobytes()
    dataset = ", ".join(datasets).encode()
    return bytes(out + struct.pack("<ii", chunk_count, len(dataset)) + dataset)


def _read_gguf(path: Path, is_mapped: bool) -> ImatrixFile:
    file = open_gguf(path)
    if text_of(file.metadata, "general.type") != "imatrix":
        kind = file.metadata.get("general.type")
        raise FormatError(f"{path}: a GGUF file, but not an imatrix (its general.type is {kind!r:.60})")
    entries: dict[str, Entry] = {}
    for key, tensor in file.tensors.items():
        suffix = next((s for s in (_SUMS, _OLD_SUMS) if key.endswith(s)), None)
        if suffix is None:
            continue
        name = key.removesuffix(suffix)
        counts_tensor = file.tensors.get(name + _COUNTS)
        if counts_tensor is None or tensor.type.name != "f32" or counts_tensor.type.name != "f32":
            raise FormatError(f"{path}: entry {name} lacks its counts, or is not of f32")
        sums = (tensor.data if is_mapped else tensor.read(0, tensor.n_rows)).view(np.float32)
        counts = counts_tensor.read(0, counts_tensor.n_rows).view(np.float32).reshape(-1)
        if len(counts) != len(sums):
            raise FormatError(f"{path}: entry {name} has {len(sums)} matrices and {len(counts)} counts")
        if not (np.abs(counts) < 2.0**62).all():
            raise FormatError(f"{path}: entry {name} holds counts that are NaN or infinite; compute it again")
        entries[name] = (sums, np.rint(counts).astype(np.int64))
    try:
        datasets = [str(d) for d in file.metadata.get("imatrix.datasets", [])]
        chunk_count = int(file.metadata.get("imatrix.chunk_count", 0))
        chunk_size = int(file.metadata.get("imatrix.chunk_size", LEGACY_CHUNK))
    except (TypeError, ValueError, OverflowError):
        raise FormatError(f"{path}: its imatrix.* keys are not of the types that an imatrix has") from None
    _check_numbers(path, chunk_count=chunk_count, chunk_size=chunk_size)
    return ImatrixFile(entries, datasets, chunk_count, chunk_size)


def _check_numbers(path: Path, **numbers: int) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 1 << 31:
            raise FormatError(f"{path}: imatrix.{name} is {value}; a file can hold 0 to {(1 << 31) - 1}")


class _Reader:
    """Little-endian fields of a .dat file, each checked against the remaining bytes."""

    def __init__(self, path: Path, data: bytes):
        self.path, self.data, self.position = path, data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.position + size > len(self.data):
            raise FormatError(f"{self.path}: not an imatrix, or truncated (at byte {self.position} of {len(self.data)})")
        self.position += size
        return self.data[self.position - size : self.position]

    def int32(self) -> int:
        return struct.unpack("<i", self.take(4))[0]


def _read_dat(path: Path, data: bytes) -> ImatrixFile:
    """Values are mean * ncall, where ncall is the number of windows; one count is for all columns and experts.

    Sums and counts are scaled to tokens, assuming windows of LEGACY_CHUNK (the size is not recorded), so that they can be
    merged with those of a GGUF file.
    """
    reader = _Reader(path, data)
    entries: dict[str, Entry] = {}
    chunk_count = 0
    for _ in range(reader.int32()):
        name = reader.take(reader.int32()).decode("utf-8", "replace").removesuffix(_RESHAPED)
        ncall, width = reader.int32(), reader.int32()
        if width < 1 or name in entries:
            raise FormatError(f"{path}: not an imatrix (entry {name[:60]!r} has {width} values, or occurs twice)")
        values = np.frombuffer(reader.take(4 * width), "<f4")
        with np.errstate(over="ignore", invalid="ignore"):  # `Imatrix.problem` reports infinite sums
            sums = values[None] * np.float32(LEGACY_CHUNK)
        entries[name] = (sums, np.array([max(ncall, 1) * LEGACY_CHUNK], np.int64))
        chunk_count = max(chunk_count, ncall)
    datasets = []
    if reader.position < len(data):
        chunk_count = reader.int32()
        datasets = [reader.take(reader.int32()).decode("utf-8", "replace")]
    _check_numbers(path, chunk_count=chunk_count)
    return ImatrixFile(entries, datasets, chunk_count)
