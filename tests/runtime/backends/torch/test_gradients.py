"""Gradients of activations: of every op against finite differences, of whole models against these and against transformers."""

import kimi_k3_model
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from checkpoint_cases import convert_record, write_gguf
from double_weights import DoubleWeights
from model_cases import CASES
from model_cases.common import COMMON
from op_graphs import N_EMBD, Tensors, graph_of
from recorded_models import kept_cases, new_config, oracle

from ggufmill.convert import open_source
from ggufmill.formats import TensorSource
from ggufmill.quantize import gguf_source
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch.drawn_labels import uniform_draws
from ggufmill.runtime.backends.torch.functions import FUNCTIONS
from ggufmill.runtime.backends.torch.gradients import Gradients
from ggufmill.runtime.graph import ops
from ggufmill.runtime.graph.gradients import is_choice, observed_weights, reached_ops
from ggufmill.runtime.models.architectures import build_graph
from ggufmill.runtime.output_gradients import gradients_of

pytestmark = pytest.mark.oracle

N = 24  # tokens of a window
LONG = 140  # of one in which all ops that compress runs of tokens have one
A_DOZEN = [
    "llama",
    "qwen3moe",
    "v2-lite",
    "v3",
    "gemma3n",
    "gemma4",
    "qwen35",
    "mamba",
    "deepseek4",
    "longcat-flash",
    "gpt-oss",
]
WITHOUT_INPUTS = {ops.Embedding, ops.NgramEmbedding, ops.HiddenInput}  # what they make is the same whatever activations are


@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def windows_of(record):
    return np.stack([record.tokens[:N], record.tokens[N : 2 * N]])


class Perturbed(Gradients):
    """Adds `size` times `directions` to what ops with these results compute."""

    size, directions = 0.0, {}

    def _compute(self, op, step, values, *more):
        super()._compute(op, step, values, *more)
        if self.size and op.out.index in self.directions:
            values[op.out.index] = values[op.out.index] + self.size * self.directions[op.out.index]

    def loss(self, windows, seed):
        """Minus the sum of log p at labels that are drawn from the predictions without any change."""
        logits = self._logits(windows)
        if not self.size:
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            sums = np.cumsum(p / p.sum(axis=1, keepdims=True), axis=1)
            draws = np.concatenate([uniform_draws(seed, window) for window in windows])
            self.labels = [int(np.searchsorted(own, draw, side="right")) for own, draw in zip(sums, draws, strict=True)]
        shifted = logits - logits.max(axis=1, keepdims=True)
        return float(np.sum(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(logits)), self.labels]))

    def _logits(self, windows):
        caches = self._caches([{} for _ in windows])
        step, values = self._step(windows, caches), {}
        with torch.no_grad():
            for op in (*self.graph.ops, *self.graph.head):
                self._compute(op, step, values)
        return values[self.graph.logits.index].numpy()


@pytest.mark.slow(keep=["llama", "v3", "gemma2"])
@pytest.mark.parametrize("case", kept_cases())
def test_gradients_are_what_differences_of_the_loss_say(tmp_path, doubles, case):
    """Of all observed outputs together, in random directions: part by part, against float64 differences of the whole model."""
    record, path = convert_record(case, tmp_path)
    source = gguf_source(path)
    model = Perturbed(build_graph(source), DoubleWeights(source))
    windows, found = windows_of(record), {}
    model.run(windows, 5, source.tensors.keys(), lambda o: found.setdefault((o.op.out.index, o.weight.name), []).append(o.g))
    base, draw = model.loss(windows, 5), np.random.default_rng(1)
    assert np.isfinite(base)
    outputs = [op for op in reached_ops(model.graph) if observed_weights(op)]
    expected = 0.0
    for op in outputs:
        directions = draw.standard_normal((2 * N, *op.out.shape))
        model.directions = {**model.directions, op.out.index: torch.from_numpy(directions)}
        name = observed_weights(op)[0].name
        if isinstance(op, ops.LatentAttention):
            name = op.observed[2].name
        if (op.out.index, name) not in found:  # kv_b alone: what it makes is not the op's result
            del model.directions[op.out.index]
            continue
        g = np.concatenate(found[op.out.index, name])
        expected += float(np.sum(g.reshape(directions.shape) * directions))
    losses = []
    for model.size in (1e-8, -1e-8):  # so small that no token is sent to another expert
        losses.append(model.loss(windows, 5))
    difference = (losses[0] - losses[1]) / 2e-8
    assert abs(difference - expected) < 1e-4 * max(1.0, abs(expected)), (difference, expected)
    assert len(outputs) > 5


def test_every_op_has_the_derivative_that_differences_say(tmp_path, doubles):
    """Of every op of the kept models, which have every op and variant: c . J d with random c and d, in float64."""
    seen = set()
    for case in kept_cases():
        record, path = convert_record(case, tmp_path / case)
        source = gguf_source(path)
        model = Gradients(build_graph(source), DoubleWeights(source))
        seen |= check_ops(model, record.tokens[None, :N], seen)
    kimi_k3_model.write_checkpoint(kimi_k3_model.CONFIGS["kimi-k3"], tmp_path / "kimi-k3")  # sums of blocks by their scores
    source = gguf_source(write_gguf(open_source(tmp_path / "kimi-k3"), tmp_path / "kimi-k3.gguf")[0])
    seen |= check_ops(Gradients(build_graph(source), DoubleWeights(source)), np.arange(N)[None], seen)
    source = TensorSource("test", {}, Tensors(0, both__weight=(2 * N_EMBD, N_EMBD)), "test")
    graph = graph_of(source, lambda b, x: b.linear(b.concat(x, b.scale(x, 2.0)), "both", N_EMBD))  # of draft layers
    seen |= check_ops(Gradients(graph, DoubleWeights(source)), np.arange(N)[None], seen)
    assert {kind for kind, *_ in seen} == FUNCTIONS.keys() - WITHOUT_INPUTS


def check_ops(model, windows, seen):
    """Checks the ops of a model that are of kinds not seen yet; returns these."""
    values, rows, found = {}, [{}], set()
    draw = torch.Generator().manual_seed(1)
    for op in (*model.graph.ops, *model.graph.head):
        kind = (
            type(op),
            *[str(getattr(op, name)) for name in FUNCTIONS[type(op)][1] if isinstance(getattr(op, name), str | bool)],
        )
        inputs = {v.index: values[v.index] for v in op.inputs}

        def compute(changed, op=op, rows=rows):
            caches = model._caches(rows)
            own = dict(changed)
            model._compute(op, model._step(windows, caches), own)
            return own, caches

        if kind not in seen | found and type(op) not in WITHOUT_INPUTS:
            found.add(kind)
            with torch.enable_grad():
                check_op(op, compute, inputs, draw)
        with torch.no_grad():
            own, caches = compute(inputs)
        rows = [cache.rows for cache in caches]
        values.update(own)
    return found


def check_op(op, compute, inputs, draw):
    def floats(value):
        return value[1] if isinstance(value, tuple) else value

    def moved(by):
        return {i: (v[0], v[1] + by * d[i]) if isinstance(v, tuple) else v + by * d[i] for i, v in inputs.items()}

    d = {i: torch.randn(floats(v).shape, generator=draw) for i, v in inputs.items()}
    leaves = {
        i: (v[0], v[1].clone().requires_grad_()) if isinstance(v, tuple) else v.clone().requires_grad_()
        for i, v in inputs.items()
    }
    own, _ = compute(leaves)
    outs = [floats(own[value.index]) for value in op.outputs]
    if is_choice(op):
        assert not any(out.requires_grad for out in outs)
        return
    c = [torch.randn(out.shape, generator=draw) for out in outs]
    grads = torch.autograd.grad(outs, [floats(v) for v in leaves.values()], c, allow_unused=True)
    expected = sum(float((g * d[i]).sum()) for i, g in zip(leaves, grads, strict=True) if g is not None)
    with torch.no_grad():
        ahead, behind = (
            sum(float((floats(own[value.index]) * each).sum()) for value, each in zip(op.outputs, c, strict=True))
            for own, _ in map(compute, (moved(1e-6), moved(-1e-6)))
        )
    difference = (ahead - behind) / 2e-6
    assert abs(difference - expected) < 1e-5 * max(1.0, abs(expected)), (op, difference, expected)


@pytest.mark.slow(keep=A_DOZEN)
@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_the_whole_graph_gives(tmp_path, case):
    """In float32, by the functions as models are run with them: streamed, and by torch's autograd over the whole graph."""
    _, path = convert_record(case, tmp_path)
    model = load_model(path, threads=2)
    windows, results = np.random.default_rng(4).integers(3, COMMON["vocab_size"], (2, LONG)), []
    for is_whole in (False, True):
        own = {}
        gradients_of(model, is_whole).run(
            windows,
            0,
            model.stored.tensors.keys(),
            lambda o, own=own: own.setdefault((o.op.out.index, o.weight.name), []).append(o.g),
        )
        results.append({key: np.concatenate(parts) for key, parts in own.items()})
    parts, whole = results
    assert parts.keys() == whole.keys()
    expected = {(op.out.index, weight.name) for op in reached_ops(model.graph) for weight in observed_weights(op)}
    assert parts.keys() == expected
    for key, g in whole.items():
        assert np.abs(g).max() > 0, key
        assert np.abs(parts[key] - g).max() <= 1e-3 * np.abs(g).max(), key


def transformers_gradients(case, record, folder, labels):
    """(gradient at the outputs of each linear module, gradient at the inputs of each) by transformers and torch's autograd."""
    _, transformers = oracle()
    record.write(folder)
    architecture, _ = new_config(transformers, CASES[case][0], COMMON | CASES[case][1])
    model = architecture.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    after, before = {}, {}

    def hook(name):
        def keep(module, into, out):
            before[name], after[name] = into[0][0].numpy(), out[0][0].numpy()

        return keep

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_full_backward_hook(hook(name))
    logits = model(torch.tensor(record.tokens[None])).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum").backward()
    return after, before


LINEAR = {
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_kv_b": "self_attn.kv_b_proj",
}


NOT_PERMUTED = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"}  # where a file has the rows in another order


@pytest.mark.parametrize(("case", "least"), [("llama", 16), ("qwen3moe", 13), ("v2-lite", 18)])
def test_gradients_are_those_of_transformers(tmp_path, case, least):
    record, path = convert_record(case, tmp_path)
    draws = uniform_draws(0, record.tokens)
    p = np.exp(record.logits.astype(np.float64))
    sums = np.cumsum(p / p.sum(axis=1, keepdims=True), axis=1)
    labels = [int(np.searchsorted(own, draw, side="right")) for own, draw in zip(sums, draws, strict=True)]
    after, before = transformers_gradients(case, record, tmp_path / "transformers", labels)
    model, found = load_model(path, threads=1), {}
    gradients_of(model).run(
        record.tokens[None].astype(np.int64), 0, model.stored.tensors.keys(), lambda o: found.setdefault(o.weight.name, o)
    )
    n, checked = len(record.tokens), 0

    def same(name, expected):
        nonlocal checked
        checked += 1
        got = found[name].g.reshape(n, -1)
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max(), name

    same("output.weight", after["lm_head"])
    for layer in range(model.n_layers):
        for ours, theirs in (LINEAR | (NOT_PERMUTED if case == "qwen3moe" else {})).items():
            if f"blk.{layer}.{ours}.weight" in found and f"model.layers.{layer}.{theirs}" in after:
                same(f"blk.{layer}.{ours}.weight", after[f"model.layers.{layer}.{theirs}"])
        prefix, module = f"blk.{layer}.attn_", f"model.layers.{layer}.self_attn"
        if f"{prefix}v_b.weight" in found:  # its outputs are what goes into the output matrix
            same(f"{prefix}v_b.weight", before[f"{module}.o_proj"])
            op = found[f"{prefix}k_b.weight"].op  # of queries the part without rotation is multiplied with K transposed
            heads, rank, nope = op.q.shape[0], op.latent.shape[0], op.nope
            keys = model.stored.tensors[f"{prefix}k_b.weight"].read(0, heads * rank).reshape(heads, rank, nope)
            of_queries = after[f"{module}.q_proj"].reshape(n, heads, -1)[..., :nope]
            got = np.einsum("nhr,hrk->nhk", found[f"{prefix}k_b.weight"].g, keys)
            assert np.abs(got - of_queries).max() < 1e-3 * np.abs(of_queries).max()
    assert checked >= least
