"""Options of mixtures of experts and gates as the cpu backend compiles them, against the reference backend."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_graphs import N_EMBD, VOCABULARY, Tensors, compiled, few_examples, graph_of, run_both, seeds, threads

from ggufmill.formats import FormatError, SourceTensor, TensorSource

EXPERTS, ROWS = 6, 24
SHAPES = {
    "router__weight": (N_EMBD, EXPERTS),
    "down__weight": (ROWS, N_EMBD, EXPERTS),
    "both__weight": (N_EMBD, 2 * ROWS, EXPERTS),
}


def experts(b, x, used, function="silu", limit=0.0, **options):
    """Gate and up of each expert in one tensor."""
    routing = b.route(b.linear(x, "router", EXPERTS), used, **options)
    gate, up = b.split(b.expert_linear(x, routing, "both", 2 * ROWS, EXPERTS), ROWS, ROWS)
    inner = b.gated(gate, up, function, limit)
    return b.add(x, b.combine(b.expert_linear(inner, routing, "down", N_EMBD, EXPERTS), routing))


@few_examples
@given(
    seeds,
    threads,
    st.sampled_from([1, 2, 6]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"]),
    st.sampled_from([("silu", 0.0), ("silu", 0.3), ("clamped_silu", 0.2)]),
)
def test_routing_and_limits(seed, count, used, weighted, biased, gating, activation):
    shapes = SHAPES | ({"factors__scale": (EXPERTS,)} if weighted else {}) | ({"choice__bias": (EXPERTS,)} if biased else {})

    def build(b, x):
        options = {"gating": gating, "bias": b.optional("choice.bias", (EXPERTS,)), "normalise": weighted, "scale": 1.5}
        return experts(b, x, used, *activation, factors=b.optional("factors.scale", (EXPERTS,)), **options)

    run_both(build, seed, count, **shapes)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("used", [1, 3])
def test_experts_by_token(used, normalise):
    tensors = Tensors(used, **SHAPES)
    table = (
        np.random.default_rng(used).permuted(np.tile(np.arange(EXPERTS), (VOCABULARY, 1)), axis=1)[:, :used].astype(np.float32)
    )
    table = np.ascontiguousarray(table)
    tensors["table.weight"] = SourceTensor("table.weight", (used, VOCABULARY), "f32", lambda start, stop: table[start:stop])

    def build(b, x):
        by_token = b.weight("table.weight", (used, VOCABULARY))
        return experts(b, x, used, gating="sqrt_softplus", normalise=normalise, scale=1.5, by_token=by_token)

    source = TensorSource("test", {}, tensors, "test")
    run_both(build, used, 2, source=source)
    table[5, 0] = EXPERTS
    model = compiled(graph_of(source, build), source, threads=1)
    with pytest.raises(FormatError, match="table.weight: a token has an expert that there is not"):
        model.hidden(np.array([5]), [(model.new_cache(1), 1)])


@few_examples
@given(seeds, threads, st.sampled_from([(4, 8), (8, 4), (2, 16)]))
def test_gates_of_heads(seed, count, shape):
    heads, width = shape

    def build(b, x):
        gated = b.gate_heads(b.reshape(b.linear(x, "w", N_EMBD), heads, width), b.linear(x, "g", heads))
        return b.add(x, b.linear(gated, "w", N_EMBD))

    run_both(build, seed, count, w__weight=(N_EMBD, N_EMBD), g__weight=(N_EMBD, heads))
