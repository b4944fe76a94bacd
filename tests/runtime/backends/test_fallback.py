"""Ops that a backend has no code for are computed by their reference functions: two places are enough for an op."""

import re
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from op_graphs import N_EMBD, Tensors, close, compare, compiled, graph_of, on_device, run_both

from ggufmill.formats import MillError, PlanError, TensorSource
from ggufmill.runtime.backends import reference
from ggufmill.runtime.backends.cpu.lower import reference_step
from ggufmill.runtime.backends.cpu.lower import step as lowering
from ggufmill.runtime.backends.reference import fallback, functions
from ggufmill.runtime.graph import Value, Weight
from ggufmill.runtime.graph.op import Op
from ggufmill.runtime.graph.signatures import functions_of, support_of
from ggufmill.runtime.graph.sink_attention_ops import SinkAttention


@dataclass(frozen=True)
class RunningSum(Op):
    """The sum of weight * x over the tokens so far."""

    x: Value
    weight: Weight
    layer: int
    power: float = 1.0


def running_sum(step, x: np.ndarray, weight: np.ndarray, layer: int) -> np.ndarray:
    out = []
    for cache, rows in step.segments:
        kept = cache.append(layer, "sums", x[rows] * weight)
        out.append(np.cumsum(kept, axis=0)[len(kept) - (rows.stop - rows.start) :])
    return np.concatenate(out).astype(np.float32)


@pytest.fixture
def new_op(monkeypatch):
    added = functions_of({RunningSum: running_sum})
    monkeypatch.setitem(functions.FUNCTIONS, RunningSum, added[RunningSum])
    monkeypatch.setitem(functions.SUPPORT, RunningSum, support_of(added)[RunningSum])
    fallback.note_fallback.cache_clear()


def build(b, x, **options):
    inner = b.linear(x, "up", 24)
    summed = b.append(RunningSum(b.value(24), inner, b.weight("sums.weight", (24,)), 0, **options))
    return b.add(x, b.linear(summed, "down", N_EMBD))


SHAPES = {"up__weight": (N_EMBD, 24), "down__weight": (24, N_EMBD), "sums__weight": (24,)}


@pytest.mark.filterwarnings("ignore:the (cpu|torch) backend has no code")
def test_an_op_with_a_reference_function_alone_runs_on_every_backend(new_op):
    run_both(build, 1, 2, **SHAPES)


@pytest.mark.filterwarnings("ignore:the (cpu|torch) backend has no code")
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_what_it_keeps_follows_the_cache(new_op, backend):
    """Going back, and copies of a cache."""
    if backend == "torch":
        pytest.importorskip("torch")
    source = TensorSource("test", {}, Tensors(3, **SHAPES), "test")
    graph = graph_of(source, build)
    ours = (compiled if backend == "cpu" else on_device)(graph, source, exact=True)
    tokens = np.arange(12) % 7
    cache = ours.new_cache(20)
    whole = ours.hidden(tokens, [(cache, 12)])
    copy = cache.fork(5)
    cache.truncate(9)
    for each, first in ((cache, 9), (copy, 5), (cache.fork(0), 0)):
        close(ours.hidden(tokens[first:], [(each, 12 - first)])[-1:], whole[-1:])
    if backend == "cpu":
        with pytest.raises(MillError, match="cannot be saved"):
            cache.dump()


def test_one_note_for_each_kind_of_op(new_op):
    source = TensorSource("test", {}, Tensors(3, **SHAPES), "test")
    with pytest.warns(UserWarning, match="cpu backend has no code of its own for RunningSum"):
        compiled(graph_of(source, lambda b, x: build(b, build(b, x))), source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(graph_of(source, build), source)


def test_an_option_that_no_function_takes_is_refused(new_op):
    source = TensorSource("test", {}, Tensors(3, **SHAPES), "test")
    graph = graph_of(source, lambda b, x: build(b, x, power=2.0))
    for compile_graph in (reference.compile_graph, compiled):
        with pytest.raises(PlanError, match="op RunningSum with power 2.0"):
            compile_graph(graph, source)


@pytest.mark.filterwarnings("ignore:the cpu backend has no code")
def test_an_option_that_only_the_reference_function_takes(monkeypatch):
    """The op then falls back, too."""
    fallback.note_fallback.cache_clear()
    kind = next(kind for kind in lowering.SUPPORT if kind.__name__ == "Scale")
    monkeypatch.setitem(lowering.SUPPORT, kind, {"x": None})
    source = TensorSource("test", {}, Tensors(3), "test")
    graph = graph_of(source, lambda b, x: b.scale(x, 0.25))
    compare(reference.compile_graph(graph, source), compiled(graph, source), 3, (1, 3))


def test_every_op_has_a_reference_function_of_all_its_fields():
    for kind, (_, names) in functions.FUNCTIONS.items():
        assert set(names) <= {field.name for field in fields(kind)}, kind
    assert set(lowering.STEPS) <= set(functions.FUNCTIONS)


def test_classes_of_steps_read_every_field_of_their_ops():
    """Functions are refused what they do not take; a class has to do all that its op can ask for."""
    folder = Path(lowering.__file__).parent
    sources = [*folder.glob("*.py"), *folder.parent.glob("*.py")]
    source = "\n".join(path.read_text("utf-8") for path in sources)
    without = {RunningSum, SinkAttention}  # which the reference computes
    for kind in set(functions.FUNCTIONS) - set(lowering.SUPPORT) - set(reference_step.FAST_ENOUGH) - without:
        names = {field.name for field in fields(kind)} - {"prefix", "routing"}  # for messages; what makes the ops one mixture
        assert [name for name in names if not re.search(rf"\.{name}\b|\"{name}\"", source)] == [], kind


def test_ops_that_numpy_is_fast_enough_for_have_no_step():
    assert not set(reference_step.FAST_ENOUGH) & set(lowering.STEPS)
