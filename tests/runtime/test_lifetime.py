"""A model's memory is free when the last reference to it goes: a search opens hundreds, one after the other."""

import numpy as np
import pytest
from op_graphs import DEVICE
from recorded_models import LATENT, record_of
from small_models import llama

from ggufmill.formats import TYPES
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.sensitivity import Reference

KINDS = ["v3", "gemma4", "kimi-linear"]  # test_same_results.py has all, without a session


@pytest.mark.parametrize("case", KINDS)
def test_a_model_goes_with_its_last_reference(build, alive_stores, case):
    source, tokens = build(case), record_of(case).tokens
    for mode in ({"mla": 0}, {"mla": 3}) if case in LATENT else ({},):
        model = load_model(source, threads=2, **mode)
        model.logits(tokens)
        if model.graph.is_causal:
            session = model.session()
            session.feed(tokens[:20])
            session.feed(tokens[20:21])
            del session
        assert len(alive_stores) == 1
        del model
        assert not alive_stores


def test_after_a_pass_that_says_how_far_it_is(alive_stores):
    """Long ones call the executable that keeps them."""
    model = load_model(llama(), threads=2)
    model.hidden([(model.new_cache(300), np.arange(300) % 90)])
    assert len(alive_stores) == 1
    del model
    assert not alive_stores


def test_a_model_on_a_device_too(alive_stores):
    pytest.importorskip("torch")
    load_model(llama(), device=DEVICE, gpu_layers=1).logits(np.arange(40))
    assert not alive_stores


def test_variants_of_a_reference_take_no_memory_afterwards(alive_stores):
    reference = Reference(llama(), np.arange(90) % 90, 30, 3, exact=True, threads=2)
    for name in ("q4_0", "q5_0", "q8_0"):
        reference.with_types({"blk.0.attn_q.weight": TYPES[name]}, None)
        assert len(alive_stores) == 1
