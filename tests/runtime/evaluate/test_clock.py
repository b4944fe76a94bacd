"""Speeds without the compiling of kernels."""

import sys
import threading
import time
from types import SimpleNamespace

import numba
import numpy as np

from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.clock import working_seconds
from ggufmill.runtime.generation.generate import generate, warm_up


def compiled():
    @numba.njit
    def f(x):
        return x * x + 1.5

    f(2.0)


def test_it_stands_still_while_something_is_compiled():
    compiled()  # what numba itself loads the first time
    began, wall = working_seconds(), time.perf_counter()
    compiled()
    worked, taken = working_seconds() - began, time.perf_counter() - wall
    assert 0 <= worked < taken / 2
    time.sleep(0.05)
    assert 0.05 <= working_seconds() - began - worked <= time.perf_counter() - wall - taken


def test_threads_that_compile_at_once_do_not_count_twice():
    compiled()
    began, wall = working_seconds(), time.perf_counter()
    threads = [threading.Thread(target=compiled) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 <= working_seconds() - began <= time.perf_counter() - wall


def test_a_prompt_is_not_slow_for_what_is_compiled_meanwhile(tiny, monkeypatch):
    model = load_model(tiny, cache_k="f32", cache_v="f32")
    generate(model, "a", n_predict=2, temp=0).text()
    run, took = model.executable.hidden, []

    def compiling(tokens, caches):
        began = time.perf_counter()
        compiled()
        took.append(time.perf_counter() - began)
        return run(tokens, caches)

    parts = {"new_cache": model.executable.new_cache, "logits": model.executable.logits}
    model.executable = SimpleNamespace(hidden=compiling, **parts)
    running = generate(model, "b", n_predict=2, temp=0)
    running.text()
    assert len(took) == 2
    assert running.timings.prompt_seconds < took[0] / 2
    assert running.timings.generated_seconds < took[1] / 2


def test_only_small_models_read_a_prompt_and_a_token_to_warm_up(tiny, monkeypatch):
    model, fed = load_model(tiny), []
    monkeypatch.setattr(model, "hidden", lambda turns: fed.append(turns) or [np.zeros((1, 32), np.float32)])
    warm_up(model)
    assert [len(tokens) for ((_, tokens),) in fed] == [4, 1]
    monkeypatch.setattr(sys.modules["ggufmill.runtime.generation.generate"], "_SMALL", 1000)
    warm_up(model)
    assert len(fed) == 2
