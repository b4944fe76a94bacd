"""The builder's checks and what it makes of a model's tensors; the check of what a backend supports; observers."""

import dataclasses

import numpy as np
import pytest

from ggufmill.formats import FormatError, PlanError, SourceTensor, TensorSource
from ggufmill.runtime.graph import ExpertInputs, Graph, GraphBuilder, Observer, Weight, check_support, ops
from ggufmill.runtime.graph.graph import users
from ggufmill.runtime.graph.observer import ObserverGroup
from ggufmill.runtime.graph.values import CacheSpec, RotaryEmbedding

N_EMBD = 8


def builder(**shapes):
    """Of a model with these tensors (underscores for dots), and embeddings of 10 tokens."""
    shapes = {"token_embd.weight": (N_EMBD, 10)} | {name.replace("__", "."): shape for name, shape in shapes.items()}

    def tensor(name, shape):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(-1, shape[0])
        return SourceTensor(name, shape, "f32", lambda start, stop: values[start:stop])

    return GraphBuilder(TensorSource("tiny.gguf", {}, {name: tensor(name, shape) for name, shape in shapes.items()}, ""))


def rotary(dims):
    return RotaryEmbedding(np.ones(dims // 2))


def small_graph(**shapes) -> Graph:
    graph = builder(up__weight=(N_EMBD, 6), down__weight=(6, N_EMBD), norm__weight=(N_EMBD,), **shapes)
    x = graph.embedding("token_embd", N_EMBD)
    x = graph.add(x, graph.linear(graph.activation(graph.linear(x, "up", 6), "gelu"), "down", N_EMBD))
    graph.end_layer(x)
    return graph.finish("small", graph.norm(x, "norm", 1e-5), 128)


def test_a_missing_tensor_is_named():
    graph = builder()
    with pytest.raises(FormatError, match=r"^tiny\.gguf: tensor up\.weight is missing$"):
        graph.linear(graph.value(N_EMBD), "up", 6)


def test_a_tensor_of_another_shape_is_named():
    graph = builder(up__weight=(N_EMBD, 7), norm__weight=(5,), exps__weight=(N_EMBD, 4, 3), gate__weight=(6,))
    x = graph.value(N_EMBD)
    routing = graph.route(graph.value(3), 2)
    for build, message in (
        (lambda: graph.linear(x, "up", 6), r"tensor up\.weight has shape \(8, 7\), expected is \(8, 6\)"),
        (lambda: graph.embedding("token_embd", 9), r"tensor token_embd\.weight has shape \(8, 10\), expected is \(9, 10\)"),
        (lambda: graph.norm(x, "norm", 1e-5), r"tensor norm\.weight has shape \(5,\), expected is \(8,\)$"),
        (lambda: graph.expert_linear(x, routing, "exps", 4, 2), r"\(8, 4, 3\), expected is \(8, 4, 2\)"),
        (lambda: graph.sigmoid_gate(x, x, "gate"), r"tensor gate\.weight has shape \(6,\), expected is \(8,\)"),
        (lambda: graph.vector("gate.weight", 4), r"tensor gate\.weight has shape \(6,\), expected is \(4,\)"),
    ):
        with pytest.raises(FormatError, match=message):
            build()


def test_values_that_do_not_fit_together():
    graph = builder()
    flat, heads, wide = graph.value(8), graph.value(4, 2), graph.value(3, 6)
    for build, message in (
        (lambda: graph.split(flat, 4, 5), r"a split of \(8,\) into \(4, 5\)"),
        (lambda: graph.reshape(flat, 3, 3), r"a reshape of \(8,\) to \(3, 3\)"),
        (lambda: graph.rope(heads, rotary(4)), r"a rotation of 0\.\.\.4 of \(4, 2\)"),
        (lambda: graph.rope(wide, rotary(4), start=4), r"a rotation of 4\.\.\.8 of \(3, 6\)"),
        (lambda: graph.attention(heads, wide, wide, 0, 1.0), r"attention of queries \(4, 2\) over keys \(3, 6\)"),
        (lambda: graph.attention(wide, graph.value(2, 6), wide, 0, 1.0), r"attention of queries"),
        (lambda: graph.latent_attention(wide, flat, flat, 0, 1.0, 4, "blk.0.attn_"), r"latent attention of queries \(3, 6\)"),
        (lambda: graph.gated(flat, heads, "silu"), r"a product of \(8,\) and \(4, 2\)"),
        (lambda: graph.add(flat, heads), r"a sum of \(8,\) and \(4, 2\)"),
    ):
        with pytest.raises(FormatError, match=f"^tiny.gguf: shapes do not fit together in {message}"):
            build()


def test_biases_are_used_where_they_are():
    graph = builder(a__weight=(N_EMBD, 6), a__bias=(6,), b__weight=(N_EMBD, 6), exps__weight=(6, 4, 3), exps__bias=(4, 3))
    x = graph.value(N_EMBD)
    graph.linear(x, "b", 6)
    routing = graph.route(graph.value(3), 2)
    graph.expert_linear(graph.linear(x, "a", 6), routing, "exps", 4, 3)
    assert [op.bias for op in graph.ops if isinstance(op, ops.Linear)] == [None, Weight("a.bias", (6,))]
    assert graph.ops[-1].weights == (Weight("exps.weight", (6, 4, 3)), Weight("exps.bias", (4, 3)))
    assert graph.ops[-1].inputs == (graph.ops[-2].out, routing)
    assert graph.ops[-1].out.shape == (2, 4)
    with pytest.raises(FormatError, match=r"tensor a\.bias has shape \(6,\), expected is \(5,\)"):
        builder(a__weight=(N_EMBD, 5), a__bias=(6,)).linear(x, "a", 5)


@pytest.mark.parametrize(("shape", "over"), [((4,), "last"), ((12,), "all"), ((4, 3), "last")])
def test_the_shape_of_its_weights_says_what_a_norm_goes_over(shape, over):
    graph = builder(n__weight=shape, n__bias=shape)
    heads = graph.value(3, 4)
    graph.norm(heads, "n", 1e-5)
    graph.norm(heads, "n", 1e-5, kind="layer")
    rms, layer = graph.ops
    assert (rms.over, rms.bias, layer.over, layer.bias) == (over, None, over, Weight("n.bias", shape))


def test_latent_attention_takes_either_layout():
    heads, nope, rope, v, rank = 3, 4, 2, 5, 7
    layouts = {
        "kv_b": {"attn_kv_b__weight": (rank, heads * (nope + v))},
        "ik": {"attn_k_b__weight": (nope, rank * heads), "attn_v_b__weight": (rank, heads * v)},
        "llama.cpp": {"attn_k_b__weight": (nope, rank, heads), "attn_v_b__weight": (rank, v, heads)},
    }
    for layout, shapes in layouts.items():
        graph = builder(**shapes)
        values = graph.value(heads, nope + rope), graph.value(rank), graph.value(rope)
        assert graph.latent_attention(*values, 0, 1.0, v, "attn_").shape == (heads, v)
        (op,) = graph.ops
        assert {w.name.replace(".", "__"): w.shape for w in op.weights} == shapes, layout
        assert op.nope == nope
        assert [w.name for w in op.observed] == ["attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"]
        assert [len(w.shape) for w in op.observed[1:]] == ([2, 2] if layout == "ik" else [3, 3])
        assert graph.cache == [CacheSpec(0, "latent", 1, rank + rope)]
    graph = builder(attn_k_b__weight=(nope, rank, heads))
    with pytest.raises(FormatError, match=r"attn_kv_b\.weight is missing, and so is attn_k_b or attn_v_b"):
        graph.latent_attention(*values, 0, 1.0, v, "attn_")


def test_a_whole_graph():
    graph = small_graph(output__weight=(N_EMBD, 10))
    assert (graph.n_embd, graph.n_vocab, graph.n_ctx_train) == (N_EMBD, 10, 128)
    assert (graph.embedding.name, graph.output.name) == ("token_embd.weight", "output.weight")
    computed = {out.index for op in (*graph.ops, *graph.head) for out in op.outputs}
    assert len(computed) == sum(len(op.outputs) for op in (*graph.ops, *graph.head))
    read = users((*graph.ops, *graph.head))
    assert set(read) == computed - {graph.logits.index}
    assert [type(op) for op in read[graph.layers[0].index]] == [ops.Norm]
    assert small_graph().output.name == "token_embd.weight"  # of a model without an output matrix


def test_factors_that_change_nothing_are_no_ops():
    graph = builder()
    x = graph.value(4)
    assert graph.scale(x, 1.0) is graph.softcap(x, 0.0) is x
    assert graph.scale(x, 2.0) is not x
    assert graph.softcap(x, 30.0) is not x


SUPPORT = {
    ops.Embedding: {"table": None, "scale": None},
    ops.Linear: {"x": None, "weight": None, "bias": None},
    ops.Norm: {"x": None, "weight": None, "epsilon": None, "kind": ("rms",)},
    ops.Activation: {"x": None, "function": ("silu", "gelu")},
    ops.Add: {"a": None, "b": None},
}


def test_a_backend_refuses_what_it_does_not_know():
    graph = small_graph()
    check_support(graph, "test", SUPPORT)

    def changed(op_class, **fields):
        change = [dataclasses.replace(op, **fields) if isinstance(op, op_class) else op for op in graph.ops]
        return dataclasses.replace(graph, ops=tuple(change))

    less = {op: known for op, known in SUPPORT.items() if op is not ops.Activation}
    for broken, support, message in (
        (graph, less, "it has no op Activation"),
        (changed(ops.Add, scale=0.5), SUPPORT, "op Add with scale 0.5"),
        (changed(ops.Norm, kind="layer"), SUPPORT, r"op Norm with kind 'layer' \(known are 'rms'\)"),
        (changed(ops.Norm, bias=Weight("b", (8,))), SUPPORT, "op Norm with bias Weight"),
        (graph, SUPPORT | {ops.Norm: {"x": None, "weight": None}}, "op Norm with epsilon 1e-05"),
        (changed(ops.Activation, function="tanh"), SUPPORT, r"op Activation with function 'tanh' \(known are 'silu', 'gelu'\)"),
        (dataclasses.replace(graph, head=(ops.Scale(graph.logits, graph.hidden, 2.0),)), SUPPORT, "it has no op Scale"),
    ):
        with pytest.raises(PlanError, match=f"^the test backend cannot run small: {message}"):
            check_support(broken, "test", support)


class Recorder(Observer):
    def __init__(self, kind=None):
        self.kind, self.inputs, self.outputs = kind, [], []

    def wants_input(self, op):
        return self.kind is None or isinstance(op, self.kind)

    wants_output = wants_input

    def on_input(self, op, weight, matrix, x):
        self.inputs.append((weight.name, matrix, x.copy()))

    def on_output(self, op, out):
        self.outputs.append(out)


def test_what_an_observer_of_single_matrices_gets_of_stacks():
    graph = builder(exps__weight=(2, 4, 3))
    routing = graph.route(graph.value(3), 2)
    graph.expert_linear(graph.value(2), routing, "exps", 4, 3)
    op, recorder, x = graph.ops[-1], Recorder(), np.arange(12, dtype=np.float32).reshape(6, 2)
    runs = np.array([0, 2]), np.array([0, 3]), np.array([3, 2])
    recorder.on_expert_inputs(op, op.weight, ExpertInputs(x, *runs))
    recorder.on_expert_inputs(op, op.weight, ExpertInputs(x, *runs, np.array([5, 4, 3, 2, 1, 0])))
    assert [(name, matrix) for name, matrix, _ in recorder.inputs] == [("exps.weight", 0), ("exps.weight", 2)] * 2
    rows = [slice(0, 3), slice(3, 5), [5, 4, 3], [2, 1]]
    assert all(np.array_equal(seen, x[which]) for (_, _, seen), which in zip(recorder.inputs, rows, strict=True))

    heads, recorder = x.reshape(2, 3, 2), Recorder()
    recorder.on_head_inputs(op, Weight("k_b", (2, 7, 3)), heads)
    assert all(np.array_equal(seen, heads[:, head]) for head, (_, _, seen) in enumerate(recorder.inputs))
    recorder.on_head_inputs(op, Weight("k_b", (2, 21)), heads)
    assert recorder.inputs[-1][1] == 0
    assert np.array_equal(recorder.inputs[-1][2], heads.transpose(1, 0, 2).reshape(6, 2))


def test_a_group_passes_on_what_each_observer_wants():
    graph = small_graph()
    linear, norm, nothing = Recorder(ops.Linear), Recorder(ops.Norm), Observer()
    group = ObserverGroup([linear, norm, nothing])
    x = np.ones((2, N_EMBD), np.float32)
    for op in graph.ops:
        if group.wants_input(op):
            group.on_input(op, op.weights[0], 0, x)
        if group.wants_output(op):
            group.on_output(op, x)
    assert [name for name, *_ in linear.inputs] == ["up.weight", "down.weight"]
    assert [name for name, *_ in norm.inputs] == ["norm.weight"]
    assert (len(linear.outputs), len(norm.outputs)) == (2, 1)
    assert not group.wants_squares
