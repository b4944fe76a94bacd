"""Kernels that a package brings, compiled when it was built: one archive per level of processors and version of Python.

An archive has the folders of `kernel_cache`, with their names: these carry a digest of the sources, of the versions of numba
and LLVM and of the processor, so that kernels of other sources or versions are never found; and every file has its checksum.
"""

from __future__ import annotations

import sys
import zipfile
from functools import cache
from pathlib import Path
from zlib import error as zlib_error

from ..target import target

FOLDER = Path(__file__).parent / "packs"


def pack_name(level: str) -> str:
    """The file name of the archive for a level and this version of Python."""
    return f"{level}-{sys.implementation.cache_tag}.zip"


def packed(folder: str, name: str) -> bytes | None:
    """A file of a folder of kernels; None if the package does not bring it, or if the archive is damaged."""
    archive = _archive(FOLDER / pack_name(target().level))
    try:
        return None if archive is None else archive.read(f"{folder}/{name}")
    except (KeyError, OSError, zipfile.BadZipFile, zlib_error, EOFError):
        return None


def write_pack(kernels: Path, out: Path) -> int:
    """Packs all folders of compiled kernels in `kernels` (CACHE_HOME/kernels) into an archive -> how many kernels it has."""
    files = sorted(path for path in kernels.glob("*/*") if path.suffix != ".tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(kernels).as_posix())  # without the time: same kernels, same archive
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return sum(path.suffix == ".kernel" for path in files)


@cache
def _archive(path: Path) -> zipfile.ZipFile | None:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile):
        return None
