"""What a worker has to have in common with the process that gives it work: other versions may make other bytes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import llvmlite
import numba
import numpy as np

from ... import __version__

_ROOT = Path(__file__).parents[2]
# beside the packages, where the program runs from its repository
_OTHER_FOLDERS = {"tests", "docs", "benchmarks", "build", "out", "__pycache__"}
_SUFFIXES = (".py", ".npz", ".txt", ".toml")


@cache
def code_digest() -> str:
    """16 hex digits that change with any module or table of this program."""
    digest = hashlib.sha256()
    for folder, inner, files in os.walk(_ROOT):
        inner[:] = sorted(name for name in inner if name not in _OTHER_FOLDERS and not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(files)):
            if path.name.endswith(_SUFFIXES) and (path.parent != _ROOT or path.suffix == ".py"):
                name = path.relative_to(_ROOT).as_posix()
                digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def program_identity() -> dict[str, str]:
    """What decides the bytes that this process makes: name -> version or digest."""
    return {
        "ggufmill": __version__,
        "code": code_digest(),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "Python": "{}.{}".format(*sys.version_info),
    }


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What is different there, in words: 'numba 0.61.0 instead of 0.62.1'; '' if nothing is."""
    return ", ".join(
        f"{name} {other.get(name, 'unknown')} instead of {value}" for name, value in own.items() if other.get(name) != value
    )
