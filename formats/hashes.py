"""Hashes of tensors and of files, in the format of llama.cpp's gguf-hash.

A line is ALGORITHM  HEX  FILE:TENSOR, or ALGORITHM  HEX  FILE for the data of all tensors of the file, concatenated in the
order of its directory; metadata and padding are not part of a hash.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from ..data_classes import dataclass
from ..errors import FormatError
from .file_range import HASH_BLOCK_BYTES, read_range, read_text
from .gguf import GGUFFile
from .lazy_sequence import LazySequence
from .tensor_table import TensorInfo

# Strongest last: `--check` uses the strongest that a manifest has.
ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh64": xxhash.xxh64, "sha1": hashlib.sha1, "sha256": hashlib.sha256}
_HEX_DIGITS = {"xxh64": 16, "sha1": 40, "sha256": 64}
# The namespace in which gguf-hash makes the UUIDv5 of a model.
_NAMESPACE = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")
_HANDED_OVER = 1 << 18  # bytes that take longer than handing them to another thread, at the least


@dataclass(frozen=True)
class Hash:
    """A line of a manifest: a key of ALGORITHMS or 'uuid', the digest in hex, and FILE or FILE:TENSOR (tensor '': a file)."""

    algorithm: str
    digest: str
    file: str
    tensor: str = ""

    @property
    def name(self) -> str:
        """FILE, or FILE:TENSOR."""
        return f"{self.file}:{self.tensor}" if self.tensor else self.file

    def line(self) -> str:
        return f"{self.algorithm:<8}  {self.digest}  {self.name}"


class Hashes(LazySequence[Hash]):
    """Hashes of files and tensors in columns."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []  # algorithm and file, of which there are few
        self._kinds, self._ends = array("H"), array("Q", [0])
        self._tensors: list[str] = []
        self._digests = bytearray()

    def append(self, entry: Hash) -> None:
        """Adds a hash at the end."""
        kind = entry.algorithm, entry.file
        if kind not in self._names:
            self._names.append(kind)
        self._kinds.append(self._names.index(kind))
        self._tensors.append(entry.tensor)
        self._digests += entry.digest.encode()
        self._ends.append(len(self._digests))

    def item(self, number: int) -> Hash:
        algorithm, file = self._names[self._kinds[number]]
        digest = self._digests[self._ends[number] : self._ends[number + 1]].decode()
        return Hash(algorithm, digest, file, self._tensors[number])

    def __len__(self) -> int:
        return len(self._tensors)


class DigestThreads:
    """Updates several digests with the same bytes, each in a thread of its own while the caller gets the next ones ready. Those
    of one digest stay in their order: the hash of a file is as fast as one thread, whatever else is hashed beside it.

    threads: 1: the caller updates them, one after the other
    """

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._begun: list[Future[None]] = []

    def update(self, digests: Iterable[Any], data: memoryview) -> None:
        """Returns when the bytes of the call before are hashed; these are kept until the next one."""
        self.finish()
        if self._pool is None or len(data) < _HANDED_OVER:
            for digest in digests:
                digest.update(data)
            return
        self._begun = [self._pool.submit(digest.update, data) for digest in digests]

    def finish(self) -> None:
        """Waits until all bytes are hashed."""
        for begun in self._begun:
            begun.result()
        self._begun = []


def hash_file(
    file: GGUFFile,
    algorithms: Sequence[str],
    *,
    layers: bool = True,
    progress: Callable[[int, str], None] | None = None,
    threads: int = 1,
) -> Iterator[Hash]:
    """Hashes of every tensor (if `layers`) and then of the file, for each shard in turn; every byte is read once.

    algorithms: keys of ALGORITHMS, or 'uuid', a UUIDv5 (RFC 9562) of the file's tensors. progress(bytes, tensor name) is called
    after each block. threads: see `DigestThreads`. Names contain the path as it was given to `open_gguf`. Raises FormatError
    when a file cannot be read.
    """
    hashing = DigestThreads(threads)
    for path in file.paths:
        file_name = escape_line_breaks(str(path))
        file_digests = {a: hashlib.sha1(_NAMESPACE.bytes) if a == "uuid" else ALGORITHMS[a]() for a in algorithms}
        for info in file.tensors.make_file(path):
            tensor_digests = {a: ALGORITHMS[a]() for a in algorithms if a != "uuid"} if layers else {}
            for block in _blocks(info):
                hashing.update((*file_digests.values(), *tensor_digests.values()), block)
                if progress is not None:
                    progress(len(block), info.name)
            hashing.finish()
            name = escape_line_breaks(info.name)
            yield from (Hash(a, digest.hexdigest(), file_name, name) for a, digest in tensor_digests.items())
        for algorithm, digest in file_digests.items():
            is_uuid = algorithm == "uuid"
            text = str(uuid.UUID(bytes=digest.digest()[:16], version=5)) if is_uuid else digest.hexdigest()
            yield Hash(algorithm, text, file_name)


def escape_line_breaks(name: str) -> str:
    """The name with line breaks escaped: in a manifest a name is the rest of its line."""
    if name.splitlines() == [name]:
        return name
    return "".join(ascii(c)[1:-1] if len(f"a{c}a".splitlines()) > 1 else c for c in name)


def _blocks(info: TensorInfo) -> Iterator[memoryview]:
    for start in range(0, info.nbytes, HASH_BLOCK_BYTES):
        yield read_range(info.path, info.offset + start, min(HASH_BLOCK_BYTES, info.nbytes - start)).data


def read_manifest(path: Path) -> dict[tuple[str, str], str]:
    """A manifest -> {(algorithm, name): digest in hex}; lines in another format are skipped. Raises FormatError if all are."""
    digests: dict[tuple[str, str], str] = {}
    try:
        text = read_text(path, errors="surrogateescape")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    for line in text.splitlines():
        parts = line.split(None, 2)
        if len(parts) == 3 and len(parts[1]) == _HEX_DIGITS.get(parts[0]):
            digests[parts[0], parts[2]] = parts[1].lower()
    if not digests:
        raise FormatError(f"{path}: no line of this manifest is ALGORITHM HASH NAME of {', '.join(_HEX_DIGITS)}")
    return digests
