"""Compiling numba kernels: lazily, without the GIL, for the target of this process, cached on disk (see kernel_cache.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numba
from numba import extending
from numba.core import event, sigutils
from numba.core.ccallback import CFunc

from .kernel_cache import cache_home, cache_of, delete_unused
from .target import target

_PACKAGE = __name__.rpartition(".simd")[0]


def kernel(function: Callable | None = None, **options: Any) -> Any:
    """`numba.njit(nogil=True)` with our disk cache; options as for njit (fastmath=..., inline=...).

    Numbers are divided by the rules of IEEE, integers without a check: with checks for zero, numba counts references to every
    array at every call of another kernel, and that can take as long as the work.
    """
    if function is None:
        return lambda f: kernel(f, **options)
    target()  # sets numba's target, before anything is compiled
    options.setdefault("error_model", "numpy")
    dispatcher: Any = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = cache_of(function)
    return dispatcher


def intrinsic(function: Callable) -> Any:
    """numba's `intrinsic`, typed so that a checker lets kernels call it without the typing context."""
    return extending.intrinsic(function)


def native_entry(signature: Any, function: Callable, **options: Any) -> Any:
    """The function compiled at once, for one signature of plain numbers, to be called by its `.address` (as `numba.cfunc`).

    It may call kernels, and nothing may be raised in it.
    """
    target()
    options.setdefault("error_model", "numpy")
    compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
    compiled._cache = cache_of(function)
    compiled.compile()
    return compiled


class _Compilations(event.Listener):
    """Counts the kernels of ours that are compiled, and prints one line to stderr at the first."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: event.Event) -> None:
        dispatcher = (event.data or {}).get("dispatcher")
        module = getattr(getattr(dispatcher, "py_func", None), "__module__", "") or ""
        if not module.startswith(_PACKAGE + "."):
            return
        self.count += 1
        if self.count == 1:
            print(f"compiling kernels (once for this version; cached in {cache_home()})", file=sys.stderr)
            delete_unused(cache_home())

    def on_end(self, event: event.Event) -> None:
        pass


_compilations = _Compilations()
event.register("numba:compile", _compilations)


def compiled_kernels() -> int:
    """How many kernels this process has compiled; those that were on disk do not count."""
    return _compilations.count
