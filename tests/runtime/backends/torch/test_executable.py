"""The torch backend beside the others: caches of every type and form, observers, going back, copies, reduced experts."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoint_cases import convert_case
from op_graphs import DEVICE, VOCABULARY, Everything, Tensors, close, compiled, graph_of, on_device

from ggufmill.formats import MillError, TensorSource
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.graph import Observer
from ggufmill.runtime.graph.ops import Route
from ggufmill.runtime.settings import CACHE_TYPES

pytestmark = pytest.mark.oracle

ROUNDING = 1e-4
# No choice that a rounded cache could turn: two experts may be as good as equal.
EVERY_EXPERT = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
HALF = {"override_tensor": ("ffn_down=CPU",), "gpu_layers": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Case -> (tokens, logits of transformers, path)."""
    folder = tmp_path_factory.mktemp("models")
    models = {case: convert_case(case, folder / case) for case in ("llama", "v3", "qwen35", "qwen3moe")}
    return models | {"v3, every expert": convert_case("v3", folder / "every", EVERY_EXPERT)}


@pytest.mark.parametrize("name", CACHE_TYPES)
@pytest.mark.parametrize("case", ["llama", "v3, every expert"])
def test_cache_types_hold_the_numbers_of_the_cpu_backend(models, case, name):
    tokens, _, path = models[case]
    options = {"exact": True, "cache_k": name, "cache_v": name, "threads": 1}
    try:
        expected = load_model(path, **options).logits(tokens)
    except MillError as error:
        with pytest.raises(type(error)):
            load_model(path, device=DEVICE, **options)
        return
    model = load_model(path, device=DEVICE, **options)
    session = model.session()
    found = [session.feed(part) for part in np.split(tokens, [30, 31, 60])]
    assert session.cache.types.split(" ")[0] == name
    # A number at the edge of a step of the type may be rounded the other way.
    assert np.abs(found - expected[[29, 30, 59, len(tokens) - 1]]).max() < (ROUNDING if name == "f32" else 0.05)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_latent_attention_in_every_form(models, mla):
    tokens, expected, path = models["v3"]
    model = load_model(path, device=DEVICE, mla=mla, exact=True, attention_bytes=4096)
    session = model.session()
    assert np.abs(session.feed(tokens[:40]) - expected[39]).max() < ROUNDING
    assert np.abs(session.feed(tokens[40:41]) - expected[40]).max() < ROUNDING
    assert {name for layer in session.cache.layers.values() for name in layer.rows} == (
        {"k", "v"} if mla == 0 else {"kv", "v"} if mla == 1 else {"kv"}
    )


@pytest.mark.parametrize("case", ["llama", "v3", "qwen35", "qwen3moe"])
@pytest.mark.parametrize("rules", [{}, HALF, {"cpu_moe": True}], ids=["all", "half", "experts"])
def test_observers_are_told_the_same(models, case, rules):
    tokens, _, path = models[case]
    seen = []
    for options in ({}, {"device": DEVICE, **rules}):
        model = load_model(path, exact=True, threads=1, **options)
        model.observer = Everything()
        model.logits(tokens)
        seen.append(model.observer)
    expected, found = seen
    assert found.inputs.keys() == expected.inputs.keys()
    for key, x in expected.inputs.items():
        assert np.abs(found.inputs[key] - x).max() <= 1e-4 * max(1, np.abs(x).max()), key
    assert found.outputs.keys() == expected.outputs.keys()
    for key, (kind, x) in expected.outputs.items():
        assert found.outputs[key][0] == kind
        assert np.abs(found.outputs[key][1].reshape(x.shape) - x).max() <= 1e-4 * max(1, np.abs(x).max())


@pytest.mark.parametrize("rules", [{}, HALF], ids=["all", "half"])
@pytest.mark.parametrize("case", ["llama", "qwen35"])
def test_sessions_go_back_and_are_copied(models, case, rules):
    tokens, expected, path = models[case]
    model = load_model(path, device=DEVICE, exact=True, threads=1, **rules)
    session = model.session()
    session.feed(tokens[:40])
    for i in range(40, 50):
        session.feed(tokens[i : i + 1])
    forks = [session.fork(), session.fork(45), session.fork(40), session.fork(0)]
    for length in (49, 40, 13, 0):
        session.rewind(length)
        assert np.abs(session.feed(tokens[length : length + 1]) - expected[length]).max() < ROUNDING
        assert np.abs(session.feed(tokens[length + 1 : 52]) - expected[51]).max() < ROUNDING
    for fork, length in zip(forks, (50, 45, 40, 0), strict=True):
        assert len(fork.tokens) == length
        assert np.abs(fork.feed(tokens[length : length + 3]) - expected[length + 2]).max() < ROUNDING


def test_a_pass_that_fails_changes_nothing(models):
    tokens, expected, path = models["qwen35"]
    model = load_model(path, device=DEVICE, exact=True, threads=1, **HALF)
    session = model.session()
    session.feed(tokens[:20])
    calls = itertools.count()

    class Fails(Observer):
        def wants_output(self, op):
            return True

        def on_output(self, op, out):
            if next(calls) == 60:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.observing(Fails()):
        session.feed(tokens[20:23])
    assert session.cache.length == len(session.tokens) == 20
    assert np.abs(session.feed(tokens[20:25]) - expected[24]).max() < ROUNDING


def test_the_context_ends(models):
    model = load_model(models["llama"][2], device=DEVICE)
    session = model.session(8)
    session.feed([1] * 8)
    with pytest.raises(MillError, match="the context is full: it holds 8 tokens"):
        session.feed([1])


@pytest.mark.parametrize("reduction", [(1, 0.5), (1, 1.0), (2, 0.9)])
@pytest.mark.parametrize("rules", [{}, {"n_cpu_moe": 1}], ids=["all", "half"])
def test_fewer_experts(models, reduction, rules):
    tokens, exact, path = models["qwen3moe"]
    options = {"exact": True, "expert_reduction": reduction, "threads": 1}
    expected = load_model(path, **options).logits(tokens)
    assert reduction == (2, 0.9) or np.abs(expected - exact).max() > 0.01
    assert np.abs(load_model(path, device=DEVICE, **options, **rules).logits(tokens) - expected).max() < ROUNDING


def test_every_op_is_known():
    from ggufmill.runtime.backends.reference.functions import SUPPORT as expected
    from ggufmill.runtime.backends.torch.functions import SUPPORT
    from ggufmill.runtime.graph.sink_attention_ops import SinkAttention

    assert {op: fields for op, fields in expected.items() if op is not SinkAttention} == SUPPORT  # which the reference computes


def test_selections_over_several_sequences_are_those_of_the_reference():
    def build(b, x):
        def rows(name, heads, width):
            return b.reshape(b.linear(x, name, heads * width), heads, width)

        k = b.linear(x, "ik", 8)
        chosen = b.select_blocks(rows("iq", 2, 8), k, 0, block=4, top_k=3, local=1)
        out = b.attention(rows("q", 4, 8), rows("k", 2, 8), rows("v", 2, 8), 0, 0.5, selection=chosen, block=4)
        return b.add(x, b.linear(out, "o", 32))

    shapes = {"ik__weight": (32, 8), "iq__weight": (32, 16), "q__weight": (32, 32), "k__weight": (32, 16)}
    source = TensorSource("test", {}, Tensors(1, **shapes, v__weight=(32, 16), o__weight=(32, 32)), "test")
    graph = graph_of(source, build)
    both = reference.compile_graph(graph, source), on_device(graph, source, exact=True, attention_bytes=3000)
    caches = [[executable.new_cache(99) for _ in range(2)] for executable in both]
    draw = np.random.default_rng(5)
    for counts in ((7, 30), (1, 1), (25, 3), (2, 2)):
        tokens = draw.integers(0, VOCABULARY, sum(counts))
        expected, found = (e.hidden(tokens, list(zip(own, counts, strict=True))) for e, own in zip(both, caches, strict=True))
        close(found, expected)
    assert compiled(graph, source).graph is graph


def test_routes_are_op_outputs(models):
    """What an observer sees of a router are the weights."""
    tokens, _, path = models["qwen3moe"]
    model = load_model(path, device=DEVICE, exact=True)
    model.observer = Everything()
    model.logits(tokens)
    route = next(op for op in model.graph.ops if isinstance(op, Route))
    assert model.observer.outputs[route.out.index][1].shape == (len(tokens), route.used)
