"""Hashes of tensors and of whole files, by the names and in the lines that gguf-hash (llama.cpp) prints.

A line is ALGORITHM  HEX  FILE:TENSOR, or ALGORITHM  HEX  FILE for all tensors of the file one after the other, in the order of
its directory: what is around them, metadata too, does not count.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import FormatError
from .file_range import HASH_BYTES, read_span
from .gguf import GGUFFile, TensorInfo

# Strongest last: `--check` goes by the strongest that a manifest has.
ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh64": xxhash.xxh64, "sha1": hashlib.sha1, "sha256": hashlib.sha256}
_DIGITS = {"xxh64": 16, "sha1": 40, "sha256": 64}
# Of gguf-hash: identifiers of models are made in this namespace.
_NAMESPACE = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")


@dataclass(frozen=True)
class Hash:
    algorithm: str
    digest: str
    name: str  # FILE or FILE:TENSOR

    def line(self) -> str:
        return f"{self.algorithm:<8}  {self.digest}  {self.name}"


def hash_file(
    file: GGUFFile, algorithms: Sequence[str], *, layers: bool = True, progress: Callable[[int, str], None] | None = None
) -> Iterator[Hash]:
    """Hashes of every tensor (layers) and then of the file, for each shard in turn. algorithms: names of ALGORITHMS, or 'uuid',
    a UUIDv5 (RFC 9562) of the file's tensors. progress(bytes, tensor name) after each block. Every byte is read once.

    Names hold the path as it was given to `open_gguf`. Raises FormatError when a file cannot be read.
    """
    for path in file.paths:
        shown = whole_line(str(path))
        wholes = {a: hashlib.sha1(_NAMESPACE.bytes) if a == "uuid" else ALGORITHMS[a]() for a in algorithms}
        for info in (t for t in file.tensors.values() if t.path == path):
            parts = {a: ALGORITHMS[a]() for a in algorithms if a != "uuid"} if layers else {}
            for block in _blocks(info):
                for digest in (*wholes.values(), *parts.values()):
                    digest.update(block)
                if progress is not None:
                    progress(len(block), info.name)
            yield from (Hash(a, digest.hexdigest(), f"{shown}:{whole_line(info.name)}") for a, digest in parts.items())
        for algorithm, digest in wholes.items():
            made = str(uuid.UUID(bytes=digest.digest()[:16], version=5)) if algorithm == "uuid" else digest.hexdigest()
            yield Hash(algorithm, made, shown)


def whole_line(name: str) -> str:
    """Without line breaks, each of them written as an escape: a name is the rest of its line."""
    return "".join(ascii(c)[1:-1] if len(f"a{c}a".splitlines()) > 1 else c for c in name)


def _blocks(info: TensorInfo) -> Iterator[memoryview]:
    for start in range(0, info.nbytes, HASH_BYTES):
        yield read_span(info.path, info.offset + start, min(HASH_BYTES, info.nbytes - start)).data


def read_manifest(path: Path) -> dict[tuple[str, str], str]:
    """(algorithm, name) -> digest. Lines of other programs are passed over. Raises FormatError if there is none of ours."""
    found: dict[tuple[str, str], str] = {}
    try:
        text = path.read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    for line in text.splitlines():
        parts = line.split(None, 2)
        if len(parts) == 3 and len(parts[1]) == _DIGITS.get(parts[0]):
            found[parts[0], parts[2]] = parts[1].lower()
    if not found:
        raise FormatError(f"{path}: no line of this manifest is ALGORITHM HASH NAME of {', '.join(_DIGITS)}")
    return found
