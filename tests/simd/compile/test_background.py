"""Kernels that other processes compile: what is needed does not wait for a process that gets no time."""

import sys
import time

import pytest

from ggufmill.simd.compile import background
from ggufmill.simd.compile.kernel_cache import module_folder

OTHER = background.Unit("ggufmill.quantize.encode", "nothing either")
UNIT = background.Unit("ggufmill.quantize.encode", "nothing that is ever called")
STUCK = "import pathlib, sys, time; pathlib.Path(sys.argv[1], '0').touch(); time.sleep(600)"  # has claimed the unit


@pytest.fixture
def stuck(tmp_path, monkeypatch):
    """A process of low priority that has claimed the unit and does not come to compile it."""
    monkeypatch.setenv("GGUFMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(background, "available_cpus", lambda: 2)
    monkeypatch.setattr(background, "_crews", {})
    monkeypatch.setattr(background, "low_priority", lambda command: [sys.executable, "-c", STUCK, command[3]])
    module_folder.cache_clear()
    assert background.compile_in_background([UNIT], urgent=False) == 1
    crew = background._crews[UNIT]
    while not any(background.Path(crew._claims.name).iterdir()):
        time.sleep(0.01)
    yield crew
    crew.stop()
    module_folder.cache_clear()


def test_who_needs_a_unit_compiles_it(stuck, monkeypatch):
    monkeypatch.setattr(background, "_PATIENCE", 0.05)
    with background.compiling(UNIT) as falls_here:
        assert falls_here
    assert stuck._processes[0].returncode is not None
    assert UNIT.is_marked


def test_what_becomes_urgent_is_begun_anew(stuck, monkeypatch):
    begun = []

    class Crew:
        count, urgent = 1, True

        def __init__(self, units, count, urgent):
            begun.append((list(units), urgent))

    monkeypatch.setattr(background, "_Crew", Crew)
    assert background.compile_in_background([UNIT]) == 1
    assert begun == [([UNIT], True)]
    assert stuck._processes[0].returncode is not None


def test_one_that_is_done_meanwhile_is_waited_for(stuck):
    UNIT.mark()
    with background.compiling(UNIT) as falls_here:
        assert not falls_here


def test_who_waits_compiles_what_nobody_has_begun(tmp_path, monkeypatch):
    """The process reports the unit that is waited for when the other one is claimed."""
    code = "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\n(folder / '0').touch()\n"
    code += "while not (folder / '1').exists():\n    time.sleep(0.01)\nprint(0, flush=True)\ntime.sleep(600)"
    start, compiled = background.subprocess.Popen, []
    monkeypatch.setenv("GGUFMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(background, "available_cpus", lambda: 2)
    monkeypatch.setattr(background, "_crews", {})
    monkeypatch.setattr(background.Unit, "compile", lambda unit: compiled.append(unit))
    monkeypatch.setattr(
        background.subprocess, "Popen", lambda command, **pipes: start([sys.executable, "-c", code, command[3]], **pipes)
    )
    module_folder.cache_clear()
    assert background.compile_in_background([UNIT, OTHER]) == 1
    crew = background._crews[UNIT]
    try:
        while not any(background.Path(crew._claims.name).iterdir()):
            time.sleep(0.01)
        for unit in (UNIT, OTHER):
            with background.compiling(unit) as falls_here:
                assert not falls_here
    finally:
        crew.stop()
        module_folder.cache_clear()
    assert compiled == [OTHER]
    assert OTHER.is_marked
