"""The reference backend against transformers: one batch, and several sequences side by side; what it tells an observer."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import MillError
from ggufmill.quantize import gguf_source
from ggufmill.runtime.backends import reference
from ggufmill.runtime.graph import Observer, ops
from ggufmill.runtime.models import build_graph

_spec = importlib.util.spec_from_file_location("checkpoints", Path(__file__).parents[1] / "test_checkpoints.py")
checkpoints = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checkpoints)

TOLERANCE = checkpoints.TOLERANCE


def load(path):
    source = gguf_source(path)
    return reference.compile_graph(build_graph(source), source)


def logits(model, batch):
    """batch: (cache, tokens) of each sequence -> the logits of each."""
    hidden = model.hidden(np.concatenate([tokens for _, tokens in batch]), [(cache, len(tokens)) for cache, tokens in batch])
    ends = np.cumsum([len(tokens) for _, tokens in batch])[:-1]
    return np.split(model.logits(hidden), ends)


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_a_checkpoint_gives_the_logits_of_transformers(tmp_path, case):
    tokens, expected, path = checkpoints.convert_case(case, tmp_path)
    model = load(path)
    (whole,) = logits(model, [(model.new_cache(len(tokens)), tokens)])
    assert np.abs(whole - expected).max() < TOLERANCE
    # Three sequences, of which each pass takes 1, 2 and 3 tokens.
    caches = [model.new_cache(len(tokens)) for _ in range(3)]
    for i in range(len(tokens) // 3):
        runs = [slice((j + 1) * i, (j + 1) * (i + 1)) for j in range(3)]
        results = logits(model, [(cache, tokens[run]) for cache, run in zip(caches, runs, strict=True)])
        for run, result in zip(runs, results, strict=True):
            assert np.abs(result - expected[run]).max() < TOLERANCE


def test_forks_go_on_by_themselves(tmp_path):
    tokens, expected, path = checkpoints.convert_case("v3", tmp_path)
    model = load(path)
    cache = model.new_cache(20)
    logits(model, [(cache, tokens[:10])])
    fork = cache.fork(5)
    logits(model, [(fork, tokens[20:25])])
    cache.truncate(8)
    (result,) = logits(model, [(cache, tokens[8:20])])
    assert np.abs(result - expected[8:20]).max() < TOLERANCE
    with pytest.raises(MillError, match=r"the context is full: 20 \+ 1 tokens do not fit into 20"):
        logits(model, [(cache, tokens[20:21])])


class Products(Observer):
    """Multiplies what it is told of with the weights themselves."""

    def __init__(self, model):
        self.model, self.products, self.outputs = model, {}, {}

    def wants_input(self, op):
        return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

    wants_output = wants_input

    def on_input(self, op, weight, matrix, x):
        tensor = self.model.source.tensors.get(weight.name)
        if tensor is not None:
            rows = weight.shape[1]
            self.products[weight.name, matrix] = x @ tensor.read(matrix * rows, (matrix + 1) * rows).T

    def on_output(self, op, out):
        self.outputs[op.weights[0].name] = out


def test_an_observer_is_told_of_inputs_and_outputs(tmp_path):
    tokens, _, path = checkpoints.convert_case("v3-mainline", tmp_path)
    model = load(path)
    model.observer = seen = Products(model)
    (whole,) = logits(model, [(model.new_cache(len(tokens)), tokens)])
    linear = [op for op in (*model.graph.ops, *model.graph.head) if isinstance(op, ops.Linear)]
    assert len(linear) > 20
    for op in linear:
        assert np.array_equal(seen.products[op.weight.name, 0], seen.outputs[op.weight.name])
    assert np.array_equal(seen.outputs["output.weight"], whole)
    for name in ("blk.1.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight"):
        rows = np.concatenate([seen.products[name, expert] for expert in range(8) if (name, expert) in seen.products])
        results = seen.outputs[name].reshape(-1, rows.shape[1])
        assert len(rows) == len(results) == 2 * len(tokens)
        assert np.allclose(rows[np.lexsort(rows.T)], results[np.lexsort(results.T)], atol=1e-6)
    heads = np.stack([seen.products["blk.1.attn_v_b.weight", head] for head in range(4)], axis=1)
    assert np.allclose(heads, seen.outputs["blk.1.attn_k_b.weight"], atol=1e-6)  # of the whole op
    assert seen.products["blk.1.attn_k_b.weight", 3].shape == (len(tokens), 32)
    model.observer = None
    seen.outputs.clear()
    logits(model, [(model.new_cache(2), tokens[:2])])
    assert not seen.outputs
