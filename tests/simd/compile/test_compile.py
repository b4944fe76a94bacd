"""Kernels that call kernels, and parts that another process compiles."""

import os
import subprocess
import sys
import textwrap
from threading import Thread

import pytest

from ggufmill.simd.compile import background, kernel_cache, kernels

KERNELS = textwrap.dedent("""
    import numpy as np
    from ggufmill.simd.compile import kernel

    @kernel
    def root(x):
        if x < 0:
            raise ValueError("negative number")
        return np.sqrt(x)

    @kernel
    def sum_of_roots(numbers):
        total = 0.0
        for x in numbers:
            total += root(x)
        return total
""")
CALLS = textwrap.dedent("""
    from kernels import *
    assert sum_of_roots(np.array([1.0, 4.0])) == 3
    assert {own_call} == 2
    try:
        sum_of_roots(np.array([1.0, -4.0]))
    except ValueError as error:
        print(error)
""")


@pytest.mark.parametrize("own_call", ["2", "root(4.0)"])
def test_a_kernel_that_another_one_calls(tmp_path, own_call):
    """Compiled and then loaded: called by the other alone, or from Python as well; what it raises arrives."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "GGUFMILL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": path}
    for _ in range(2):
        command = [sys.executable, "-c", CALLS.format(own_call=own_call)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout == "negative number\n"
        stored = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "kernels").rglob("*.index")}
        assert stored == ({"kernels.sum_of_roots"} if own_call == "2" else {"kernels.sum_of_roots", "kernels.root"})


PARTS = textwrap.dedent("""
    import sys
    from types import SimpleNamespace
    from ggufmill.simd.compile import background
    from ggufmill.simd.compile.compile_time import compiled_kernels
    from ggufmill.runtime.backends.cpu.kernels.row_kernels import chain, scale

    background.available_cpus = lambda: 2
    if sys.argv[1] == "ends":
        background.sys = SimpleNamespace(executable="true")
    background.compile_in_background([scale.function])
    assert scale.address and chain.address
    print(background._process is not None, compiled_kernels())
""")


@pytest.mark.parametrize("other", ["reports", "ends"])
def test_a_part_that_another_process_compiles(tmp_path, other):
    """It is loaded when the other process has reported it, or compiled here when that has ended; the next process needs
    neither."""
    environment = {**os.environ, "GGUFMILL_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(other):
        command = [sys.executable, "-c", PARTS, other]
        started, kernels = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
        return started, int(kernels) > 0  # `chain` calls no kernel, `scale` does

    assert run(other) == ("True", other == "ends")
    assert run("reports") == ("False", False)


def test_nothing_is_started_for_parts_on_disk_or_with_one_processor(monkeypatch):
    from ggufmill.runtime.backends.cpu.kernels.row_kernels import scale

    assert scale.address
    assert kernel_cache.is_stored(scale.function)
    background.compile_in_background([scale.function])
    assert not background._pending
    monkeypatch.setattr(kernel_cache, "is_stored", lambda function: False)
    monkeypatch.setattr(background, "available_cpus", lambda: 1)
    background.compile_in_background([scale.function])
    background.wait_for(scale.function)
    assert not background._pending


def test_one_thread_at_a_time_imports_kernels():
    modules = []
    thread = Thread(target=lambda: modules.append(kernels.import_kernels(".codecs.floats", "ggufmill.quantize")))
    with kernels._lock:  # as while numba is imported for the first kernel
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    assert modules[0].CODECS
