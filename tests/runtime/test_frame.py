"""The parts that graphs are put together from, each against its formula."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ggufmill.formats import FormatError, SourceTensor, TensorSource
from ggufmill.runtime.backends.cpu.decoder import Block
from ggufmill.runtime.backends.cpu.feedforward import gelu_times, silu_times
from ggufmill.runtime.backends.cpu.moe import GatedShare
from ggufmill.runtime.backends.cpu.norms import LayerNorm, RMSNorm, norm_from
from ggufmill.runtime.backends.cpu.weights import WeightStore
from ggufmill.runtime.hparams import HParams
from ggufmill.runtime.models.legacy_llama import VARIATIONS

DRAW = np.random.default_rng(11)
X = DRAW.standard_normal((5, 8)).astype(np.float32)
VECTORS = {"n.weight": DRAW.standard_normal(8).astype(np.float32), "n.bias": DRAW.standard_normal(8).astype(np.float32)}


def store(vectors):
    tensors = {n: SourceTensor(n, v.shape, "f32", lambda start, stop, v=v: v[None]) for n, v in vectors.items()}
    return WeightStore(TensorSource("test model", {}, tensors, "test"), 0)


def hparams(**keys):
    return HParams({"general.architecture": "x"} | {f"x.{k.replace('__', '.')}": v for k, v in keys.items()}, "test")


def test_activations():
    gate, up = np.linspace(-200, 200, 401, dtype=np.float32), np.full(401, 3, np.float32)
    with np.errstate(over="ignore"):
        silu, gelu = silu_times(gate.copy(), up), gelu_times(gate.copy(), up)
    exact = gate.astype(np.float64)
    assert np.allclose(silu, 3 * exact / (1 + np.exp(-exact)), rtol=1e-6, atol=1e-30)
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    assert np.allclose(gelu, 3 * 0.5 * exact * (1 + np.tanh(inner)), rtol=1e-5, atol=1e-6)


def test_the_epsilon_tells_which_norm_it_is():
    rms = norm_from(store(VECTORS), hparams(attention__layer_norm_rms_epsilon=0.1), "n", 8)
    assert isinstance(rms, RMSNorm)
    assert np.allclose(rms(X), X / np.sqrt((X**2).mean(1, keepdims=True) + 0.1) * VECTORS["n.weight"], atol=1e-6)
    layer = norm_from(store(VECTORS), hparams(attention__layer_norm_epsilon=0.1), "n", 8)
    assert isinstance(layer, LayerNorm)
    centred = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 0.1) * VECTORS["n.weight"]
    assert np.allclose(layer(X), centred + VECTORS["n.bias"], atol=1e-6)
    without = norm_from(store({"n.weight": VECTORS["n.weight"]}), hparams(attention__layer_norm_epsilon=0.1), "n", 8)
    assert np.allclose(without(X), centred, atol=1e-6)


def test_a_shared_block_behind_a_gate():
    gate = VECTORS["n.weight"]
    out = GatedShare(gate, lambda x: 2 * x)(X)
    assert np.allclose(out, 2 * X / (1 + np.exp(-X @ gate))[:, None], atol=1e-6)


def run(block):
    """What a block makes of X, as Decoder.hidden adds it up."""
    attended = block.attended(X, SimpleNamespace())
    if block.parallel:
        return X + attended + block.fed_forward(X)
    return X + attended + block.fed_forward(X + attended)


def test_the_frame_of_a_layer():
    def attention(x, step):
        return x * x

    def plain(n):
        return lambda x: n * x

    def feed_forward(x):
        return x - 1

    step = X + (2 * X) ** 2
    block = Block(plain(2), attention, plain(3), feed_forward)
    assert np.allclose(run(block), step + 3 * step - 1, atol=1e-4)
    bare = X + X**2
    assert np.allclose(run(Block(None, attention, None, feed_forward)), bare + bare - 1, atol=1e-4)
    posted = X + 5 * (2 * X) ** 2
    block = Block(plain(2), attention, plain(3), feed_forward, plain(5), plain(7))
    assert np.allclose(run(block), posted + 7 * (3 * posted - 1), atol=1e-3)
    scaled = X + 0.5 * (2 * X) ** 2
    assert np.allclose(
        run(Block(plain(2), attention, plain(3), feed_forward, scale=0.5)), scaled + 0.5 * (3 * scaled - 1), atol=1e-4
    )
    parallel = Block(plain(2), attention, plain(3), feed_forward, parallel=True)
    assert np.allclose(run(parallel), step + 3 * X - 1, atol=1e-4)


def test_flags_per_layer():
    assert hparams().flags("pattern", 3) is None
    assert hparams(pattern=2).flags("pattern", 5) == [True, False, True, False, True]
    assert hparams(pattern=0).flags("pattern", 2) == [True, True]
    assert hparams(pattern=np.array([1, 0, 1], bool)).flags("pattern", 2) == [True, False]
    with pytest.raises(FormatError, match=r"x\.pattern has 2 values, not 3"):
        hparams(pattern=[True, False]).flags("pattern", 3)


def test_keys_that_a_file_may_lack():
    assert hparams(a=1).with_defaults({"a": 2, "b": 3}).int("a") == 1
    assert hparams(a=1).with_defaults({"a": 2, "b": 3}).int("b") == 3
    assert VARIATIONS["gemma2"].keys["attention.sliding_window"] == 4096
