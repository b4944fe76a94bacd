"""A digest of this program's code: what an interrupted job made may only be continued by the code that made it."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
# next to the packages, where the program runs from its repository
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
