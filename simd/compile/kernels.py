"""Compiling numba kernels: lazily, without the GIL, for the target of this process, cached on disk (see kernel_cache.py).

numba takes longer to import than most commands take: a module that defines kernels does not import it, their first call does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import Any

from ..cuda.work_items import WorkItems, launch_here
from .compile_time import listen

_PACKAGE = __name__.rpartition(".simd")[0]
_lock = RLock()
# Modules whose kernels are compiled by PlainCalleeCompiler (see there) when others call them: their inner loops are LLVM code
# already, or, as measured, no slower for it.
_PLAIN_CALLEES = tuple(f"{_PACKAGE}.{name}" for name in ("runtime.", "quantize.codecs.iqk.iq2_kl"))


def kernel(function: Callable | None = None, *, items: WorkItems | None = None, **options: Any) -> Any:
    """`numba.njit(nogil=True)` with our disk cache; options as for njit (fastmath=..., inline=...).

    items: how its work is divided among the threads of a GPU, which computes it for threads that are `launching` there.

    Numbers are divided by the rules of IEEE, integers without a check: with checks for zero, numba counts references to every
    array at every call of another kernel, and that can take as long as the work.
    """
    if function is None:
        return lambda f: kernel(f, items=items, **options)
    return Kernel(function, options) if items is None else _ItemKernel(function, options, items)


def import_kernels(name: str, package: str | None) -> ModuleType:
    """`importlib.import_module` of a module that defines kernels, for code that several threads run.

    numba must be imported by one thread while no other uses llvmlite: it adds to what llvmlite's lock calls, and a thread that
    holds the lock meanwhile never gives it back.
    """
    with _lock:
        import numba  # noqa: F401

        return import_module(name, package)


class Kernel:
    """A function that numba compiles when it, or a kernel that calls it, is first called; else as numba's dispatcher of it."""

    def __init__(self, function: Callable, options: dict[str, Any]):
        self._function, self._options, self._dispatcher, self._callee = function, options, None, None
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return (self._dispatcher or self._make())(*arguments)

    def __getattr__(self, name: str) -> Any:  # what this class does not have, so also what numba asks of a global in a kernel
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "_numba_type_":
            return self._make_callee()._numba_type_
        return getattr(self._dispatcher or self._make(), name)

    def _make(self) -> Any:
        with _lock:
            if self._dispatcher is None:
                listen()
                from .callees import EntryCompiler
                from .kernel_cache import cache_of

                dispatcher = self._njit(pipeline_class=EntryCompiler, no_cfunc_wrapper=True)
                dispatcher._cache = cache_of(self._function)
                self._dispatcher = dispatcher
            return self._dispatcher

    def _make_callee(self) -> Any:
        with _lock:
            if self._callee is None:
                from .callees import CalleeCompiler, PlainCalleeCompiler

                plain = self._function.__module__.startswith(_PLAIN_CALLEES)
                compiler = PlainCalleeCompiler if plain else CalleeCompiler
                self._callee = self._njit(pipeline_class=compiler, no_cpython_wrapper=True, no_cfunc_wrapper=True)
            return self._callee

    def _njit(self, **options: Any) -> Any:
        import numba

        from ..target import target

        target()  # sets numba's target, before anything is compiled
        return numba.njit(**{"nogil": True, "error_model": "numpy"} | self._options | options)(self._function)


class _ItemKernel(Kernel):
    """A kernel whose work can be divided among the threads of a GPU."""

    def __init__(self, function: Callable, options: dict[str, Any], items: WorkItems):
        super().__init__(function, options)
        self.items = items

    def __call__(self, *arguments: Any) -> Any:
        launch = launch_here()
        return super().__call__(*arguments) if launch is None else launch(self, self.items, arguments)


def intrinsic(function: Callable) -> Any:
    """numba's `intrinsic`, typed so that a checker lets kernels call it without the typing context."""
    from numba import extending

    return extending.intrinsic(function)


def native_entry(signature: Any, function: Callable, **options: Any) -> Any:
    """The function compiled at once, for one signature of plain numbers, to be called by its `.address` (as `numba.cfunc`).

    It may call kernels, and nothing may be raised in it.
    """
    from numba.core import sigutils
    from numba.core.ccallback import CFunc

    from ..target import target
    from .callees import EntryCompiler
    from .kernel_cache import cache_of

    target()
    listen()
    options.setdefault("error_model", "numpy")
    compiled: Any = CFunc(
        function, sigutils.normalize_signature(signature), locals={}, options=options, pipeline_class=EntryCompiler
    )
    compiled._cache = cache_of(function)
    compiled.compile()
    return compiled
