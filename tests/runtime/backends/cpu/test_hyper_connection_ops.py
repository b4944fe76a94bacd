"""Ops of several residual streams, as the cpu backend compiles them, against the reference backend."""

from hypothesis import given
from hypothesis import strategies as st
from op_graphs import N_EMBD, few_examples, run_both, seeds, threads

from ggufmill.runtime.graph import activation_ops, hyper_connection_ops


@few_examples
@given(seeds, threads, st.sampled_from([2, 4]), st.booleans())
def test_streams(seed, count, streams, observed_twice):
    def build(b, x):
        def added(op, *shape, **options):
            return b.append(op(b.value(*shape), **options))

        many = added(hyper_connection_ops.ExpandStreams, streams, N_EMBD, x=x, weight=b.weight("expand.weight"), epsilon=1e-5)
        factors = b.linear(x, "mix", streams**2)
        mixed = added(hyper_connection_ops.HyperConnectionMix, streams, N_EMBD, x=many, coefficients=factors)
        options = {"x": mixed, "update": x, "coefficients": b.linear(x, "add", streams), "constants": (1.0,) * streams}
        mixed = added(hyper_connection_ops.HyperConnectionAdd, streams, N_EMBD, **options)
        constants = (0.0, *[0.5] * (streams - 1))
        last = added(
            hyper_connection_ops.HyperConnectionAdd, streams, N_EMBD, x=mixed, update=x, coefficients=None, constants=constants
        )
        first = b.split(b.reshape(last, streams * N_EMBD), *[N_EMBD] * streams)[0]
        merged = added(hyper_connection_ops.MergeStreams, N_EMBD, x=last, weight=b.weight("merge.weight"), epsilon=1e-5)
        return b.add(merged, first) if observed_twice else merged

    stack = (N_EMBD, N_EMBD, streams - 1)
    shapes = {"mix__weight": (N_EMBD, streams**2), "add__weight": (N_EMBD, streams)}
    run_both(build, seed, count, expand__weight=stack, merge__weight=stack, **shapes)


@few_examples
@given(seeds, threads, st.sampled_from([0.0, 1.6, -0.5]), st.booleans())
def test_largest_numbers_and_factors_of_channels(seed, count, factor, used_again):
    rows = 1100  # more than one part has

    def build(b, x):
        inner = b.linear(x, "up", rows)
        kept = b.append(activation_ops.GaussianTopK(b.value(rows), inner, factor))
        out = b.linear(b.add(kept, inner) if used_again else kept, "down", N_EMBD)
        return b.append(activation_ops.Multiply(b.value(N_EMBD), out, b.weight("scale.weight")))

    run_both(build, seed, count, up__weight=(N_EMBD, rows), down__weight=(rows, N_EMBD), scale__weight=(N_EMBD,))


@few_examples
@given(seeds, threads, st.sampled_from([2, 3]))
def test_streams_that_match(seed, count, streams):
    def build(b, x):
        one, other = (b.reshape(b.linear(x, name, streams * N_EMBD), streams, N_EMBD) for name in ("one", "other"))
        gates = b.append(hyper_connection_ops.MatchStreams(b.value(streams), one, other))
        return b.linear(b.reshape(b.gate_heads(one, gates), streams * N_EMBD), "down", N_EMBD)

    shapes = dict.fromkeys(("one__weight", "other__weight"), (N_EMBD, streams * N_EMBD))
    run_both(build, seed, count, down__weight=(streams * N_EMBD, N_EMBD), **shapes)
