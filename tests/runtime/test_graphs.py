"""The ways to compute the same logits, against each other, and what is refused. Against transformers: test_checkpoints.py."""

import dataclasses

import numpy as np
import pytest

from ggufmill.formats import FormatError, MillError, PlanError
from ggufmill.runtime import load_model as load

ROUNDING = 1e-4  # between two orders of the same float32 sums


def load_model(source, **settings):
    """Without the roundings that are usual: of activations, keys and values."""
    return load(source, exact=True, **settings)


@pytest.mark.parametrize("layout", ["ik", "mainline", "legacy"])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["v3", "v2-lite"])
def test_latent_attention_is_the_same_in_every_layout_and_way(build, tokens, kind, layout, mla):
    source = build(kind, "legacy")
    expected = load_model(source, mla=2).logits(tokens)
    source = build(kind, layout)
    assert np.abs(load_model(source, mla=mla).logits(tokens) - expected).max() < ROUNDING


def test_each_deepseek_detail_matters(build, tokens):
    """What the oracle test would not notice if it had no effect: bias, groups, norm, scale, yarn, shared experts."""
    source = build("v3")
    expected = load_model(source).logits(tokens)
    changes = {
        "deepseek2.expert_group_count": 1,
        "deepseek2.expert_weights_norm": False,
        "deepseek2.expert_weights_scale": 1.0,
        "deepseek2.expert_gating_func": 1,
        "deepseek2.rope.scaling.type": "none",
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.0,
    }
    for key, value in changes.items():
        changed = dataclasses.replace(source, metadata=source.metadata | {key: value})
        assert np.abs(load_model(changed).logits(tokens) - expected).max() > 0.01, key
    for part in ("exp_probs_b", "_shexp"):
        without = {name: tensor for name, tensor in source.tensors.items() if part not in name}
        assert np.abs(load_model(dataclasses.replace(source, tensors=without)).logits(tokens) - expected).max() > 0.01, part


@pytest.mark.parametrize(("kind", "layout"), [("llama-llama3", "ik"), ("v3", "ik"), ("v3", "mainline"), ("v2-lite", "legacy")])
def test_cached_generation_gives_the_logits_of_one_pass(build, tokens, kind, layout):
    model = load_model(build(kind, layout))
    full = model.logits(tokens[:60])
    session = model.session()
    assert np.abs(session.feed(tokens[:33]) - full[32]).max() < ROUNDING
    assert np.abs(session.feed(tokens[33:40]) - full[39]).max() < ROUNDING
    for i in range(40, 60):
        assert np.abs(session.feed(tokens[i : i + 1]) - full[i]).max() < ROUNDING
    session.rewind(50)
    session.feed([1, 2, 3])  # other tokens, forgotten again
    session.rewind(50)
    assert np.abs(session.feed(tokens[50:60]) - full[59]).max() < ROUNDING
    assert session.tokens == tokens[:60].tolist()


@pytest.mark.parametrize("kind", ["llama-llama3", "v3"])
def test_settings_do_not_change_the_logits(build, tokens, kind):
    source = build(kind)
    expected = load_model(source).logits(tokens)
    for settings in ({"ubatch": 7}, {"cache_bytes": 0}, {"attention_bytes": 1}, {"threads": 1}, {"threads": 5}):
        assert np.abs(load_model(source, **settings).logits(tokens) - expected).max() < ROUNDING, settings


@pytest.mark.parametrize("kind", ["llama-llama3", "v3"])
def test_sequences_run_together_as_they_do_alone(build, tokens, kind):
    model = load_model(build(kind), ubatch=64)
    parts = [tokens[:100], tokens[100:110], tokens[110:111]]
    together = model.hidden([(model.new_cache(200), part) for part in parts])
    for part, hidden in zip(parts, together, strict=True):
        assert np.abs(model.head(hidden) - model.logits(part)).max() < ROUNDING


def test_the_context_limit_is_kept(tiny):
    model = load_model(tiny, n_ctx=8)
    session = model.session()
    session.feed(range(8))
    with pytest.raises(MillError, match=r"context is full.*; choose a larger n_ctx \(-c\)"):
        session.feed([1])
    assert len(session.tokens) == session.cache.length == 8
    with pytest.raises(MillError, match="context is full"):
        model.session().feed(range(9))


def test_wrong_requests_are_refused(tiny):
    model = load_model(tiny)
    with pytest.raises(PlanError, match="outside the vocabulary"):
        model.logits([0, model.n_vocab])
    with pytest.raises(PlanError, match="outside the vocabulary"):
        model.logits([-1])
    with pytest.raises(PlanError, match="at least one id"):
        model.logits([])
    with pytest.raises(PlanError, match="unknown setting 'cache'"):
        load_model(tiny, cache=1)
    with pytest.raises(PlanError, match="batch has to be positive"):
        load_model(tiny, batch=0)


def test_wrong_models_are_refused(tiny):
    def changed(metadata=None, tensors=None):
        return dataclasses.replace(tiny, metadata=metadata or tiny.metadata, tensors=tensors or tiny.tensors)

    with pytest.raises(PlanError, match="architecture 'rwkv7' cannot be run; the nearest that can is '"):
        load_model(changed(tiny.metadata | {"general.architecture": "rwkv7"}))
    with pytest.raises(FormatError, match=r"metadata key llama\.block_count is missing"):
        load_model(changed({k: v for k, v in tiny.metadata.items() if k != "llama.block_count"}))
    with pytest.raises(FormatError, match=r"blk\.0\.attn_k\.weight is missing"):
        load_model(changed(tensors={k: v for k, v in tiny.tensors.items() if k != "blk.0.attn_k.weight"}))
    swapped = tiny.tensors | {"blk.0.ffn_up.weight": tiny.tensors["blk.0.ffn_down.weight"]}
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight has shape .* expected"):
        load_model(changed(tensors=swapped))
    with pytest.raises(PlanError, match="'dynamic' is not supported"):
        load_model(changed(tiny.metadata | {"llama.rope.scaling.type": "dynamic"}))
