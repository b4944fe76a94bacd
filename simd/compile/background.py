"""Parts of programs that another process compiles, while this one compiles others: numba uses one thread.

The other process stores them on disk, and writes the name of each to a pipe when it is done. A thread that needs one waits
until then; if the other process ends without it, it is compiled here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from threading import Lock
from typing import Any

from ...operating_system.files import cache_home
from ...operating_system.processors import available_cpus
from .compile_time import waiting_for_compilation

_lock = Lock()
_process: subprocess.Popen[str] | None = None
_pending: set[str] = set()  # what `_process` has not reported yet


def compile_in_background(functions: Sequence[Callable]) -> None:
    """Starts a process that compiles, one after the other, those parts (by their functions: `TaskKernel.function`) that are not
    on disk. Does nothing where that process would not be of use: with one processor, or without a folder for kernels."""
    from .kernel_cache import is_stored

    global _process
    with _lock:
        names = [_name(function) for function in functions if not is_stored(function)]
        if not names or _process is not None or not sys.executable or available_cpus() < 2 or not _can_store():
            return
        command = [sys.executable, "-m", __name__, *names]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            _process = subprocess.Popen(command, text=True, **pipes)
        except OSError:
            return
        _pending.update(names)


def wait_for(function: Callable) -> None:
    """Returns when the other process no longer compiles a part, if it was going to."""
    name = _name(function)
    if name not in _pending:
        return
    with _lock, waiting_for_compilation():
        assert _process is not None
        assert _process.stdout is not None
        while name in _pending:
            line = _process.stdout.readline()
            if line:
                _pending.discard(line.strip())
            else:
                _pending.clear()
                _process.wait()


def _name(function: Callable) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _can_store() -> bool:
    folder = cache_home()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _compile(names: Sequence[str]) -> None:
    for name in names:
        module, _, attribute = name.partition(":")
        assert getattr(import_module(module), attribute).address
        print(name, flush=True)


if __name__ == "__main__":
    _compile(sys.argv[1:])
