"""Step-3.5-Flash, and the text model of Step-3.7-Flash: gates of heads, more heads in local layers, limited activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...config import Config
from ...draft_layers import DEEPSEEK_NAMES
from ...expert_transforms import expert_rows
from ...model_spec import ModelSpec
from ...rope import llama3_factors
from ...tensor_transforms import add_one, computed
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear

ARCHITECTURE = "step35"
OWN_NAMES = {  # of config.json in the published checkpoints -> those that are read here
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
HEAD_COUNTS = ("head_count", "head_count_kv")
DRAFT_NAMES = DEEPSEEK_NAMES | {"shared_head_norm": "transformer.shared_head.norm"}
DRAFT_NAMES |= {"shared_head_head": "transformer.shared_head.output"}
THETA, FULL_FRACTION = 1e4, 0.5  # base of the frequencies; rotated part of a head in layers without a window


def step35(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    given = {name: config.get(own) for own, name in OWN_NAMES.items() if config.get(own) is not None}
    config = config.with_defaults(given | {"rms_norm_eps": 1e-5})
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("mlp_bias", False, "biases in the feed-forward block"),
        ("use_bidirectional_attention", False, "attention to later tokens"),
        ("use_qk_norm", True, "heads without norms"),
        ("use_head_wise_attn_gate", True, "heads without gates"),
        ("moe_router_activation", "sigmoid", "this choice of experts"),
        ("norm_expert_weight", True, "weights of experts that do not sum to one"),
    ):
        config.require(key, supported, what)
    layers = config.count("num_hidden_layers")
    types = config.get("layer_types")
    count = config.count("num_nextn_predict_layers", 0, minimum=0)
    local_drafts = [t == "sliding_attention" for t in _of_drafts(config, "layer_types", layers, count, "full_attention")]
    config = config.with_values({"layer_types": types[:layers] if isinstance(types, list) else types})
    is_local = [t == "sliding_attention" for t in config.get("layer_types") or ["full_attention"] * layers]
    full, local = _ropes(config, is_local)
    spec = DecoderSpec(ARCHITECTURE, config, rope=full)
    is_local = spec.local_layers(lambda i: False)
    config.require("query_pre_attn_scalar", spec.head_dim, "another scale of the scores")
    if all(is_local) or not any(is_local):
        raise config.error("layer_types is of one kind; windows in some layers and none in others can be converted")
    other = config.get("attention_other_setting")
    other = config.part(other if isinstance(other, dict) else {})
    other.require("head_dim", spec.head_dim, "other heads in layers with a window")
    local_heads = config.integer("num_sliding_attention_heads", other.integer("num_attention_heads", spec.n_heads))
    local_kv_heads = other.integer("num_attention_groups", spec.n_kv_heads)
    if local_heads % local_kv_heads:
        raise config.error(f"{local_heads} heads over {local_kv_heads} key-value heads cannot be")
    pattern = [*is_local, *local_drafts]
    heads = [(local_heads, local_kv_heads) if each else (spec.n_heads, spec.n_kv_heads) for each in pattern]
    by_layer = {f"attention.{key}": np.array([each[at] for each in heads], np.uint32) for at, key in enumerate(HEAD_COUNTS)}
    by_layer["attention.sliding_window_pattern"] = np.array(pattern, bool)
    spec.add_uint32({"attention.sliding_window": config.integer("sliding_window"), "rope.dimension_count": spec.head_dim})
    spec.add_float32({"rope.freq_base_swa": local.number("rope_theta", THETA, positive=True)})
    has_experts = _sparse_layers(config, spec.n_layers, count)
    rows, shared_rows = config.integer("moe_intermediate_size"), config.integer("share_expert_dim")
    n = spec.add_expert_counts("n_routed_experts", rows, layers=0)
    dense = has_experts.index(True) if any(has_experts[: spec.n_layers]) else spec.n_layers
    spec.add_uint32({"leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING, "expert_shared_count": 1})
    spec.add_uint32({"expert_shared_feed_forward_length": shared_rows})
    spec.add_float32({"expert_weights_scale": config.number("moe_router_scaling_factor", 1.0, positive=True)})
    spec.metadata[f"{ARCHITECTURE}.expert_weights_norm"] = True
    for key, part in (("swiglu_limits", "exp"), ("swiglu_limits_shared", "shexp")):
        by_layer[f"swiglu_clamp_{part}"] = _limits(config, key, spec.n_layers, count)
    by_layer = {f"{ARCHITECTURE}.{key}": values for key, values in by_layer.items()}
    spec.metadata |= {key: values[: spec.n_layers] for key, values in by_layer.items()}

    def layer(i: int) -> list[LayerTensor]:
        hidden_size, (n_heads, n_kv_heads) = spec.hidden_size, heads[i]
        q_rows, kv_rows = n_heads * spec.head_dim, n_kv_heads * spec.head_dim
        return [
            spec.norm("attn_norm", "input_layernorm", transform=add_one),
            *linear("attn_q", "self_attn.q_proj", (q_rows, hidden_size)),
            *linear("attn_k", "self_attn.k_proj", (kv_rows, hidden_size)),
            *linear("attn_v", "self_attn.v_proj", (kv_rows, hidden_size)),
            *linear("attn_output", "self_attn.o_proj", (hidden_size, q_rows)),
            *linear("attn_gate", "self_attn.g_proj", (n_heads, hidden_size)),
            *(spec.norm(f"attn_{p}_norm", f"self_attn.{p}_norm", spec.head_dim, add_one) for p in "qk"),
            spec.norm("ffn_norm", "post_attention_layernorm", transform=add_one),
            *(_experts(spec, n, rows, shared_rows) if has_experts[i] else spec.gated_mlp()),
        ]

    spec.add_draft_layers(layer, count=count, names=DRAFT_NAMES, norm_transform=add_one, metadata=by_layer)
    model = spec.build(layer, norm_transform=add_one)
    if spec.rope.scaling == "llama3":  # of layers without a window; the rest of the tensor is for those with one
        count, scaled = spec.head_dim // 2, spec.rotary_dim
        at = next(i for i, tensor in enumerate(model.tensors) if tensor.name == "rope_freqs.weight")
        factors = computed(lambda: _padded(llama3_factors(full, spec.rope, scaled), count))
        model.tensors[at] = replace(model.tensors[at], shape=(count,), transform=factors)
    return model


def _padded(factors: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([factors, np.ones(count - len(factors), np.float32)])


def _experts(spec: DecoderSpec, n: int, rows: int, shared_rows: int) -> list[LayerTensor]:
    """Stacks of the experts' matrices, the router with its bias, and the shared expert."""
    hidden_size = spec.hidden_size
    shapes = {"gate": (n, rows, hidden_size), "up": (n, rows, hidden_size), "down": (n, hidden_size, rows)}
    stacks = [LayerTensor(f"ffn_{p}_exps.weight", f"moe.{p}_proj.weight", s, expert_rows()) for p, s in shapes.items()]
    return [
        LayerTensor("ffn_gate_inp.weight", "moe.gate.weight", (n, hidden_size)),
        LayerTensor("exp_probs_b.bias", "moe.router_bias", (n,)),
        *stacks,
        *spec.gated_mlp("share_expert", shared_rows, "_shexp"),
    ]


def _ropes(config: Config, is_local: list[bool]) -> tuple[Config, Config]:
    """The rotary settings of layers without and with a window: from rope_parameters by kind of layer, or from a list with the
    base and the rotated part of each layer."""
    both = config.get("rope_parameters")
    if isinstance(both, dict) and isinstance(both.get("full_attention"), dict):
        full, local = (dict(both.get(f"{kind}_attention") or {}) for kind in ("full", "sliding"))
    else:
        bases, parts = config.get("rope_theta", THETA), config.get("partial_rotary_factors")
        full, local = {}, {}
        for values, kind in ((full, False), (local, True)):
            at = is_local.index(kind) if kind in is_local else 0
            values["rope_theta"] = bases[at] if isinstance(bases, list) and at < len(bases) else bases
            if isinstance(parts, list) and at < len(parts):
                values["partial_rotary_factor"] = parts[at]
        scaling = config.get("rope_scaling")
        full |= scaling if isinstance(scaling, dict) else {}
    full = config.part({"partial_rotary_factor": FULL_FRACTION} | full)
    local = config.part(local)
    full.require("partial_rotary_factor", FULL_FRACTION, "rotating another part of each head in layers without a window")
    local.require("partial_rotary_factor", 1, "rotating a part of each head in layers with a window")
    local.require("rope_type", "default", "rotary scaling in layers with a window")
    if full.get("rope_type", "default") not in ("default", "llama3"):
        raise config.error(
            f"rotary scaling of type {full.get('rope_type')!r} cannot be converted; known are default and llama3"
        )
    return config.part({"rope_parameters": full.values}), local


def _of_drafts(config: Config, key: str, n: int, count: int, default: str) -> list[str]:
    """The types of `count` draft layers: from mtp_KEY, or after those of the n layers under KEY; else all the default."""
    types, own = config.get(key), config.get(f"mtp_{key}")
    found = own if isinstance(own, list) else types[n:] if isinstance(types, list) else []
    return [str(t) for t in [*found, *[default] * count][:count]]


def _sparse_layers(config: Config, n: int, drafts: int) -> list[bool]:
    """For each layer and each draft layer whether it has experts: from mlp_layer_types, or the numbers in moe_layers_enum."""
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and len(types) >= n:
        return [t == "sparse" for t in [*types[:n], *_of_drafts(config, "mlp_layer_types", n, drafts, "dense")]]
    numbers = config.get("moe_layers_enum")
    if numbers is None:
        return [3 <= i < n for i in range(n + drafts)]
    texts = numbers.split(",") if isinstance(numbers, str) else numbers
    try:
        chosen = {int(each) for each in texts if str(each).strip()}
    except (TypeError, ValueError):
        raise config.error(f"moe_layers_enum is {numbers!r:.60}; numbers of layers are needed") from None
    return [i in chosen for i in range(n + drafts)]


def _limits(config: Config, key: str, n: int, drafts: int) -> np.ndarray:
    """A limit for each layer and each draft layer, 0 for none: float32 [n + drafts]. Draft layers may have none."""
    values = config.get(key) or [0] * n
    is_list = isinstance(values, list) and len(values) >= n
    if not is_list or any(isinstance(v, bool) or not isinstance(v, int | float | None) or (v or 0) < 0 for v in values):
        raise config.error(f"{key} is {values!r:.60}; a number of at least 0 is needed for each of the {n} layers")
    return np.array([v or 0 for v in [*values, *[0] * drafts][: n + drafts]], np.float32)
