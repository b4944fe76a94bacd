"""Every op as the cpu backend compiles it against the reference backend: shapes, options, numbers of tokens, threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_graphs import (
    COUNTS,
    N_EMBD,
    VOCABULARY,
    Everything,
    Tensors,
    as_stored,
    close,
    compiled,
    few_examples,
    graph_of,
    run_both,
    seeds,
    threads,
)

from ggufmill.formats import PlanError, SourceTensor, TensorSource
from ggufmill.runtime.backends import reference
from ggufmill.runtime.backends.cpu.pass_program import PassProgram
from ggufmill.runtime.graph import ops
from ggufmill.runtime.graph.values import RotaryEmbedding

FUNCTIONS = ["silu", "gelu", "gelu_erf", "sigmoid", "squared_relu", "clamped_swish"]


@few_examples
@given(seeds, threads, st.sampled_from([8, 33, 96]), st.booleans())
def test_linear(seed, count, rows, biased):
    shapes = {"a__weight": (N_EMBD, rows), "b__weight": (rows, N_EMBD)} | ({"a__bias": (rows,)} if biased else {})
    run_both(lambda b, x: b.linear(b.linear(x, "a", rows), "b", N_EMBD), seed, count, **shapes)


@few_examples
@given(seeds, threads)
def test_embeddings_by_position_and_segment(seed, count):
    def build(b, x):
        positions, segment = b.embedding("positions", N_EMBD, 0.5, by="position"), b.embedding("types", N_EMBD, by="segment")
        of_pairs = b.embedding("types", N_EMBD, by="segment", separator=7)
        return b.add(b.add(b.add(x, positions), segment), of_pairs)

    run_both(build, seed, count, positions__weight=(N_EMBD, 60), types__weight=(N_EMBD, 2))


@few_examples
@given(seeds, threads, st.sampled_from(["rms", "layer"]), st.sampled_from(["row", "heads", "own", "all"]), st.booleans())
def test_norms(seed, count, kind, over, biased):
    shape = {"row": (N_EMBD,), "heads": (8,), "own": (8, 4), "all": (N_EMBD,)}[over]
    shapes = {"n__weight": shape} | ({"n__bias": shape} if biased and kind == "layer" else {})

    def build(b, x):
        value = x if over == "row" else b.reshape(x, 4, 8)
        return b.reshape(b.norm(value, "n", 1e-3, kind=kind), N_EMBD)

    run_both(build, seed, count, **shapes)


@few_examples
@given(seeds, threads, st.booleans(), st.sampled_from([(4, 0), (8, 0), (4, 2)]), st.booleans())
def test_rope(seed, count, interleaved, part, used_again):
    dims, start = part
    rope = RotaryEmbedding(np.random.default_rng(seed).random(dims // 2), 1.25, interleaved)

    def build(b, x):
        rotated = b.reshape(b.rope(b.reshape(x, 4, 8), rope, start), N_EMBD)
        return b.add(rotated, x) if used_again else rotated

    run_both(build, seed, count)


@few_examples
@given(seeds, threads, st.sampled_from(FUNCTIONS), st.booleans())
def test_activations(seed, count, function, gated):
    rows = 1100  # more than one part has

    def build(b, x):
        gate = b.linear(x, "gate", rows)
        if gated and function != "squared_relu":
            y = b.gated(gate, b.linear(x, "up", rows), function, 0.5 if function == "clamped_swish" else 0.0)
        else:
            y = b.activation(gate, function if function not in ("sigmoid", "clamped_swish") else "gelu")
        return b.linear(y, "down", N_EMBD)

    shapes = {"gate__weight": (N_EMBD, rows), "up__weight": (N_EMBD, rows), "down__weight": (rows, N_EMBD)}
    run_both(build, seed, count, gate__bias=(rows,), **shapes)


@few_examples
@given(seeds, threads, st.sampled_from([1.0, 0.3]))
def test_sums_factors_and_caps(seed, count, factor):
    def build(b, x):
        y = b.scale(b.linear(x, "w", N_EMBD), 3.0)
        z = b.add(b.clamp(x, 0.4), b.softcap(y, 2.0), factor)
        return b.sigmoid_gate(x, b.add(z, z), "g")

    run_both(build, seed, count, w__weight=(N_EMBD, N_EMBD), g__weight=(N_EMBD,))


@few_examples
@given(seeds, threads)
def test_parts_of_a_product_go_different_ways(seed, count):
    def build(b, x):
        first, second, third = b.split(b.linear(x, "w", 3 * N_EMBD), N_EMBD, 24, 40)
        joined = b.linear(b.split(b.norm(third, "n", 1e-5), 24, 16)[0], "v", N_EMBD)
        return b.add(b.add(first, joined), b.linear(second, "v", N_EMBD))

    run_both(build, seed, count, w__weight=(N_EMBD, 3 * N_EMBD), n__weight=(40,), v__weight=(24, N_EMBD))


@pytest.mark.parametrize("n", [1, 3])
def test_products_of_a_part_of_each_head(n):
    """By GEMV, of float32: the copy without gaps, which the second product reads too, is not memory of the second's result."""

    def build(b, x):
        part = b.split(b.reshape(b.linear(x, "w", 64), 4, 16), 12, 4)[0]
        return b.add(b.linear(part, "a", N_EMBD), b.linear(part, "b", N_EMBD))

    tensors = Tensors(5, w__weight=(N_EMBD, 64), a__weight=(48, N_EMBD), b__weight=(48, N_EMBD))
    source, tokens = TensorSource("test", {}, as_stored(tensors), "test"), np.arange(n)
    graph = graph_of(source, build)
    ours, oracle = compiled(graph, source, exact=True), reference.compile_graph(graph, source)
    found = ours.hidden(tokens, [(ours.new_cache(n), n)], generated=True)
    close(found, oracle.hidden(tokens, [(oracle.new_cache(n), n)]))


@pytest.mark.parametrize("count", [1, 2])
def test_gates_of_parts_of_a_product_are_where_the_next_product_reads_them(count, monkeypatch):
    """The bits are those of two products, and nothing is copied."""
    rows, tokens, found = 1536, np.arange(40), []
    tensors = Tensors(5, joint__weight=(N_EMBD, 2 * rows), down__weight=(rows, N_EMBD))
    both = tensors["joint.weight"].read(0, 2 * rows)
    for name, part in (("gate.weight", both[:rows]), ("up.weight", both[rows:])):
        tensors[name] = SourceTensor(name, (N_EMBD, rows), "f32", lambda start, stop, part=part: part[start:stop])
    source = TensorSource("test", {}, as_stored(tensors), "test")

    def joint(b, x):
        return b.linear(b.gated(*b.split(b.linear(x, "joint", 2 * rows), rows, rows), "silu"), "down", N_EMBD)

    def apart(b, x):
        return b.linear(b.gated(b.linear(x, "gate", rows), b.linear(x, "up", rows), "silu"), "down", N_EMBD)

    monkeypatch.setattr(PassProgram, "copied", None)
    for build in (joint, apart):
        executable = compiled(graph_of(source, build), source, threads=count, exact=True)
        found.append(executable.hidden(tokens, [(executable.new_cache(len(tokens)), len(tokens))]))
    assert np.array_equal(*found)


@few_examples
@given(
    seeds,
    threads,
    st.sampled_from([(4, 4, 8, 8), (4, 2, 8, 8), (6, 2, 12, 20), (8, 1, 16, 16)]),
    st.sampled_from([0, 3]),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
)
def test_attention(seed, count, heads, window, softcap, sinks):
    run_attention(seed, count, heads, sinks, window=window, softcap=softcap)


@few_examples
@given(seeds, threads, st.sampled_from([(4, 4, 8, 8), (6, 2, 12, 20)]), st.sampled_from([0, 7]), st.booleans())
def test_attention_with_linear_biases(seed, count, heads, window, sinks):
    run_attention(seed, count, heads, sinks, window=window, alibi=8.0)


@few_examples
@given(
    seeds, threads, st.sampled_from([(4, 4, 8, 8), (6, 2, 12, 20)]), st.sampled_from([0, 7, 40]), st.sampled_from([0.0, 8.0])
)
def test_attention_to_later_tokens(seed, count, heads, window, alibi):
    run_attention(seed, count, heads, False, window=window, alibi=alibi, causal=False)


def run_attention(seed, count, heads, sinks, **options):
    """Both backends on attention with these options of `ops.Attention`; without `causal` over one pass of 200 tokens."""
    n, n_kv, k_width, v_width = heads
    rope = RotaryEmbedding(1.0 / np.arange(1, k_width // 2 + 1))

    def build(b, x):
        q = b.rope(b.reshape(b.linear(x, "q", n * k_width), n, k_width), rope)
        k = b.rope(b.reshape(b.linear(x, "k", n_kv * k_width), n_kv, k_width), rope)
        v = b.reshape(b.linear(x, "v", n_kv * v_width), n_kv, v_width)
        sink = b.optional("sinks.weight", (n,))
        out = b.attention(q, k, v, 0, 0.7, sinks=sink, **options)
        return b.add(x, b.linear(out, "o", N_EMBD))

    shapes = {"q__weight": (N_EMBD, n * k_width), "k__weight": (N_EMBD, n_kv * k_width), "v__weight": (N_EMBD, n_kv * v_width)}
    shapes |= {"o__weight": (n * v_width, N_EMBD)} | ({"sinks__weight": (n,)} if sinks else {})
    run_both(build, seed, count, counts=COUNTS if options.get("causal", True) else (200,), **shapes)


@few_examples
@given(seeds, threads, st.booleans())
def test_layers_whose_caches_differ(seed, count, flash):
    layers = [(4, 2, 8, 8), (2, 1, 24, 12), (4, 4, 8, 20)]  # heads, key heads, widths of keys and values
    shapes = {}
    for layer, (n, n_kv, k_width, v_width) in enumerate(layers):
        rows = {"q": n * k_width, "k": n_kv * k_width, "v": n_kv * v_width}
        shapes |= {f"{part}{layer}__weight": (N_EMBD, size) for part, size in rows.items()}
        shapes[f"o{layer}__weight"] = (n * v_width, N_EMBD)

    def build(b, x):
        for layer, (n, n_kv, k_width, v_width) in enumerate(layers):
            q = b.reshape(b.linear(x, f"q{layer}", n * k_width), n, k_width)
            k = b.reshape(b.linear(x, f"k{layer}", n_kv * k_width), n_kv, k_width)
            v = b.reshape(b.linear(x, f"v{layer}", n_kv * v_width), n_kv, v_width)
            x = b.add(x, b.linear(b.attention(q, k, v, layer, 0.7), f"o{layer}", N_EMBD))
        return x

    run_both(build, seed, count, flash=flash, **shapes)


def latent_shapes(layout, heads=4, nope=12, rope=8, rank=20, v=10):
    shapes = {"q__weight": (N_EMBD, heads * (nope + rope)), "kv_a__weight": (N_EMBD, rank + rope), "n__weight": (rank,)}
    shapes |= {"o__weight": (heads * v, N_EMBD)}
    if layout != "heads":
        shapes["a_kv_b__weight"] = (rank, heads * (nope + v))
    if layout == "heads":
        shapes |= {"a_k_b__weight": (nope, rank, heads), "a_v_b__weight": (rank, v, heads)}
    return shapes


def latent_graph(b, x, heads=4, nope=12, rope_dims=8, rank=20, v=10):
    rope = RotaryEmbedding(1.0 / np.arange(1, rope_dims // 2 + 1), interleaved=True)
    q = b.rope(b.reshape(b.linear(x, "q", heads * (nope + rope_dims)), heads, nope + rope_dims), rope, nope)
    latent, k_pe = b.split(b.linear(x, "kv_a", rank + rope_dims), rank, rope_dims)
    out = b.latent_attention(q, b.norm(latent, "n", 1e-5), b.rope(k_pe, rope), 0, 0.3, v, "a_")
    return b.add(x, b.linear(out, "o", N_EMBD))


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("layout", ["joined", "heads"])
def test_latent_attention(mla, flash, layout):
    source = TensorSource("test", {}, Tensors(mla, **latent_shapes(layout)), "test")
    graph = graph_of(source, latent_graph)
    oracle = reference.compile_graph(graph, source)
    ours = compiled(graph, source, mla=mla, flash=flash, exact=True, threads=2)
    sequences = [(oracle.new_cache(99), ours.new_cache(99)) for _ in range(2)]
    draw = np.random.default_rng(5)
    for counts in ((7, 5), (1, 1), (1, 3), (20, 1), (2, 2)):
        tokens = draw.integers(0, VOCABULARY, sum(counts))
        expected = oracle.hidden(tokens, [(pair[0], n) for pair, n in zip(sequences, counts, strict=True)])
        close(ours.hidden(tokens, [(pair[1], n) for pair, n in zip(sequences, counts, strict=True)]), expected)


def mixture(b, x, used, shared, function="silu", **options):
    experts, rows = 6, 24
    routing = b.route(b.linear(x, "router", experts), used, bias=b.optional("choice.bias", (experts,)), **options)
    gate, up = (b.expert_linear(x, routing, name, rows, experts) for name in ("gate", "up"))
    out = b.combine(b.expert_linear(b.gated(gate, up, function), routing, "down", N_EMBD, experts), routing)
    if shared:
        out = b.add(b.linear(b.activation(b.linear(x, "s_up", rows), "gelu"), "s_down", N_EMBD), out)
    return b.add(x, out)


def mixture_shapes(biased=False, choice=False):
    shapes = {"router__weight": (N_EMBD, 6), "s_up__weight": (N_EMBD, 24), "s_down__weight": (24, N_EMBD)}
    shapes |= {"gate__weight": (N_EMBD, 24, 6), "up__weight": (N_EMBD, 24, 6), "down__weight": (24, N_EMBD, 6)}
    if biased:
        shapes |= {"gate__bias": (24, 6), "up__bias": (24, 6), "down__bias": (N_EMBD, 6), "router__bias": (6,)}
    return shapes | ({"choice__bias": (6,)} if choice else {})


@few_examples
@given(
    seeds,
    threads,
    st.sampled_from([1, 2, 6]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([("softmax", 1, 1), ("sigmoid", 1, 1), ("sigmoid", 3, 2), ("softmax", 2, 1)]),
    st.booleans(),
)
def test_mixtures_of_experts(seed, count, used, shared, biased, choice, gating, normalise):
    kind, groups, groups_used = gating
    used = min(used, 6 // groups * groups_used)
    options = {"gating": kind, "groups": groups, "groups_used": groups_used, "normalise": normalise, "scale": 1.5}
    run_both(lambda b, x: mixture(b, x, used, shared, **options), seed, count, **mixture_shapes(biased, choice))


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_observers_are_told_the_same_by_both_backends(n, mla):
    shapes = latent_shapes("joined") | mixture_shapes(biased=True)
    source = TensorSource("test", {}, Tensors(3, **shapes), "test")
    graph = graph_of(source, lambda b, x: mixture(b, latent_graph(b, x), 2, True))
    seen = []
    for executable in (reference.compile_graph(graph, source), compiled(graph, source, mla=mla, exact=True, threads=2)):
        executable.observer = Everything()
        tokens = np.arange(n) % VOCABULARY
        executable.logits(executable.hidden(tokens, [(executable.new_cache(n), n)]))
        seen.append(executable.observer)
    expected, found = seen
    assert found.inputs.keys() == expected.inputs.keys()
    for key, x in expected.inputs.items():
        close(found.inputs[key], x)
    # A sum that the experts' results are added to is no op of its own, unless somebody wants to see it.
    assert found.outputs.keys() == expected.outputs.keys()
    for key, (kind, x) in expected.outputs.items():
        assert found.outputs[key][0] == kind
        close(found.outputs[key][1].reshape(x.shape), x)


def test_what_is_not_known_is_named():
    source = TensorSource("test", {}, Tensors(0), "test")

    def unknown(b, x):
        return b.append(ops.Activation(b.value(N_EMBD), x, "cube"))

    with pytest.raises(PlanError, match=r"the cpu backend cannot run test: op Activation with function 'cube'"):
        compiled(graph_of(source, unknown), source)


def test_experts_cannot_be_reduced_without_any():
    source = TensorSource("test model", {}, Tensors(0), "test")
    with pytest.raises(PlanError, match="test model has no experts"):
        compiled(graph_of(source, lambda b, x: x), source, expert_reduction=(1, 0.5))
