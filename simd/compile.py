"""Compiling numba kernels: lazily, without the GIL, cached on disk under a key that changes with our sources.

numba's own cache looks only at the file of the kernel itself: an edit to a function it calls in another file, or to a table
it reads, would go on being served stale. So each module's cache folder carries a digest of the module, of everything of ours
that it imports, and of the data files beside those.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import get_host_cpu_features
from numba import extending
from numba.core import event

from ..errors import MillError

ROOT = Path(__file__).parent.parent
_PACKAGE = __name__.rpartition(".simd")[0]
_choosing_folder = threading.RLock()
# `from ..a.b import c, d`, over several lines in brackets. To parse every file would be a tenth of a short command's time.
_RELATIVE = re.compile(r"^[ \t]*from[ ]+(\.+)([\w.]*)[ ]+import[ ]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def kernel(function: Callable | None = None, **options: Any) -> Any:
    """`numba.njit(nogil=True)` with our disk cache; options as for njit (fastmath=..., inline=...).

    Numbers are divided by the rules of IEEE, integers without a check: with checks for zero, numba counts references to every
    array at every call of another kernel, and that can take as long as the work.
    """
    if function is None:
        return lambda f: kernel(f, **options)
    options.setdefault("error_model", "numpy")
    return _with_cache(numba.njit(nogil=True, cache=True, **options), function)


def intrinsic(function: Callable) -> Any:
    """numba's `intrinsic`, typed so that a checker lets kernels call it without the typing context."""
    return extending.intrinsic(function)


def native_entry(signature: Any, function: Callable, **options: Any) -> Any:
    """The function compiled at once, for one signature of plain numbers, to be called by its `.address` (as `numba.cfunc`).

    It may call kernels, and nothing may be raised in it.
    """
    options.setdefault("error_model", "numpy")
    return _with_cache(numba.cfunc(signature, cache=True, **options), function)


def _with_cache(decorate: Callable[[Callable], Any], function: Callable) -> Any:
    _check_processor()
    with _choosing_folder:
        before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        numba.config.CACHE_DIR = str(_folder(Path(function.__code__.co_filename)))  # type: ignore[attr-defined]
        try:
            return decorate(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            raise MillError(
                f"{cache_home()} cannot be written to, where kernels are kept: name a folder, GGUFMILL_CACHE"
            ) from None
        finally:
            numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


@cache
def _check_processor() -> None:
    """Half-precision numbers are converted by the processor: without F16C (x86 before 2012) LLVM would abort the process."""
    if platform.machine().lower() in ("x86_64", "amd64") and not get_host_cpu_features().get("f16c", False):
        raise MillError("this processor lacks F16C (every x86 processor since 2013 has it); ggufmill cannot run here")


def cache_home() -> Path:
    """~/.cache/ggufmill; GGUFMILL_CACHE and XDG_CACHE_HOME are honoured."""
    home = os.environ.get("GGUFMILL_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ggufmill"


@cache
def _folder(source: Path) -> Path:
    digest = hashlib.sha256()
    for path in sorted(_closure(source)):
        digest.update(path.read_bytes())
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts) if source.is_relative_to(ROOT) else source.stem
    return cache_home() / "kernels" / f"{name}-{digest.hexdigest()[:16]}"


def _closure(source: Path) -> set[Path]:
    """The file, all modules of ours that it imports directly or not, and the data files in their folders."""
    found: set[Path] = set()
    todo = [source]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        found.update(p for p in path.parent.glob("*") if p.suffix in (".npz", ".json"))
        todo += _imports(path)
    return found


@cache
def _imports(path: Path) -> list[Path]:
    """Files of the relative imports of a module (`from ..formats.types import x`, `from . import y`)."""
    files: list[Path] = []
    for dots, module, names in _RELATIVE.findall(path.read_text("utf-8")):
        folder = path.parents[len(dots) - 1].joinpath(*module.split("."))
        candidates = [
            folder.with_suffix(".py"),
            folder / "__init__.py",
            *(folder / f"{n}.py" for n in re.findall(r"\w+", names)),
        ]
        files += [c for c in candidates if c.is_file()]
    return files


class _SayOnce(event.Listener):
    """Tells a waiting person, the first time one of our kernels really compiles, what is going on."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: event.Event) -> None:
        dispatcher = (event.data or {}).get("dispatcher")
        module = getattr(getattr(dispatcher, "py_func", None), "__module__", "") or ""
        if not self.said and module.startswith(_PACKAGE + "."):
            self.said = True
            # The folder that numba found to write to, if it is not ours.
            used, ours = Path(dispatcher.stats.cache_path), cache_home()  # type: ignore[union-attr]
            folder = ours if used.is_relative_to(ours) else used
            print(f"compiling kernels (once for this version; kept in {folder})", file=sys.stderr)

    def on_end(self, event: event.Event) -> None:
        pass


event.register("numba:compile", _SayOnce())
