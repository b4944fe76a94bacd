"""Ops with a recurrent state: cpu against reference; the same bits however tokens come in passes; going back, copies."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_graphs import N_EMBD, VOCABULARY, Tensors, compiled, few_examples, graph_of, run_both, seeds, threads

from ggufmill.formats import FormatError, TensorSource


def convolution(b, x, channels=24, layer=0):
    y = b.linear(x, "up", channels)
    return b.add(x, b.linear(b.short_convolution(y, "conv", layer), "down", N_EMBD))


def convolution_shapes(channels=24, kernel=4):
    return {"up__weight": (N_EMBD, channels), "conv__weight": (kernel, channels), "down__weight": (channels, N_EMBD)}


def delta(b, x, heads=4, key_heads=2, k_width=8, v_width=8, tiled=False, layer=0, prefix="ssm_"):
    q, k = (b.reshape(b.linear(x, name, key_heads * k_width), key_heads, k_width) for name in ("q", "k"))
    v = b.reshape(b.linear(x, "v", heads * v_width), heads, v_width)
    alpha, beta = (b.linear(x, name, heads) for name in ("alpha", "beta"))
    return b.add(x, b.linear(b.gated_delta_rule(q, k, v, alpha, beta, layer, prefix, tiled=tiled), "o", N_EMBD))


def delta_shapes(heads=4, key_heads=2, k_width=8, v_width=8):
    keys, values = key_heads * k_width, heads * v_width
    shapes = {"q__weight": (N_EMBD, keys), "k__weight": (N_EMBD, keys), "v__weight": (N_EMBD, values)}
    shapes |= {"alpha__weight": (N_EMBD, heads), "beta__weight": (N_EMBD, heads), "o__weight": (values, N_EMBD)}
    return shapes | {"ssm_a": (heads,), "ssm_dt__bias": (heads,)}


def row_delta(b, x, heads=4, width=8, layer=0):
    """As `delta`, with a decay for each row of a head's matrix."""
    q, k, v = (b.reshape(b.linear(x, name, heads * width), heads, width) for name in ("q", "k", "v"))
    alpha, beta = b.reshape(b.linear(x, "alpha", heads * width), heads, width), b.linear(x, "beta", heads)
    return b.add(x, b.linear(b.gated_delta_rule(q, k, v, alpha, beta, layer, "ssm_", tiled=False), "o", N_EMBD))


def row_delta_shapes(heads=4, width=8):
    shapes = delta_shapes(heads, heads, width, width) | {"alpha__weight": (N_EMBD, heads * width)}
    return shapes | {"ssm_a": (1, heads), "ssm_dt__bias": (heads * width,)}


def scan(b, x, heads=4, width=8, groups=2, size=6, layer=0):
    """A layer of Mamba-2 without its convolution."""
    parts = b.split(b.linear(x, "xbc", heads * width + 2 * groups * size), heads * width, groups * size, groups * size)
    value, factors = b.reshape(parts[0], heads, width), [b.reshape(part, groups, size) for part in parts[1:]]
    return b.add(x, b.linear(b.selective_scan(value, b.linear(x, "step", heads), *factors, layer, "ssm_"), "o", N_EMBD))


def scan_shapes(heads=4, width=8, groups=2, size=6):
    shapes = {"xbc__weight": (N_EMBD, heads * width + 2 * groups * size), "step__weight": (N_EMBD, heads)}
    shapes |= {"ssm_a": (1, heads), "ssm_d": (1, heads), "ssm_dt__bias": (heads,), "o__weight": (heads * width, N_EMBD)}
    return shapes


def element_scan(b, x, width=24, size=6, layer=0):
    """A layer of Mamba without its convolution."""
    value, step = (b.reshape(b.linear(x, name, width), 1, width) for name in ("x", "step"))
    factors = [b.reshape(b.linear(x, name, size), 1, size) for name in ("b", "c")]
    return b.add(x, b.linear(b.selective_scan(value, step, *factors, layer, "ssm_"), "o", N_EMBD))


def element_scan_shapes(width=24, size=6):
    shapes = {name: (N_EMBD, rows) for name, rows in zip("xbc", (width, size, size), strict=True)} | {"step": (N_EMBD, width)}
    shapes = {f"{name}__weight": shape for name, shape in shapes.items()} | {"o__weight": (width, N_EMBD)}
    return shapes | {"ssm_a": (size, width), "ssm_d": (width,)}


def source_of(seed=0, **shapes):
    """Random tensors; factors of decay are negative, as those of a model."""
    tensors = Tensors(seed, **shapes)
    if "ssm_a" in tensors:
        decay = tensors["ssm_a"]
        tensors["ssm_a"] = dataclasses.replace(decay, read=lambda start, stop: -np.abs(decay.read(start, stop)))
    return TensorSource("test", {}, tensors, "test")


@few_examples
@given(seeds, threads, st.sampled_from([(24, 4), (5, 2), (300, 3), (600, 4), (16, 1)]))
def test_short_convolution(seed, count, sizes):
    run_both(lambda b, x: convolution(b, x, sizes[0]), seed, count, counts=(2, 1, 1, 5, 40), **convolution_shapes(*sizes))


@few_examples
@given(
    seeds,
    threads,
    st.sampled_from([(4, 2, 8, 8), (2, 2, 16, 16), (6, 2, 12, 20), (4, 1, 32, 64), (2, 1, 16, 100), (3, 3, 5, 1)]),
    st.booleans(),
)
def test_gated_delta_rule(seed, count, sizes, tiled):
    source = source_of(seed, **delta_shapes(*sizes))
    run_both(lambda b, x: delta(b, x, *sizes, tiled=tiled), seed, count, source=source)


@few_examples
@given(seeds, threads, st.sampled_from([(24, 4), (5, 2), (300, 3)]), st.sampled_from(["silu", "none"]))
def test_short_convolution_with_biases(seed, count, sizes, activation):
    def build(b, x):
        y = b.short_convolution(b.linear(x, "up", sizes[0]), "conv", 0, activation, state="other")
        return b.add(x, b.linear(y, "down", N_EMBD))

    run_both(build, seed, count, **convolution_shapes(*sizes), conv__bias=(sizes[0],))


@few_examples
@given(seeds, threads, st.sampled_from([(4, 8), (2, 16), (1, 64), (2, 100), (3, 5)]))
def test_delta_rule_with_a_decay_for_each_row(seed, count, sizes):
    source = source_of(seed, **row_delta_shapes(*sizes))
    run_both(lambda b, x: row_delta(b, x, *sizes), seed, count, source=source)


@few_examples
@given(
    seeds,
    threads,
    st.sampled_from([(4, 8, 2, 6), (2, 16, 1, 16), (6, 20, 3, 8), (1, 64, 1, 5), (2, 100, 2, 128), (3, 1, 1, 1)]),
)
def test_selective_scan_with_a_factor_for_each_head(seed, count, sizes):
    source = source_of(seed, **scan_shapes(*sizes))
    run_both(lambda b, x: scan(b, x, *sizes), seed, count, source=source)


@few_examples
@given(seeds, threads, st.sampled_from([(24, 6), (16, 16), (100, 3), (200, 8), (1, 1), (64, 17)]))
def test_selective_scan_with_a_factor_for_each_element(seed, count, sizes):
    source = source_of(seed, **element_scan_shapes(*sizes))
    run_both(lambda b, x: element_scan(b, x, *sizes), seed, count, source=source)


@pytest.mark.parametrize("decay", [1e-3, 1, 300])
@pytest.mark.parametrize(
    ("build", "shapes"),
    [(delta, delta_shapes()), (row_delta, row_delta_shapes()), (scan, scan_shapes()), (element_scan, element_scan_shapes())],
)
def test_prompts_of_several_chunks(build, shapes, decay):
    """With decays near one and near zero, of which a chunk has long products."""
    source = source_of(3, **shapes)
    factor = source.tensors["ssm_a"]
    scaled = dataclasses.replace(factor, read=lambda start, stop: decay * factor.read(start, stop))
    run_both(
        build, 3, 2, counts=(150, 1, 20), source=dataclasses.replace(source, tensors=dict(source.tensors) | {"ssm_a": scaled})
    )


GRAPHS = {
    "delta": (
        lambda b, x: delta(b, convolution(b, x), layer=1, v_width=72, tiled=True),
        convolution_shapes() | delta_shapes(v_width=72),
    ),
    "delta by rows": (lambda b, x: row_delta(b, x, 2, 72), row_delta_shapes(2, 72)),
    "scan": (lambda b, x: scan(b, x, 4, 72), scan_shapes(4, 72)),
    "scan by elements": (lambda b, x: element_scan(b, x, 200, 7), element_scan_shapes(200, 7)),
}


@pytest.fixture(scope="module", params=GRAPHS)
def executable(request):
    build, shapes = GRAPHS[request.param]
    source = source_of(3, **shapes)
    return compiled(graph_of(source, build), source, exact=True, threads=2)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(4).integers(0, VOCABULARY, 60)


def run(executable, cache, tokens, *counts):
    """The hidden states of tokens in passes of these counts."""
    ends = np.cumsum(counts)
    return np.concatenate([executable.hidden(part, [(cache, len(part))]) for part in np.split(tokens[: ends[-1]], ends[:-1])])


def test_states_have_the_same_bits_however_tokens_come_in_passes(executable, tokens):
    """Products of many tokens are GEMM, of few GEMV: what is before the state differs, so all passes here are GEMM."""
    cache = executable.new_cache(60)
    expected = run(executable, cache, tokens, 60)
    for counts in ((20, 40), (31, 29), (15, 15, 15, 15)):
        other = executable.new_cache(60)
        assert np.array_equal(run(executable, other, tokens, *counts), expected)
        assert np.array_equal(other.state.current.memory, cache.state.current.memory)


def test_sequences_of_one_pass_do_not_see_each_other(executable, tokens):
    parts = (tokens[:7], tokens[7:8], tokens[8:50])
    alone = [run(executable, executable.new_cache(60), part, len(part)) for part in parts]
    caches = [executable.new_cache(60) for _ in parts]
    together = executable.hidden(np.concatenate(parts), [(c, len(p)) for c, p in zip(caches, parts, strict=True)])
    for i, (cache, part) in enumerate(zip(caches, parts, strict=True)):
        rows = slice(sum(map(len, parts[:i])), sum(map(len, parts[: i + 1])))
        assert np.abs(together[rows] - alone[i]).max() < 1e-5
        assert cache.length == len(part)


def test_a_sequence_can_go_back_and_be_copied(executable, tokens):
    cache = executable.new_cache(60)
    run(executable, cache, tokens, 20)
    cache.checkpoint()
    full = run(executable, cache, tokens[20:], 5, 15)
    cache.truncate(30)  # the state before the last pass, of 25 tokens
    assert cache.length == 25
    fork = cache.fork(22)
    assert fork.length == 20
    assert np.array_equal(run(executable, fork, tokens[20:], 5, 15), full)
    assert np.array_equal(run(executable, cache, tokens[25:], 15), full[5:])
    cache.truncate(3)
    assert cache.length == 0
    assert np.abs(run(executable, cache, tokens, 40)[20:] - full).max() < 1e-5


def test_a_pass_that_fails_leaves_the_state(executable, tokens, monkeypatch):
    cache = executable.new_cache(60)
    run(executable, cache, tokens, 20)
    expected = run(executable, cache.fork(), tokens[20:], 16)
    monkeypatch.setattr(type(cache), "commit", lambda self, n: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(executable, cache, tokens, 16)
    monkeypatch.undo()
    assert np.array_equal(run(executable, cache, tokens[20:], 16), expected)


def test_values_that_cannot_share_keys_are_refused():
    source = source_of(0, **delta_shapes(heads=3))
    with pytest.raises(FormatError, match="do not fit together in the delta rule"):
        graph_of(source, lambda b, x: delta(b, x, heads=3))
