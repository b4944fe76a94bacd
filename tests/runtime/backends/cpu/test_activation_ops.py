"""Ops that few models have, as the cpu backend compiles them, against the reference backend."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_graphs import N_EMBD, few_examples, run_both, seeds, threads

from ggufmill.formats import FormatError

N_FF, EXPERTS = 1100, 6  # more numbers than one part has


@few_examples
@given(seeds, threads, st.sampled_from([0.3, -1e-6, -0.4]))
def test_xielu_and_clamp(seed, count, epsilon):
    def build(b, x):
        inner = b.clamp(b.linear(x, "up", N_FF), 1.5)
        return b.linear(b.xielu(inner, 0.8, 0.9, 0.5, epsilon), "down", N_EMBD)

    run_both(build, seed, count, up__weight=(N_EMBD, N_FF), down__weight=(N_FF, N_EMBD))


@few_examples
@given(seeds, threads, st.booleans())
def test_softplus_gate(seed, count, by_head):
    rows = 4 if by_head else N_EMBD

    def build(b, x):
        gate = b.linear(x, "gate", rows)
        return b.reshape(b.softplus_gate(gate, b.reshape(x, 4, N_EMBD // 4)), N_EMBD)

    run_both(build, seed, count, gate__weight=(N_EMBD, rows))


def test_a_gate_fits_heads_or_all_numbers():
    with pytest.raises(FormatError, match="a gate of"):
        run_both(
            lambda b, x: b.softplus_gate(b.linear(x, "gate", 3), b.reshape(x, 4, N_EMBD // 4)), 1, 1, gate__weight=(N_EMBD, 3)
        )


@few_examples
@given(seeds, threads, st.sampled_from([4, 20]))
def test_chunked_attention(seed, count, chunk):
    def build(b, x):
        q, k, v = (b.reshape(b.linear(x, part, N_EMBD), 4, N_EMBD // 4) for part in "qkv")
        out = b.attention(b.plain_norm(q, 1e-5), k, v, 0, 0.7, window=chunk, chunked=True)
        return b.linear(out, "o", N_EMBD)

    run_both(build, seed, count, **{f"{part}__weight": (N_EMBD, N_EMBD) for part in "qkvo"})


@few_examples
@given(seeds, threads, st.sampled_from([1, 2, 6]), st.booleans(), st.sampled_from(["sigmoid", "sparse_mixer"]))
def test_weights_on_inputs_and_sparse_mixer(seed, count, used, shared, gating):
    """Experts whose inputs are weighed."""

    def build(b, x):
        routing = b.route(b.linear(x, "router", EXPERTS), used, gating=gating, jitter=0.3)
        scaled = b.scale_by_routing(x, routing)
        gate, up = (b.expert_linear(scaled, routing, part, 24, EXPERTS) for part in ("gate", "up"))
        out = b.combine(b.expert_linear(b.gated(gate, up, "silu"), routing, "down", N_EMBD, EXPERTS), routing, weighted=False)
        return b.add(b.linear(x, "shared", N_EMBD), out) if shared else out

    shapes = {"gate__weight": (N_EMBD, 24, EXPERTS), "up__weight": (N_EMBD, 24, EXPERTS), "router__weight": (N_EMBD, EXPERTS)}
    run_both(build, seed, count, **shapes, down__weight=(24, N_EMBD, EXPERTS), shared__weight=(N_EMBD, N_EMBD))
