"""Speeds do not include the compilation of kernels; lines tell how long it took."""

import threading
import time

import numba
import pytest
from numba.core.event import trigger_event

from ggufmill.simd.compile import compile_time
from ggufmill.simd.compile.compile_time import compiling_for, compiling_now, listen, seconds_without_compilation


@pytest.fixture(autouse=True)
def listening():
    listen()


@pytest.fixture
def lines(monkeypatch):
    """The lines about compiling so far, none of them too short."""
    monkeypatch.setattr(compile_time, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(compile_time, "_announce", lambda: None)
    lines = []
    with compile_time.compilation_lines(lines.append):
        yield lines


def compile_a_kernel(module="ggufmill.formats.floats"):
    """What numba says when it compiles a kernel. Returns what was being compiled for meanwhile."""
    with trigger_event("numba:compiler_lock"), trigger_event("numba:run_pass", {"module": module}):
        if module.startswith("ggufmill."):
            compile_a_kernel("numba.cpython.builtins")  # one that it calls
        return compiling_now()


def compile_a_function():
    """Makes numba compile something."""

    @numba.njit
    def f(x):
        return x * x + 1.5

    f(2.0)


def test_the_clock_stops_during_compilation():
    compile_a_function()  # the first time numba loads modules of its own
    start, wall_start = seconds_without_compilation(), time.perf_counter()
    compile_a_function()
    seconds, wall = seconds_without_compilation() - start, time.perf_counter() - wall_start
    assert 0 <= seconds < wall / 2
    time.sleep(0.05)
    assert 0.05 <= seconds_without_compilation() - start - seconds <= time.perf_counter() - wall_start


def test_threads_that_compile_at_the_same_time_count_once():
    compile_a_function()
    start, wall_start = seconds_without_compilation(), time.perf_counter()
    threads = [threading.Thread(target=compile_a_function) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 <= seconds_without_compilation() - start <= time.perf_counter() - wall_start


def test_one_line_for_all_that_is_compiled_for_a_subject(lines):
    with compiling_for("iq4_k"):
        assert compile_a_kernel()[0] == "iq4_k"
        with compiling_for("q8_0"):
            compile_a_kernel()
        assert lines == []
    assert lines == ["compiling kernels for iq4_k: 0 s"]
    assert compiling_now() is None
    with compiling_for("iq4_k"):
        pass
    assert len(lines) == 1


def test_kernels_for_nothing_in_particular_and_those_of_others(lines):
    compile_a_kernel("numba.cpython.builtins")
    assert lines == []
    compile_a_kernel()
    assert lines == ["compiling kernels for formats: 0 s"]


def test_kernels_that_are_loaded_have_no_line(lines):
    with compiling_for("iq4_k"), trigger_event("numba:compiler_lock"):
        pass
    assert lines == []


def test_short_times_are_added_up_until_they_are_worth_a_line(lines, monkeypatch):
    monkeypatch.setattr(compile_time, "_LEAST_SECONDS", 60.0)
    for seconds in (0.0, 59.0, 1.2):
        assert lines == []
        with compiling_for("q2_K"):
            compile_a_kernel()
            compile_time._unreported["q2_K"] += seconds
    assert lines == ["compiling kernels for q2_K: 60 s"]


def test_waiting_for_another_process_counts_as_compiling(lines):
    wall_start, start = time.perf_counter(), seconds_without_compilation()
    with compiling_for("q2_K, q3_K"), compile_time.waiting_for_compilation():
        time.sleep(0.02)
    assert seconds_without_compilation() - start <= time.perf_counter() - wall_start - 0.02
    assert lines == ["compiling kernels for q2_K, q3_K: 0 s"]


def test_what_is_compiled_for_is_heard_when_it_begins_and_each_second(lines, monkeypatch):
    heard, now = [], [100.0]
    monkeypatch.setattr(compile_time.time, "perf_counter", lambda: now[0])
    kernel = {"module": "ggufmill.formats.floats"}
    with compile_time.compilation_heard(heard.append), compiling_for("iq3_k"), trigger_event("numba:compiler_lock"):
        for seconds in (0.0, 0.5, 0.6, 0.2, 5.0):
            now[0] += seconds
            with trigger_event("numba:run_pass", kernel):
                pass
    assert heard == ["iq3_k"] * 3
    compile_a_kernel()
    assert len(heard) == 3
