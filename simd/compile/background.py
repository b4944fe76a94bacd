"""Kernels that other processes compile, while this one compiles others: numba uses one thread.

What is compiled at once is a *unit*: an object of a module, or what a function of it returns for an argument; its kernel is
compiled by asking for its `address`, if it has one. As many processes as there are other processors take units in order. Who
begins one claims it by a file, so that nobody compiles what another does; a thread that needs one waits until the process that
claimed it has stored it, and compiles others meanwhile that nobody has begun; or compiles it where nobody did, or where one of
low priority takes too long. A marker beside the kernels says that those of a unit are stored.
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from ...operating_system.files import cache_home
from ...operating_system.process import low_priority
from ...operating_system.processors import available_cpus
from .compile_time import waiting_for_compilation
from .kernel_cache import ROOT, is_marked_compiled, mark_compiled

_MOST = 8  # processes at a time: each takes some 200 MB
_PATIENCE = 2.0  # seconds for which one of low priority is waited for: on a busy machine it may get no time at all
_LOOK = 0.02  # seconds between two looks whether it is done
_lock = Lock()
_crews: dict[Unit, _Crew] = {}  # who was asked to compile it


class Unit(NamedTuple):
    """What is compiled at once: `name` of a module, called with the argument if there is one. source: the module whose sources
    decide, relative to the package, where that is another one."""

    module: str
    name: str
    argument: str = ""
    source: str = ""

    def compile(self) -> None:
        compiled = getattr(import_module(self.module), self.name)
        if self.argument:
            compiled = compiled(self.argument)
        assert getattr(compiled, "address", 1)

    def mark(self) -> None:
        """From now on `is_marked` says so, in every process, until sources change."""
        mark_compiled(*self._marker)

    @property
    def is_marked(self) -> bool:
        return is_marked_compiled(*self._marker)

    @property
    def _marker(self) -> tuple[Path, str]:
        source = self.source or "/".join(self.module.split(".")[1:]) + ".py"
        return ROOT / source, "-".join(filter(None, (self.name, self.argument)))


def compile_in_background(units: Sequence[Unit], urgent: bool = True) -> int:
    """Starts processes that compile those units that are not marked, first those that come first -> how many processes.

    urgent: with the priority of this process, also what processes of low priority were asked for and have not done. Other
    units that were asked for before are left out. Nothing is started where that would not be of use: with one processor, or
    without a folder for kernels.
    """
    if available_cpus() < 2 or not sys.executable:
        return 0
    with _lock:
        for unit in units if urgent else ():
            if (crew := _crews.get(unit)) is not None and not crew.urgent and not unit.is_marked:
                crew.give_up()
                del _crews[unit]
        new = [unit for unit in dict.fromkeys(units) if unit not in _crews and not unit.is_marked]
        if not new or not _can_store():
            return 0
        crew = _Crew(new, min(available_cpus() - 1, len(new), _MOST), urgent)
        _crews.update(dict.fromkeys(new, crew))
        return crew.count


@contextmanager
def compiling(unit: Unit) -> Iterator[bool]:
    """Within this the kernels of a unit are loaded, or compiled: at once where no process has begun it, else after that one has
    ended. Yields whether it falls to this process, of those that were asked to compile it."""
    crew = _crews.get(unit)
    falls_here = crew is not None and crew.leaves(unit)
    yield falls_here
    if falls_here:
        unit.mark()


class _Crew:
    """Processes that compile the same units, and what they have not reported yet."""

    def __init__(self, units: Sequence[Unit], count: int, urgent: bool):
        self._numbers, self._pending, self._lock = {unit: i for i, unit in enumerate(units)}, set(range(len(units))), Lock()
        self.urgent, self._gave_up = urgent, False
        self._claims = tempfile.TemporaryDirectory(prefix="ggufmill-", ignore_cleanup_errors=True)
        command = [sys.executable, "-m", __name__, self._claims.name, *(":".join(unit) for unit in units)]
        reading, writing = os.pipe()
        self._reports, self._processes = os.fdopen(reading), list[subprocess.Popen]()
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": subprocess.DEVNULL}
        try:
            for _ in range(count):
                self._processes.append(subprocess.Popen(command if urgent else low_priority(command), **pipes))
        except OSError:
            pass  # as many as could be started
        finally:
            os.close(writing)
        self.count = len(self._processes)
        atexit.register(self.stop)

    def leaves(self, unit: Unit) -> bool:
        """Whether no process compiles a unit: from now on the caller does. Waits for one that does, and meanwhile compiles what
        is needed next."""
        number = self._numbers[unit]
        if number not in self._pending:
            return False
        if self._gave_up or _claim(self._claims.name, number):
            self._pending.discard(number)
            return True
        while self.urgent and number in self._pending and not unit.is_marked and self._compiles_another():
            pass
        with self._lock, waiting_for_compilation():
            if not self.urgent and number in self._pending:
                self._pending.discard(number)
                return self._takes_too_long(unit)
            while number in self._pending:
                line = self._reports.readline()
                if not line:  # all processes have ended
                    self._pending.clear()
                    return True
                self._pending.discard(int(line))
        return False

    def _compiles_another(self) -> bool:
        """Compiles the first unit that nobody has begun; False if there is none."""
        for unit, number in self._numbers.items():
            if number in self._pending and _claim(self._claims.name, number):
                self._pending.discard(number)
                unit.compile()
                unit.mark()
                return True
        return False

    def _takes_too_long(self, unit: Unit) -> bool:
        """Waits a while for a unit that a process has begun, and gives up if it is not done then."""
        until = time.monotonic() + _PATIENCE
        while not (done := unit.is_marked) and not self._gave_up and time.monotonic() < until:
            time.sleep(_LOOK)
        if not done:
            self.give_up()
        return not done

    def give_up(self) -> None:
        """From now on who needs a unit compiles it."""
        self._gave_up = True
        self.stop()

    def stop(self) -> None:
        """Ends the processes: nobody needs what they have not compiled."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        self._claims.cleanup()


def _claim(folder: str, number: int) -> bool:
    """Whether nobody has claimed a unit before."""
    try:
        Path(folder, str(number)).touch(exist_ok=False)
    except OSError:
        return False
    return True


def _can_store() -> bool:
    folder = cache_home()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def main(folder: str, units: Sequence[str]) -> None:
    """Compiles the units that nobody else has claimed; writes a line about each that is done."""
    gc.set_threshold(100_000, *gc.get_threshold()[1:])  # looking for garbage takes a tenth of compiling
    for number, unit in enumerate(Unit(*words.split(":", 3)) for words in units):
        if _claim(folder, number):
            unit.compile()
            unit.mark()
            print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
