"""Qwen3-Next, Qwen 3.5 and 3.6: linear attention by the gated delta rule, every fourth layer gated attention; dense or experts.

The order of a linear layer's heads is that of llama.cpp: q, k and v of all heads one after the other (the checkpoint of
Qwen3-Next has them key head by key head), and in Qwen 3.5 value head h uses the keys of head h modulo their number (in the
checkpoint, those that share keys come in succession).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..config import Config
from ..draft_layers import QWEN_NAMES
from ..model_spec import ModelSpec
from ..tensor_transforms import add_one, flatten, negated_exponential, reorder_columns, select_rows, unchanged
from .decoder_spec import DecoderSpec, LayerTensor
from .qwen import layers_with_experts

_FRACTION = {"partial_rotary_factor": 0.25}  # the default of the model's own code
_SECTIONS = [11, 11, 10]  # likewise
_INTERVAL = 4  # likewise


def qwen3next(config: Config, mla_layout: str) -> ModelSpec:
    """Qwen3-Next: experts, and a shared expert with a gate of its own, except in layers of mlp_only_layers."""
    spec, delta = delta_spec("qwen3next", config)
    has_experts = layers_with_experts(config)
    experts = shared_and_routed_experts(spec, normalised=config.flag("norm_topk_prob", True))

    def feed_forward(layer: int) -> list[LayerTensor]:
        return experts if has_experts(layer) else spec.gated_mlp()

    return delta.build(delta.joined_projections(), feed_forward)


def qwen35(config: Config, mla_layout: str) -> ModelSpec:
    """Qwen 3.5 and 3.6, the dense models."""
    spec, delta = delta_spec("qwen35", config)
    return delta.build(delta.separate_projections(), lambda layer: spec.gated_mlp())


def qwen35moe(config: Config, mla_layout: str) -> ModelSpec:
    """Qwen 3.5 and 3.6, mixtures of experts: as `qwen3next`, with experts in every layer."""
    rows = config.get("moe_intermediate_size")
    spec, delta = delta_spec("qwen35moe", config.with_defaults({"intermediate_size": rows}))
    experts = shared_and_routed_experts(spec, normalised=True)
    return delta.build(delta.separate_projections(), lambda layer: experts)


def delta_spec(architecture: str, config: Config) -> tuple[DecoderSpec, DeltaNet]:
    """What all of these models have in common."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec(architecture, config, rope=config.with_defaults(_FRACTION))
    if architecture != "qwen3next":
        sections = spec.rope.settings.get("mrope_section") or _SECTIONS
        if not isinstance(sections, list) or any(type(size) is not int for size in sections) or not 0 < len(sections) <= 4:
            raise config.error(f"mrope_section is {sections!r:.60}; up to four sizes are needed")
        spec.metadata[f"{architecture}.rope.dimension_sections"] = np.array([*sections, 0, 0, 0][:4], np.int32)
    return spec, DeltaNet(spec, tiled=architecture != "qwen3next")


def shared_and_routed_experts(spec: DecoderSpec, *, normalised: bool) -> list[LayerTensor]:
    """The tensors of a layer with experts and a shared expert; adds their metadata."""
    rows, shared_rows = (spec.config.integer(f"{kind}_intermediate_size") for kind in ("moe", "shared_expert"))
    n = spec.add_expert_counts("num_experts", rows)
    spec.add_uint32({"expert_shared_feed_forward_length": shared_rows})
    spec.metadata[f"{spec.architecture}.expert_weights_norm"] = normalised
    return [
        *spec.experts(n, rows),
        LayerTensor("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", (1, spec.hidden_size), flatten),
        *spec.gated_mlp("mlp.shared_expert", shared_rows, "_shexp"),
    ]


class DeltaNet:
    """A model's linear attention: sizes from config.json, metadata, tensors. tiled: the order of value heads in the GGUF."""

    def __init__(self, spec: DecoderSpec, *, tiled: bool):
        """Raises FormatError for value heads that cannot share keys evenly, and for unknown layer_types."""
        config, self.spec = spec.config, spec
        self.n_k, self.n_v = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
        self.k_width, self.v_width = config.integer("linear_key_head_dim", 128), config.integer("linear_value_head_dim", 128)
        self.kernel = config.integer("linear_conv_kernel_dim", 4)
        if self.n_v % self.n_k:
            raise config.error(f"{self.n_v} value heads (linear_num_value_heads) cannot share {self.n_k} keys evenly")
        self.keys, self.values = self.n_k * self.k_width, self.n_v * self.v_width
        heads = np.arange(self.n_v)
        # Value head of the GGUF -> of the checkpoint.
        self.order = heads % self.n_k * (self.n_v // self.n_k) + heads // self.n_k if tiled else heads
        spec.add_uint32(
            {
                "ssm.conv_kernel": self.kernel,
                "ssm.state_size": self.k_width,
                "ssm.group_count": self.n_k,
                "ssm.time_step_rank": self.n_v,
                "ssm.inner_size": self.values,
            }
        )
        if tiled and self.k_width != self.v_width:
            spec.notes.append("llama.cpp reads this architecture with keys and values of one size only")
        self.pattern_key = ""  # of the metadata that say which layers are linear, where the interval does not
        self.is_linear = self._linear_layers()

    def _linear_layers(self) -> list[bool]:
        """For each layer whether its attention is linear; adds the metadata that say so."""
        spec, config = self.spec, self.spec.config
        interval = config.integer("full_attention_interval", _INTERVAL)
        types = config.get("layer_types")
        if types is None:
            types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(spec.n_layers)]
        known = {"linear_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != spec.n_layers or any(str(t) not in known for t in types):
            raise config.error(f"layer_types is {types!r:.80}; one of {' and '.join(known)} is needed for each layer")
        linear = [known[t] for t in types]
        interval = linear.index(False) + 1 if False in linear else spec.n_layers + 1
        spec.add_uint32({"full_attention_interval": interval})
        if linear != [(i + 1) % interval != 0 for i in range(spec.n_layers)]:
            self.pattern_key = f"{spec.architecture}.attention.recurrent_layers"
            spec.metadata[self.pattern_key] = np.array(linear, bool)
            spec.notes.append("llama.cpp does not know of this order of linear and other attention in this architecture")
        return linear

    def _value_rows(self, rows: np.ndarray, width: int) -> np.ndarray:
        """Rows of value heads, `width` each, in the GGUF -> in the checkpoint."""
        head, row = np.divmod(rows, width)
        return self.order[head] * width + row

    def _qkv_rows(self, rows: np.ndarray) -> np.ndarray:
        """Rows of all queries, keys and values in the GGUF -> in a checkpoint that has them in this order, too."""
        first = 2 * self.keys
        return np.where(rows < first, rows, first + self._value_rows(np.maximum(rows - first, 0), self.v_width))

    def _joined_rows(self, rows: np.ndarray) -> np.ndarray:
        """The same -> rows of in_proj_qkvz: q, k, v and z of one key head after the other."""
        shared = self.n_v // self.n_k * self.v_width  # rows of the values of a key head
        block = 2 * (self.k_width + shared)
        part = np.minimum(rows // self.keys, 2)  # 0: queries, 1: keys, 2: values
        width = np.where(part == 2, shared, self.k_width)
        head, row = np.divmod(rows - part * self.keys, width)
        return head * block + part * self.k_width + row

    def _joined_gate_rows(self, rows: np.ndarray) -> np.ndarray:
        shared = self.n_v // self.n_k * self.v_width
        head, row = np.divmod(rows, shared)
        return head * 2 * (self.k_width + shared) + 2 * self.k_width + shared + row

    def joined_projections(self) -> list[LayerTensor]:
        """attn_qkv, attn_gate and ssm_ba from in_proj_qkvz and in_proj_ba."""
        shape = (2 * self.keys + 2 * self.values, self.spec.hidden_size)
        source, ba = "linear_attn.in_proj_qkvz.weight", (2 * self.n_v, self.spec.hidden_size)
        rows = 2 * self.keys + self.values
        return [
            LayerTensor("attn_qkv.weight", source, shape, select_rows(0, rows, self._joined_rows)),
            LayerTensor("attn_gate.weight", source, shape, select_rows(0, self.values, self._joined_gate_rows)),
            LayerTensor("ssm_ba.weight", "linear_attn.in_proj_ba.weight", ba),
        ]

    def separate_projections(self) -> list[LayerTensor]:
        """attn_qkv, attn_gate, ssm_beta and ssm_alpha from in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
        channels, hidden = 2 * self.keys + self.values, self.spec.hidden_size

        def values(name: str, part: str, width: int) -> LayerTensor:
            rows = self.n_v * width
            order = select_rows(0, rows, lambda at: self._value_rows(at, width))
            return LayerTensor(f"{name}.weight", f"linear_attn.in_proj_{part}.weight", (rows, hidden), order)

        qkv = select_rows(0, channels, self._qkv_rows)
        return [
            LayerTensor("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", (channels, hidden), qkv),
            values("attn_gate", "z", self.v_width),
            values("ssm_beta", "b", 1),
            values("ssm_alpha", "a", 1),
        ]

    def linear_attention(self, projections: list[LayerTensor]) -> list[LayerTensor]:
        """The tensors of a linear layer."""
        spec, channels, columns = self.spec, 2 * self.keys + self.values, np.arange(self.values)
        return [
            *projections,
            LayerTensor(
                "ssm_conv1d.weight",
                "linear_attn.conv1d.weight",
                (channels, 1, self.kernel),
                select_rows(0, channels, self._qkv_rows),
            ),
            LayerTensor("ssm_a", "linear_attn.A_log", (self.n_v,), negated_exponential(self.order)),
            LayerTensor("ssm_dt.bias", "linear_attn.dt_bias", (self.n_v,), select_rows(0, self.n_v, lambda at: self.order[at])),
            spec.norm("ssm_norm", "linear_attn.norm", self.v_width),
            LayerTensor(
                "ssm_out.weight",
                "linear_attn.out_proj.weight",
                (spec.hidden_size, self.values),
                unchanged
                if (self.order[1:] > self.order[:-1]).all()
                else reorder_columns(self._value_rows(columns, self.v_width)),
            ),
        ]

    def attention(self) -> list[LayerTensor]:
        """The tensors of a layer of gated attention."""
        bias = self.spec.config.flag("attention_bias", False)
        return self.spec.attention(bias=bias, output_bias=bias, head_norms=add_one, gated=True)

    def build(self, projections: list[LayerTensor], feed_forward: Callable[[int], list[LayerTensor]]) -> ModelSpec:
        """feed_forward: layer number -> the tensors of its feed-forward block."""
        spec, linear_attention, attention = self.spec, self.linear_attention(projections), self.attention()
        norms = [
            spec.norm("attn_norm", "input_layernorm", transform=add_one),
            spec.norm("post_attention_norm", "post_attention_layernorm", transform=add_one),
        ]

        def layer(number: int) -> list[LayerTensor]:
            mixing = linear_attention if self.is_linear[number] else attention
            return [norms[0], *mixing, norms[1], *feed_forward(number)]

        spec.renamed_prefixes["model.mtp."] = "mtp."
        # One layer, of attention whatever its number; the config of Qwen3-Next does not say that there is one.
        pattern = {self.pattern_key: np.array([*self.is_linear, False], bool)} if self.pattern_key else {}
        spec.add_draft_layers(
            [norms[0], *attention, norms[1], *feed_forward(spec.n_layers)],
            count=1,
            source=lambda number: "mtp.layers.0",
            parts=lambda number: "mtp",
            names=QWEN_NAMES,
            norm_transform=add_one,
            prefixes=("mtp.",),
            metadata=pattern,
            refused_by="ik_llama.cpp" if spec.architecture == "qwen3next" else "",
        )
        return spec.build(layer, norm_transform=add_one)
