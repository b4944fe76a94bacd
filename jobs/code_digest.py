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
    digest, root = hashlib.sha256(), str(_ROOT)
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _OTHER_FOLDERS and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(_SUFFIXES if folder != root else ".py"):
                path = os.path.join(folder, name)  # hundreds of files: pathlib would take as long as the digests
                with open(path, "rb", buffering=0) as file:
                    content = hashlib.sha256(file.read()).digest()
                digest.update(os.path.relpath(path, root).replace(os.sep, "/").encode() + b"\0" + content)
    return digest.hexdigest()[:16]
