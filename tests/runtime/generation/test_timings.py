"""Timings of a generation, and the passes that come before it."""

import sys
import time
from types import SimpleNamespace

import numba

from ggufmill.runtime import load_model
from ggufmill.runtime.generation.generate import compile_for_generation, generate


def compile_a_function():
    """Makes numba compile something."""

    @numba.njit
    def f(x):
        return x * x + 1.5

    f(2.0)


def test_timings_of_a_generation_exclude_compilation(tiny, monkeypatch):
    compile_a_function()  # the first one loads modules
    model = load_model(tiny, cache_k="f32", cache_v="f32")
    generate(model, "a", n_predict=2, temp=0).text()
    run, compile_seconds = model.executable.hidden, []

    def compiling(*batch, **options):
        start = time.perf_counter()
        compile_a_function()
        compile_seconds.append(time.perf_counter() - start)
        return run(*batch, **options)

    parts = {
        name: getattr(model.executable, name)
        for name in ("new_cache", "logits", "takes_layers_in_turn", "decode_batch", "short_prompt")
    }
    model.executable = SimpleNamespace(hidden=compiling, workers=model.workers, **parts)
    generation = generate(model, "b", n_predict=2, temp=0)
    generation.text()
    assert len(compile_seconds) == 2  # one for the prompt, which is short
    assert generation.timings.prompt_seconds < compile_seconds[0] / 2
    assert generation.timings.generated_seconds < compile_seconds[1] / 2


def test_only_small_models_are_warmed_up(tiny, monkeypatch):
    model, fed = load_model(tiny), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda batch, *rest, **options: fed.append(batch) or hidden(batch, *rest, **options))
    compile_for_generation(model)
    assert [len(tokens) for ((_, tokens),) in fed] == [4, 1]
    monkeypatch.setattr(sys.modules["ggufmill.runtime.generation.generate"], "_WARM_UP_MAX_BYTES", 1000)
    compile_for_generation(model)
    assert len(fed) == 2
