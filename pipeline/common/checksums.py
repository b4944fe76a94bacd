"""sha256 of whole files, and the list of them that lies beside the files of a run: as sha256sum writes and checks it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import FormatError
from ...formats.file_range import read_text
from .progress import OnProgress, Stage

NAME = "SHA256SUMS"
_BLOCK_BYTES = 8 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](\S.*)")


def sha256_of(paths: Iterable[Path], report: OnProgress = lambda progress: None) -> dict[str, str]:
    """File name -> sha256 in hex. report: stage 'checksum' in bytes."""
    paths = list(paths)
    stage = Stage(report, "checksum", sum(path.stat().st_size for path in paths))
    digests = {}
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                stage.advance(len(block), path.name)
        digests[path.name] = digest.hexdigest()
    return digests


def read_checksums(path: Path) -> dict[str, str]:
    """File name -> sha256 in hex, of a file that sha256sum or `run` wrote. Raises FormatError for a line of another form."""
    digests = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise FormatError(f"{path}, line {number}: not a sha256 and the name of a file")
        digests[match[2]] = match[1].lower()
    return digests
