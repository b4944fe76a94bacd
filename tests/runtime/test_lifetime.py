"""A model's memory is free when the last reference to it goes: a search opens hundreds, one after the other."""

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from op_graphs import DEVICE
from recorded_models import LATENT, kept_cases, record_of
from small_models import llama

from ggufmill.formats import TYPES
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu import weights
from ggufmill.runtime.evaluate.sensitivity import Reference

KINDS = ["llama", "v3", "gpt-oss", "gemma4", "kimi-linear", "mpt-clip"]


@contextmanager
def counted_stores(monkeypatch):
    """Gives what has the weights of models that are alive, while no cycles are looked for."""
    alive, make = weakref.WeakSet(), weights.WeightStore.__init__

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        alive.add(self)

    monkeypatch.setattr(weights.WeightStore, "__init__", made)
    gc.collect()
    gc.disable()
    try:
        yield alive
    finally:
        gc.enable()


@pytest.mark.slow(keep=KINDS)
@pytest.mark.parametrize("case", kept_cases())
def test_a_model_goes_with_its_last_reference(build, monkeypatch, case):
    source, tokens = build(case), record_of(case).tokens
    with counted_stores(monkeypatch) as alive:
        for mode in ({"mla": 0}, {"mla": 3}) if case in LATENT else ({},):
            model = load_model(source, threads=2, **mode)
            model.logits(tokens)
            if model.graph.is_causal:
                session = model.session()
                session.feed(tokens[:20])
                session.feed(tokens[20:21])
                del session
            assert len(alive) == 1
            del model
            assert not alive


def test_after_a_pass_that_says_how_far_it_is(monkeypatch):
    """Long ones call the executable that keeps them."""
    with counted_stores(monkeypatch) as alive:
        model = load_model(llama(), threads=2)
        model.hidden([(model.new_cache(300), np.arange(300) % 90)])
        assert len(alive) == 1
        del model
        assert not alive


def test_a_model_on_a_device_too(monkeypatch):
    pytest.importorskip("torch")
    with counted_stores(monkeypatch) as alive:
        load_model(llama(), device=DEVICE, gpu_layers=1).logits(np.arange(40))
        assert not alive


def test_variants_of_a_reference_take_no_memory_afterwards(monkeypatch):
    with counted_stores(monkeypatch) as alive:
        reference = Reference(llama(), np.arange(90) % 90, 30, 3, exact=True, threads=2)
        for name in ("q4_0", "q5_0", "q8_0"):
            reference.with_types({"blk.0.attn_q.weight": TYPES[name]}, None)
            assert len(alive) == 1
