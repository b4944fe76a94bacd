"""Small graphs for tests of ops: random weights made on request, and all backends compared on a growing sequence."""

import os
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.runtime.backends import reference
from ggufmill.runtime.backends.cpu.executable import compile_graph
from ggufmill.runtime.backends.cpu.weights import WeightStore
from ggufmill.runtime.graph import GraphBuilder, Observer
from ggufmill.runtime.settings import Settings

N_EMBD, VOCABULARY = 32, 50
ROUNDING = 1e-5  # between two orders of the same float32 sums, as a share of the largest number
COUNTS = (1, 2, 5, 40)
HAS_TORCH = find_spec("torch") is not None
DEVICE = os.environ.get("GGUFMILL_TORCH_DEVICE", "cpu")  # of torch, which the same tests run on
DEVICE += ":0" if DEVICE in ("cuda", "xpu", "mps") else ""
# Settings that leave a part of a model on the processor.
PLACEMENTS = {
    "all": {},
    "last layers": {"gpu_layers": 2},
    "some tensors elsewhere": {"override_tensor": ("attn_q=CPU,up_exps|ffn_down|ssm_out=CPU",)},
    "experts elsewhere": {"n_cpu_moe": 2},
}
few_examples = settings(max_examples=8, deadline=None)


class Everything(Observer):
    """Copies of all inputs and outputs, by op."""

    def __init__(self):
        self.inputs, self.outputs = {}, {}

    def wants_input(self, op):
        return True

    def wants_output(self, op):
        return True

    def on_input(self, op, weight, matrix, x):
        self.inputs[weight.name, matrix] = x.copy()

    def on_output(self, op, out):
        self.outputs[op.out.index] = type(op).__name__, out.copy()


class Tensors(dict):
    """Random weights that are made when a builder asks for them: name -> shape in ne order is given beforehand."""

    def __init__(self, seed, **shapes):
        super().__init__()
        draw = np.random.default_rng(seed)
        for name, shape in {"token_embd.weight": (N_EMBD, VOCABULARY), **shapes}.items():
            values = draw.standard_normal(shape[::-1]).astype(np.float32)
            values = values / np.sqrt(shape[0]) if len(shape) > 1 and "embd" not in name else values
            flat = np.ascontiguousarray(values, np.float32).reshape(-1, shape[0])
            key = name.replace("__", ".")
            self[key] = SourceTensor(key, shape, "f32", lambda start, stop, flat=flat: flat[start:stop])


def as_stored(tensors):
    """The same tensors with their bytes, so that products are made from these."""

    def with_bytes(tensor):
        return replace(tensor, raw=lambda start, stop: tensor.read(start, stop).view(np.uint8), stored=TYPES["f32"])

    return {name: with_bytes(tensor) for name, tensor in tensors.items()}


def run_both(build, seed=0, threads=1, counts=COUNTS, flash=True, source=None, **shapes):
    """Compares the cpu backend, and torch's where it is installed, with the reference on one growing sequence, pass by pass.
    build(builder, x) -> value of N_EMBD numbers."""
    source = source or TensorSource("test", {}, Tensors(seed, **shapes), "test")
    graph = graph_of(source, build)
    compare(
        reference.compile_graph(graph, source), compiled(graph, source, threads=threads, flash=flash, exact=True), seed, counts
    )
    if HAS_TORCH:
        compare(reference.compile_graph(graph, source), on_device(graph, source, exact=True), seed, counts)


def compare(oracle, ours, seed, counts):
    tokens = np.random.default_rng(seed + 1).integers(0, VOCABULARY, sum(counts))
    caches, start = (oracle.new_cache(len(tokens)), ours.new_cache(len(tokens))), 0
    for count in counts:
        part = tokens[start : start + count]
        expected, found = oracle.hidden(part, [(caches[0], count)]), ours.hidden(part, [(caches[1], count)])
        start += count
        close(found, expected)
        close(ours.logits(found), oracle.logits(expected))


def close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= ROUNDING * max(1.0, np.abs(expected).max())


def graph_of(source, build):
    builder = GraphBuilder(source)
    x = build(builder, builder.embedding("token_embd", N_EMBD, 0.5))
    builder.end_layer(x)
    return builder.finish("test", x, 512)


def compiled(graph, source, **chosen):
    options = Settings(**chosen)
    return compile_graph(graph, WeightStore(source, 1 << 26, options.threads or 1, options.exact), options)


def on_device(graph, source, **chosen):
    """As `compiled`, by the torch backend: all of it on one device."""
    import torch

    from ggufmill.runtime.backends.torch import executable
    from ggufmill.runtime.backends.torch.op_places import Places
    from ggufmill.runtime.backends.torch.weights import Weights

    options, device = Settings(**chosen), torch.device(DEVICE)
    store = WeightStore(source, 1 << 26, 1, options.exact)
    return executable.compile_graph(graph, Weights(source, {}, options.exact), store, options, Places({}, {}, device))


threads = st.sampled_from([1, 2])
seeds = st.integers(0, 1000)
