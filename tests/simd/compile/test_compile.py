"""Kernels that call kernels, and parts that another process compiles."""

import ctypes
import os
import subprocess
import sys
import textwrap
from threading import Thread

import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc

from ggufmill.simd.compile import background, intrinsic, kernels
from ggufmill.simd.compile.callees import EntryCompiler
from ggufmill.simd.llvm import I32, load, store, vector
from ggufmill.simd.target import target

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
        stored = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "kernels").rglob("*.kernel")}
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
    started = background.compile_in_background([scale.unit])
    if sys.argv[1] == "reports" and started:
        crew = background._crews[scale.unit]
        while not any(background.Path(crew._claims.name).iterdir()):
            background.os.sched_yield()  # until the other process has begun it
    assert scale.address and chain.address
    print(started, compiled_kernels())
""")


@pytest.mark.process
@pytest.mark.parametrize("other", ["reports", "ends"])
def test_a_part_that_another_process_compiles(tmp_path, other):
    """It is loaded when the other process has reported it, or compiled here when that has ended without it; the next process
    needs neither."""
    environment = {**os.environ, "GGUFMILL_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(other):
        command = [sys.executable, "-c", PARTS, other]
        started, kernels = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
        return started, int(kernels) > 0  # `chain` calls no kernel, `scale` does

    assert run(other) == ("1", other == "ends")
    assert run("reports") == ("0", False)


class _FakeProcesses:
    """Processes that compile nothing."""

    def __init__(self, monkeypatch, tmp_path, processors):
        self.commands = []
        monkeypatch.setattr(background, "available_cpus", lambda: processors)
        monkeypatch.setattr(background, "cache_home", lambda: tmp_path)
        monkeypatch.setattr(background, "_crews", {})
        monkeypatch.setattr(background.subprocess, "Popen", self.start)
        monkeypatch.setattr(background.atexit, "register", lambda function: None)

    def start(self, command, **pipes):
        self.commands.append(command)
        self.reports = os.dup(pipes["stdout"])

    def report(self, text):
        os.write(self.reports, text.encode())
        os.close(self.reports)


UNITS = [background.Unit("ggufmill.simd.team", name) for name in ("a", "b", "c")]


def test_processes_share_units_with_this_one(monkeypatch, tmp_path):
    marked = []
    monkeypatch.setattr(background, "mark_compiled", lambda source, name: marked.append(name))
    monkeypatch.setattr(background, "is_marked_compiled", lambda source, name: name == "c")
    fake = _FakeProcesses(monkeypatch, tmp_path, 2)
    assert background.compile_in_background(UNITS) == 1
    folder, *units = fake.commands[0][3:]
    assert units == ["ggufmill.simd.team:a::", "ggufmill.simd.team:b::"]  # c is there
    assert background.compile_in_background(UNITS) == 0  # asked for already
    with background.compiling(UNITS[0]) as here:  # nobody has begun it
        assert here
    assert marked == ["a"]
    assert background._claim(folder, 1)
    fake.report("1\n")
    with background.compiling(UNITS[1]) as here:  # another process has
        assert not here
    assert marked == ["a"]


def test_a_unit_of_a_process_that_died(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(background, "mark_compiled", lambda source, name: None)
    monkeypatch.setattr(background.Unit, "compile", lambda unit: compiled.append(unit.name))
    fake = _FakeProcesses(monkeypatch, tmp_path, 2)
    assert background.compile_in_background(UNITS) == 1
    assert background._claim(fake.commands[0][3], 0)
    fake.report("")
    with background.compiling(UNITS[0]) as here:
        assert here
    assert compiled == ["b", "c"]  # while it waited


@pytest.mark.parametrize(("processors", "started"), [(1, 0), (3, 2), (64, 3)])
def test_a_process_for_each_other_processor(monkeypatch, tmp_path, processors, started):
    fake = _FakeProcesses(monkeypatch, tmp_path, processors)
    assert background.compile_in_background(UNITS) == len(fake.commands) == started


def test_one_thread_at_a_time_imports_kernels():
    modules = []
    thread = Thread(target=lambda: modules.append(kernels.import_kernels(".codecs.floats", "ggufmill.quantize")))
    with kernels._lock:  # as while numba is imported for the first kernel
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    assert modules[0].CODECS


@intrinsic
def _keep_a_vector(typingctx, place):
    """Calls a function in which something between a load and a store needs all registers."""

    def generate(context, builder, signature, args):
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), "keeps_a_vector")
        function.linkage = "internal"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block())
        number = 32 if target().has("avx512f") else 16
        value = load(inner, function.args[0], vector(I32, 8))
        inner.asm(ir.FunctionType(ir.VoidType(), []), "", ",".join(f"~{{ymm{i}}}" for i in range(number)), [], True)
        store(inner, value, function.args[0])
        inner.ret_void()
        builder.call(function, args)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@pytest.mark.skipif(not target().has("avx2"), reason="only vectors of 32 bytes and more lie across cache lines")
def test_stacks_begin_at_cache_lines():
    """Vectors that registers do not hold are kept where they cross no cache line, whatever a caller's stack begins at."""

    def kept(place):
        _keep_a_vector(place)

    compiled = CFunc(kept, ((types.int64,), types.void), {}, {}, pipeline_class=EntryCompiler)
    compiled.compile()
    numbers = np.arange(8, dtype=np.int32)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)(numbers.ctypes.data)
    assert numbers.tolist() == list(range(8))
    function = compiled._library.get_asm_str().partition("keeps_a_vector:")[2].partition(".cfi_endproc")
    assert "andq\t$-64, %rsp" in function[0]
    assert ".cfi_startproc" in function[0]  # debuggers and profilers find callers
