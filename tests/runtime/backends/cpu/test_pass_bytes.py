"""What a pass of latent attention takes is what is allocated while it runs."""

import tracemalloc

import numpy as np
import pytest
from small_models import N_VOCAB, latent

from ggufmill.formats import TYPES
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.lower.experts import ExpertsStep
from ggufmill.runtime.backends.cpu.lower.latent_attention import LatentAttentionStep
from ggufmill.runtime.backends.cpu.lower.latent_batch import LatentBatch
from ggufmill.runtime.settings import CACHE_TYPES

N_CTX = 512


def windows(count):
    return np.random.default_rng(0).integers(0, N_VOCAB, (count, N_CTX))


@pytest.mark.parametrize("mla", [1, 3])
def test_matrices_that_latent_attention_decodes_stay_as_far_as_there_is_room(mla):
    model = load_model(latent(), mla=mla, cache_bytes=1 << 24)
    executable, store = model.executable, model.executable.store
    names = {weight.name for step in executable.steps for weight in step.decoded}
    assert len(names) == 2
    model.hidden_of_windows(windows(1))
    taken = sum(rows.nbytes for (name, *_), rows in store._rows.items() if name in names)
    store.release()
    assert store.kept_bytes(names, names) == taken > 0
    store.free = taken // 2 - 1
    assert store.kept_bytes(names, names) == store.free + taken // 2


@pytest.mark.parametrize("cache_k", CACHE_TYPES)
def test_matrices_that_multiply_quantised_latents_are_made_once(cache_k):
    model, plain = (load_model(latent(type_name="q8_0"), cache_k=kind, cache_bytes=1 << 24) for kind in (cache_k, "f16"))
    executable, store = model.executable, model.executable.store
    made = sum(step.made_bytes for step in executable.steps)
    assert bool(made) == (not TYPES[cache_k].is_float)
    assert not any(step.made_bytes for step in load_model(latent(), cache_k=cache_k).executable.steps)
    if made:  # in the place of decoded matrices, which are the larger part of what is kept
        assert not any(step.decoded for step in executable.steps)
        names = {weight.name for step in plain.executable.steps for weight in step.decoded}
        tensors = [store.source.tensors[name] for name in names]
        less = sum(4 * tensor.n_elements - 34 * tensor.n_elements // 32 for tensor in tensors)
        assert plain.executable.weight_bytes() - executable.weight_bytes() == less - made > 0
    assert not store._rows  # asking reads nothing
    model.hidden_of_windows(windows(1))
    kept = dict(store._rows)
    assert sum(rows.nbytes for (name, *_), rows in kept.items() if "q8_0)" in name) == made
    model.hidden_of_windows(windows(1))
    assert all(store._rows[key] is rows for key, rows in kept.items())


@pytest.mark.parametrize(("heads_at_once", "threads"), [(1 << 40, 1), (1 << 40, 2), (1, 2)])
@pytest.mark.parametrize("options", [{}, {"cache_k": "q8_0"}, {"cache_k": "q8_0", "k_cache_hadamard": True}])
def test_keys_and_values_made_from_latents_are_counted(heads_at_once, threads, options, monkeypatch):
    model = load_model(latent(256, "q8_0"), attention_bytes=min(heads_at_once, 1 << 30), threads=threads, **options)
    model.hidden_of_windows(windows(2))  # which decodes the matrices
    run, taken = LatentBatch.run, []

    def traced(self):
        tracemalloc.start()
        try:
            run(self)
            taken.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(LatentBatch, "run", traced)
    model.executable.release()
    model.hidden_of_windows(windows(2))
    step = next(step for step in model.executable.steps if isinstance(step, LatentAttentionStep))
    said = step.inner_bytes([N_CTX] * 2, N_CTX, None)
    assert said / 2 < max(taken) < 1.3 * said  # threads may work one after the other


def test_steps_of_a_kind_use_the_same_memory_and_others_their_own(monkeypatch):
    model = load_model(latent())
    executable = model.executable
    monkeypatch.setattr(LatentAttentionStep, "inner_bytes", lambda self, *_: 0)
    blocks = executable.pass_bytes([N_CTX], N_CTX)
    monkeypatch.setattr(LatentAttentionStep, "inner_bytes", lambda self, *_: 1000)
    assert executable.pass_bytes([N_CTX], N_CTX) == blocks + 1000
    other = next(type(step) for step in executable.steps if not isinstance(step, LatentAttentionStep | ExpertsStep))
    monkeypatch.setattr(other, "inner_bytes", lambda self, *_: 10)
    assert executable.pass_bytes([N_CTX], N_CTX) == blocks + 1010
