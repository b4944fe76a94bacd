"""Speeds do not include the compilation of kernels."""

import sys
import threading
import time
from types import SimpleNamespace

import numba

from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.clock import seconds_without_compilation
from ggufmill.runtime.generation.generate import generate, warm_up


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
    assert 0.05 <= seconds_without_compilation() - start - seconds <= time.perf_counter() - wall_start - wall


def test_threads_that_compile_at_the_same_time_count_once():
    compile_a_function()
    start, wall_start = seconds_without_compilation(), time.perf_counter()
    threads = [threading.Thread(target=compile_a_function) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 <= seconds_without_compilation() - start <= time.perf_counter() - wall_start


def test_timings_of_a_generation_exclude_compilation(tiny, monkeypatch):
    model = load_model(tiny, cache_k="f32", cache_v="f32")
    generate(model, "a", n_predict=2, temp=0).text()
    run, compile_seconds = model.executable.hidden, []

    def compiling(*batch):
        start = time.perf_counter()
        compile_a_function()
        compile_seconds.append(time.perf_counter() - start)
        return run(*batch)

    parts = {"new_cache": model.executable.new_cache, "logits": model.executable.logits}
    model.executable = SimpleNamespace(hidden=compiling, workers=model.workers, **parts)
    generation = generate(model, "b", n_predict=2, temp=0)
    generation.text()
    assert len(compile_seconds) == 2
    assert generation.timings.prompt_seconds < compile_seconds[0] / 2
    assert generation.timings.generated_seconds < compile_seconds[1] / 2


def test_only_small_models_are_warmed_up(tiny, monkeypatch):
    model, fed = load_model(tiny), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda batch: fed.append(batch) or hidden(batch))
    warm_up(model)
    assert [len(tokens) for ((_, tokens),) in fed] == [4, 1]
    monkeypatch.setattr(sys.modules["ggufmill.runtime.generation.generate"], "_WARM_UP_MAX_BYTES", 1000)
    warm_up(model)
    assert len(fed) == 2
