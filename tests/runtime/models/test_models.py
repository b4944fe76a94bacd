"""What the builders make of metadata and tensors; that the graphs are right is shown by their logits (test_checkpoints)."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import FormatError, PlanError, SourceTensor, TensorSource
from ggufmill.runtime.graph import Weight, ops
from ggufmill.runtime.graph.values import CacheSpec
from ggufmill.runtime.models import variants
from ggufmill.runtime.models.architectures import ARCHITECTURES, build_graph

N_EMBD, N_FF, EXPERTS = 32, 48, 8
BASE = {
    "token_embd": (N_EMBD, 64),
    "output_norm": (N_EMBD,),
    "blk.0.attn_norm": (N_EMBD,),
    "blk.0.attn_q": (N_EMBD, N_EMBD),
    "blk.0.attn_k": (N_EMBD, 16),
    "blk.0.attn_v": (N_EMBD, 16),
    "blk.0.attn_output": (N_EMBD, N_EMBD),
    "blk.0.ffn_norm": (N_EMBD,),
}
DENSE = {"blk.0.ffn_gate": (N_EMBD, N_FF), "blk.0.ffn_up": (N_EMBD, N_FF), "blk.0.ffn_down": (N_FF, N_EMBD)}
ROUTED = {f"blk.0.ffn_{p}_exps": (N_EMBD, N_FF, EXPERTS) for p in ("gate", "up")}
ROUTED |= {"blk.0.ffn_down_exps": (N_FF, N_EMBD, EXPERTS), "blk.0.ffn_gate_inp": (N_EMBD, EXPERTS)}
SHARED = {"blk.0.ffn_gate_shexp": (N_EMBD, 20), "blk.0.ffn_up_shexp": (N_EMBD, 20), "blk.0.ffn_down_shexp": (20, N_EMBD)}


def source(architecture="llama", shapes=None, **keys):
    """Of one layer, with four heads that share two keys and values."""
    shapes = BASE | (DENSE if shapes is None else shapes)
    names = {name if name.endswith((".bias", "probs_b")) else f"{name}.weight": shape for name, shape in shapes.items()}
    tensors = {
        name: SourceTensor(name, shape, "f32", lambda a, b, c=shape[0]: np.zeros((b - a, c), np.float32))
        for name, shape in names.items()
    }
    values = {"block_count": 1, "context_length": 64, "embedding_length": N_EMBD, "feed_forward_length": N_FF}
    values |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    values |= {"expert_count": EXPERTS, "expert_used_count": 2} | {k.replace("__", "."): v for k, v in keys.items()}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in values.items()}
    return TensorSource("tiny.gguf", metadata, tensors, "")


def ops_of(graph, kind):
    return [op for op in (*graph.ops, *graph.head) if isinstance(op, kind)]


def only(graph, kind):
    (op,) = ops_of(graph, kind)
    return op


def test_architectures():
    assert len(ARCHITECTURES) >= 33
    with pytest.raises(PlanError, match=r"tiny\.gguf: architecture 'rwkv7' cannot be run; the nearest that can is '"):
        build_graph(source("rwkv7"))
    page = (Path(variants.__file__).parent / "README.md").read_text()
    assert all(path.name in page for path in Path(variants.__file__).parent.glob("[a-z]*.py"))


def test_a_layer_of_llama():
    graph = build_graph(source())
    attention = [ops.Norm, *[ops.Linear] * 3, *[ops.Reshape] * 3, ops.Rope, ops.Rope, ops.Attention, ops.Linear, ops.Add]
    feed_forward = [ops.Norm, ops.Linear, ops.Linear, ops.GatedActivation, ops.Linear, ops.Add]
    assert [type(op) for op in graph.ops] == [ops.Embedding, *attention, *feed_forward, ops.Norm]
    assert [type(op) for op in graph.head] == [ops.Linear]
    assert graph.layers == (graph.ops[-2].out,)
    assert graph.cache == (CacheSpec(0, "k", 2, 8), CacheSpec(0, "v", 2, 8))
    assert only(graph, ops.Attention).scale == 8**-0.5
    assert graph.output.name == "token_embd.weight"


@pytest.mark.parametrize(
    ("architecture", "extra", "changed"),
    [
        ("olmo2", {"blk.0.post_attention_norm": (N_EMBD,), "blk.0.post_ffw_norm": (N_EMBD,)}, {}),
        ("gemma2", {"blk.0.post_attention_norm": (N_EMBD,), "blk.0.post_ffw_norm": (N_EMBD,)}, {ops.Norm: 2, ops.SoftCap: 1}),
        ("command-r", {}, {ops.Norm: -1}),
        ("qwen3", {"blk.0.attn_q_norm": (8,), "blk.0.attn_k_norm": (8,)}, {ops.Norm: 2}),
    ],
)
def test_norms_of_variants(architecture, extra, changed):
    """How many ops of each kind there are beside those of llama."""
    graphs = [build_graph(source(architecture, DENSE | extra)), build_graph(source())]
    counts, llama = (Counter(type(op) for op in ops_of(graph, ops.Op)) for graph in graphs)
    counts.subtract(llama)
    assert {kind: n for kind, n in counts.items() if n} == changed


def test_the_epsilon_tells_which_norm_it_is():
    shapes = DENSE | {"output_norm.bias": (N_EMBD,)}
    norms = ops_of(build_graph(source("starcoder2", shapes, attention__layer_norm_epsilon=0.1)), ops.Norm)
    assert [(op.kind, op.epsilon, op.bias is not None) for op in norms] == [("layer", 0.1, False)] * 2 + [("layer", 0.1, True)]
    norms = ops_of(build_graph(source("starcoder2", shapes)), ops.Norm)
    assert [(op.kind, op.bias) for op in norms] == [("rms", None)] * 3


def test_tensors_in_one():
    """Phi 3: queries, keys and values, and gate and up."""
    shapes = {"blk.0.attn_qkv": (N_EMBD, 64), "blk.0.ffn_up": (N_EMBD, 2 * N_FF), "blk.0.ffn_down": (N_FF, N_EMBD)}
    splits = ops_of(build_graph(source("phi3", shapes)), ops.Split)
    assert [op.sizes for op in splits] == [(32, 16, 16), (48, 48)]
    assert [out.shape for out in splits[0].outputs] == [(32,), (16,), (16,)]


def test_a_block_without_a_gate():
    shapes = {name: shape for name, shape in DENSE.items() if "gate" not in name}
    for architecture, function in (("starcoder2", "gelu"), ("nemotron", "squared_relu")):
        assert only(build_graph(source(architecture, shapes)), ops.Activation).function == function


def test_windows_and_rotations_by_layer():
    """Cohere 2: three layers with a window, then one that sees everything and has no positions."""
    layer = {name: shape for name, shape in (BASE | DENSE).items() if name.startswith("blk.")}
    shapes = {name.replace("blk.0.", f"blk.{i}."): shape for i in range(5) for name, shape in layer.items()}
    graph = build_graph(source("cohere2", shapes, block_count=5, attention__sliding_window=20))
    assert [op.window for op in ops_of(graph, ops.Attention)] == [20, 20, 20, 0, 20]
    assert len(ops_of(graph, ops.Rope)) == 8


def test_scales_of_the_metadata():
    keys = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0, "attention__scale": 0.5}
    graph = build_graph(source("granite", **keys))
    assert only(graph, ops.Embedding).scale == 12
    assert [op.scale for op in ops_of(graph, ops.Add)] == [0.25, 0.25]
    assert only(graph, ops.Attention).scale == 0.5
    assert only(graph, ops.Scale).factor == 1 / 8
    assert only(build_graph(source("cohere2", **keys)), ops.Scale).factor == 8


def test_gpt_oss_limits_its_activations():
    shapes = {("blk.0.post_attention_norm" if "ffn_norm" in n else n): s for n, s in (BASE | ROUTED).items()}
    op = only(build_graph(source("gpt-oss", shapes)), ops.GatedActivation)
    assert (op.function, op.limit) == ("clamped_swish", 7.0)
    assert only(build_graph(source()), ops.GatedActivation).limit == 0


@pytest.mark.parametrize("bias", ["blk.0.exp_probs_b.bias", "blk.0.exp_probs_b"])
def test_a_mixture_of_experts(bias):
    shapes = ROUTED | SHARED | {bias: (EXPERTS,), "blk.0.ffn_gate_inp_shexp": (N_EMBD,)}
    keys = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_gating_func": 2, "expert_weights_scale": 2.5}
    graph = build_graph(source("qwen3moe", shapes, **keys))
    route = only(graph, ops.Route)
    assert (route.used, route.gating, route.bias) == (2, "sigmoid", Weight(bias, (EXPERTS,)))
    assert (route.groups, route.groups_used, route.normalise, route.scale) == (4, 2, True, 2.5)
    combined, shared = only(graph, ops.CombineExperts), only(graph, ops.SigmoidGate)
    assert any(op.inputs == (shared.out, combined.out) for op in ops_of(graph, ops.Add))
    assert [op.out.shape for op in ops_of(graph, ops.ExpertLinear)] == [(2, N_FF), (2, N_FF), (2, N_EMBD)]
    with pytest.raises(FormatError, match="3 experts cannot be chosen from 1 of 4 equal groups of 8 experts"):
        build_graph(source("qwen3moe", shapes, **keys | {"expert_used_count": 3, "expert_group_used_count": 1}))
    with pytest.raises(PlanError, match=r"expert gating function 3 is not supported \(1 softmax, 2 sigmoid, 4 sqrt_softplus\)"):
        build_graph(source("qwen3moe", shapes, expert_gating_func=3))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("blk.0.attn_q", r"tensor blk\.0\.attn_q\.weight is missing"),
        ("blk.0.ffn_up", r"tensor blk\.0\.ffn_up\.weight is missing"),
        ("output_norm", r"tensor output_norm\.weight is missing"),
        ("token_embd", r"tensor token_embd\.weight is missing"),
    ],
)
def test_missing_tensors_are_named(gone, message):
    whole = source()
    fewer = TensorSource(whole.path, whole.metadata, {n: t for n, t in whole.tensors.items() if not n.startswith(gone)}, "")
    with pytest.raises(FormatError, match=message):
        build_graph(fewer)


def test_minicpm3_knows_the_published_factors():
    shapes = {"blk.0.attn_q": (N_EMBD, 48), "blk.0.attn_kv_a_mqa": (N_EMBD, 28), "blk.0.attn_kv_a_norm": (24,)}
    shapes |= {"blk.0.attn_kv_b": (24, 4 * 18), "blk.0.attn_output": (40, N_EMBD)} | DENSE
    keys = {
        "attention__kv_lora_rank": 24,
        "attention__key_length": 12,
        "attention__value_length": 10,
        "rope__dimension_count": 4,
    }
    graph = build_graph(source("minicpm3", shapes, **keys))
    assert (only(graph, ops.Embedding).scale, only(graph, ops.Scale).factor) == (12, 256 / N_EMBD)
    assert [op.scale for op in ops_of(graph, ops.Add)] == [1.4, 1.4]
    attention = only(graph, ops.LatentAttention)
    assert (attention.nope, attention.v_width, attention.scale) == (8, 10, 12**-0.5)
    ropes = ops_of(graph, ops.Rope)
    assert [(op.start, op.rope.interleaved) for op in ropes] == [(8, False), (0, False)]
    assert graph.cache == (CacheSpec(0, "latent", 1, 28),)
    with pytest.raises(FormatError, match="heads of 12 elements cannot have 12 rotated ones and others"):
        build_graph(source("minicpm3", shapes, **keys | {"rope__dimension_count": 12}))
