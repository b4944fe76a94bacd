"""Compiling numba kernels: lazily, without the GIL, cached on disk under a key that changes with our sources.

numba's own cache looks only at the file of the kernel itself: an edit to a function it calls, or to a table it reads, would
go on being served stale. So the cache folder carries a digest of all our sources.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event

ROOT = Path(__file__).parent.parent
_PACKAGE = __name__.rpartition(".formats")[0]


def kernel(function: Callable | None = None, **options: Any) -> Any:
    """`numba.njit(nogil=True)` with our disk cache; options as for njit (fastmath=..., inline=...)."""
    if function is None:
        return lambda f: kernel(f, **options)
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


@cache
def cache_folder() -> Path:
    """~/.cache/ggufmill/kernels-DIGEST (GGUFMILL_CACHE and XDG_CACHE_HOME are honoured)."""
    home = os.environ.get("GGUFMILL_CACHE")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ggufmill"
    digest = hashlib.sha256()
    for folder in ("formats", "repack", "quantize", "convert", "runtime", "imatrix"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            digest.update(path.read_bytes())
    return base / f"kernels-{digest.hexdigest()[:16]}"


class _SayOnce(event.Listener):
    """Tells a waiting person, the first time one of our kernels really compiles, what is going on."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: event.Event) -> None:
        dispatcher = (event.data or {}).get("dispatcher")
        module = getattr(getattr(dispatcher, "py_func", None), "__module__", "") or ""
        if not self.said and module.startswith(_PACKAGE + "."):
            self.said = True
            print(f"compiling kernels (once for this version; kept in {cache_folder()})", file=sys.stderr)

    def on_end(self, event: event.Event) -> None:
        pass


event.register("numba:compile", _SayOnce())
