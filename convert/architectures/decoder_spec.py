"""What decoders with grouped-query attention have in common: `DecoderSpec`, which a family's function fills in.

    spec = DecoderSpec("qwen3", config)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(head_norms=unchanged),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *spec.gated_mlp(),
    ]
    return spec.build(layer)

A layer is a list of `LayerTensor`: the tensor's name in the GGUF (after blk.N.), in the checkpoint (after the layer's
prefix), and its shape. The spec takes the sizes from config.json and writes the metadata that such models share; what else a
family needs it adds with `add_uint32`, `add_float32`, or directly to `metadata`, `notes` and `skipped_prefixes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from ...data_classes import dataclass
from ..config import Config
from ..draft_layers import DEEPSEEK_NAMES, nextn_tensors
from ..expert_transforms import expert_half, expert_rows, stack_experts, transposed_expert_half, transposed_expert_rows
from ..metadata import RMS_NORM, hparam_keys, uint32_keys
from ..model_spec import ModelSpec, TensorSpec
from ..rope import OTHER_NAMES, llama3_factors, longrope, rope_of, rope_scaling_keys
from ..tensor_spec import DraftLayer, DraftLayers
from ..tensor_transforms import Transform, computed, permute_heads, unchanged

ATTENTION = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "output": "self_attn.o_proj"}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}  # the usual names; {}: the expert
MAX_EXPERTS = 1 << 14  # beyond all models; a damaged file must not cost memory
SIGMOID_GATING = 2  # expert_gating_func in the GGUF


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that every layer has.

    name         in the GGUF, without blk.N.
    source       in the checkpoint, without the layer's prefix; with n_experts, {} stands for the expert's number
    n_experts    how many sources it is stacked from; 0: it has one source
    alternative  the same tensor from other sources (see `TensorSpec`)
    is_optional  the GGUF lacks it where the checkpoint does
    """

    name: str
    source: str
    shape: tuple[int, ...]
    transform: Transform = unchanged
    n_experts: int = 0
    alternative: LayerTensor | None = None
    is_optional: bool = False

    def spec(self, block: str, layer: str) -> TensorSpec:
        """The tensor of one layer: `block` is its prefix in the GGUF, `layer` in the checkpoint."""
        experts = range(self.n_experts) if self.n_experts else (0,)
        sources = tuple(f"{layer}.{self.source.format(expert)}" for expert in experts)
        alternative = self.alternative.spec(block, layer) if self.alternative else None
        return TensorSpec(f"{block}.{self.name}", sources, self.shape, self.transform, None, alternative, self.is_optional)


@dataclass(frozen=True)
class CheckpointNames:
    """The names in the checkpoint of what surrounds the layers, and the layers' prefix ({}: the layer's number)."""

    layer: str = "model.layers.{}"
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


def linear(
    name: str, source: str, shape: tuple[int, int], *, bias: bool = False, transform: Transform = unchanged
) -> list[LayerTensor]:
    """A matrix NAME.weight [rows, columns] and, if `bias`, NAME.bias [rows]; the transform is applied to both."""
    tensors = [LayerTensor(f"{name}.weight", f"{source}.weight", shape, transform)]
    return [*tensors, LayerTensor(f"{name}.bias", f"{source}.bias", shape[:1], transform)] if bias else tensors


def expert_stacks(
    n: int, rows: int, hidden_size: int, sources: Mapping[str, str] = EXPERTS, *, may_be_transposed: bool = False
) -> list[LayerTensor]:
    """ffn_{gate,up,down}_exps of n experts with `rows` rows of gate and up each.

    The checkpoint has them one by one (`sources`) or, as transformers in memory, all in one tensor, the rows of gate first."""
    stack = sources["up"].partition(".{}")[0]
    gate_up_shape, down_shape = (n, 2 * rows, hidden_size), (n, hidden_size, rows)
    tensors = []
    for p, source, shape, transform, transposed in (
        ("gate", "gate_up_proj", gate_up_shape, expert_half(0), transposed_expert_half(0)),
        ("up", "gate_up_proj", gate_up_shape, expert_half(1), transposed_expert_half(1)),
        ("down", "down_proj", down_shape, expert_rows(), transposed_expert_rows()),
    ):
        name, fused = f"ffn_{p}_exps.weight", f"{stack}.{source}"
        other = LayerTensor(name, fused, (n, *shape[:0:-1]), transposed) if may_be_transposed else None
        in_stack = LayerTensor(name, fused, shape, transform, alternative=other)
        one = (hidden_size, rows) if p == "down" else (rows, hidden_size)
        tensors.append(LayerTensor(name, f"{sources[p]}.weight", one, stack_experts, n, in_stack))
    return tensors


class DecoderSpec:
    """Sizes, metadata and layer tensors of one model.

    hidden_size, intermediate_size, vocab_size, n_layers, n_heads, n_kv_heads, head_dim  from config.json
    rotary_dim                                    elements of a head that are rotated
    rope                                          the rotary embedding
    metadata, notes                               may be added to
    skipped_prefixes, renamed_prefixes, stored_values  as in `ModelSpec`; may be added to
    draft                                         as in `ModelSpec`; see `add_draft_layers`
    """

    def __init__(
        self,
        architecture: str,
        config: Config,
        *,
        keys: Mapping[str, str] | None = None,
        norm: tuple[str, str] = RMS_NORM,
        rope: Config | None = None,
        rope_names: Mapping[str, str] = OTHER_NAMES,
    ):
        """keys: metadata keys besides `metadata.HPARAMS`, or other keys of config.json for them; norm: those of the norms'
        epsilon; rope: the config with the rotary settings, by default `config`; rope_names: see `read_rope`.

        Raises FormatError for missing or impossible sizes.
        """
        self.architecture, self.config = architecture, config
        self.notes: list[str] = []
        self.skipped_prefixes: dict[str, str] = {}
        self.renamed_prefixes: dict[str, str] = {}
        self.stored_values: dict[str, tuple[str, ...]] = {}
        self.draft: DraftLayers | None = None
        self.hidden_size, self.vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.intermediate_size = config.integer((keys or {}).get("feed_forward_length", "intermediate_size"))
        self.n_layers = config.count("num_hidden_layers")
        self.n_heads = config.integer("num_attention_heads")
        self.n_kv_heads = config.integer("num_key_value_heads", self.n_heads)
        self.head_dim = config.integer("head_dim", self.hidden_size // self.n_heads)
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise config.error(
                f"{self.n_heads} heads over {self.n_kv_heads} key-value heads of {self.head_dim} elements cannot be"
            )
        self.rope = rope_of(architecture, rope or config, rope_names)
        self.rotary_dim = int(self.head_dim * self.rope.fraction)
        self.metadata = hparam_keys(architecture, config, self.rope, keys, norm)
        self.add_uint32({"attention.head_count_kv": self.n_kv_heads, "rope.dimension_count": self.rotary_dim})
        if config.get("head_dim") is not None:
            self.add_uint32({"attention.key_length": self.head_dim, "attention.value_length": self.head_dim})
        self.metadata |= rope_scaling_keys(architecture, self.rope, self.notes)
        self._rope_factors: dict[str, np.ndarray] = {}
        if self.rope.scaling == "longrope":
            longrope_keys, self._rope_factors = longrope(architecture, config, self.rope, self.rotary_dim)
            self.metadata |= longrope_keys

    def add_uint32(self, values: Mapping[str, int]) -> None:
        """Adds uint32 metadata; keys are without the architecture."""
        self.metadata |= uint32_keys(self.architecture, values)

    def add_float32(self, values: Mapping[str, float]) -> None:
        """Adds float32 metadata; keys are without the architecture."""
        self.metadata |= {f"{self.architecture}.{key}": np.float32(value) for key, value in values.items()}

    def add_sliding_window(self, is_local: Sequence[bool], default_period: int = 0, *, always: bool = False) -> None:
        """Adds the metadata of a sliding window; is_local: for each layer, whether its attention is limited to the window.

        default_period: the pattern that llama.cpp assumes for the architecture: every default_period-th layer is global (0:
        none is). For another pattern a flag per layer is written (attention.sliding_window_pattern). always: also if no layer
        has a window, since readers then treat global layers otherwise.
        """
        if not any(is_local) and not always:
            return
        size = self.config.integer("sliding_window")
        self.add_uint32({"attention.sliding_window": size})
        self.metadata |= self.window_pattern(is_local, default_period)

    def window_pattern(self, is_local: Sequence[bool], default_period: int = 0) -> dict[str, np.ndarray]:
        """The metadata of a pattern of windows, as in `add_sliding_window`."""
        default = [default_period == 0 or (i + 1) % default_period != 0 for i in range(len(is_local))]
        if list(is_local) == default:
            return {}
        return {f"{self.architecture}.attention.sliding_window_pattern": np.array(is_local, bool)}

    def local_layers(self, default: Callable[[int], bool]) -> list[bool]:
        """For each layer whether its attention is local: from config.json's layer_types, else default(layer number).

        Raises FormatError for other types of layers.
        """
        types = self.config.get("layer_types")
        if types is None:
            return [default(i) for i in range(self.n_layers)]
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != self.n_layers or any(str(t) not in known for t in types):
            raise self.config.error(f"layer_types is {types!r:.80}; one of {' and '.join(known)} is needed for each layer")
        return [known[t] for t in types]

    def norm(self, name: str, source: str, size: int | None = None, transform: Transform = unchanged) -> LayerTensor:
        """The weight of an RMSNorm, of hidden_size elements by default."""
        return LayerTensor(f"{name}.weight", f"{source}.weight", (size or self.hidden_size,), transform)

    def layer_norm(self, name: str, source: str, transform: Transform = unchanged) -> list[LayerTensor]:
        """Weight and bias of a LayerNorm over hidden_size elements; the transform is applied to the weight."""
        bias = LayerTensor(f"{name}.bias", f"{source}.bias", (self.hidden_size,))
        return [self.norm(name, source, transform=transform), bias]

    def attention(
        self,
        names: Mapping[str, str] | None = None,
        *,
        bias: bool = False,
        output_bias: bool = False,
        permute: bool = False,
        head_norms: Transform | None = None,
        gated: bool = False,
    ) -> list[LayerTensor]:
        """attn_q, attn_k, attn_v and attn_output, each from its own matrix.

        names: of q, k, v and output in the checkpoint. bias: q, k and v have biases. permute: the GGUF's architecture rotates
        neighbouring rows (see `permute_heads`). head_norms: the transform of q_norm and k_norm, in a model that normalises
        heads. gated: each head's queries are followed by as many rows of a gate.
        """
        names = names or ATTENTION
        q_rows, kv_rows = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if permute and self.rotary_dim != self.head_dim:
            raise self.config.error("rotating a part of each head cannot be converted for this architecture")
        transforms = (permute_heads(self.n_heads), permute_heads(self.n_kv_heads)) if permute else (unchanged, unchanged)
        tensors = [
            *linear("attn_q", names["q"], ((1 + gated) * q_rows, self.hidden_size), bias=bias, transform=transforms[0]),
            *linear("attn_k", names["k"], (kv_rows, self.hidden_size), bias=bias, transform=transforms[1]),
            *linear("attn_v", names["v"], (kv_rows, self.hidden_size), bias=bias),
            *linear("attn_output", names["output"], (self.hidden_size, q_rows), bias=output_bias),
        ]
        if head_norms is not None:
            tensors += [self.norm(f"attn_{p}_norm", f"self_attn.{p}_norm", self.head_dim, head_norms) for p in "qk"]
        return tensors

    def gated_mlp(
        self, source: str = "mlp", rows: int | None = None, suffix: str = "", *, bias: bool = False
    ) -> list[LayerTensor]:
        """A gated feed-forward block: ffn_{gate,up,down}SUFFIX from SOURCE.{gate,up,down}_proj.

        rows: of gate and up, by default intermediate_size.
        """
        shapes = self._mlp_shapes(rows or self.intermediate_size)
        matrices = (linear(f"ffn_{p}{suffix}", f"{source}.{p}_proj", s, bias=bias) for p, s in shapes.items())
        return [tensor for matrix in matrices for tensor in matrix]

    def experts(
        self,
        n: int,
        rows: int,
        sources: Mapping[str, str] = EXPERTS,
        router: str = "mlp.gate",
        *,
        may_be_transposed: bool = False,
    ) -> list[LayerTensor]:
        """The router and the stacked gate, up and down matrices of n experts.

        rows: of an expert's gate and up; sources: names in the checkpoint as in EXPERTS. may_be_transposed: some checkpoints
        have stacks of transposed matrices, as their shape shows.
        """
        stacks = expert_stacks(n, rows, self.hidden_size, sources, may_be_transposed=may_be_transposed)
        return [LayerTensor("ffn_gate_inp.weight", f"{router}.weight", (n, self.hidden_size)), *stacks]

    def _mlp_shapes(self, rows: int) -> dict[str, tuple[int, int]]:
        return {"gate": (rows, self.hidden_size), "up": (rows, self.hidden_size), "down": (self.hidden_size, rows)}

    def add_expert_counts(
        self, n_key: str, rows: int | None = None, used_key: str = "num_experts_per_tok", layers: int | None = None
    ) -> int:
        """Adds the metadata of experts and returns their number.

        n_key, used_key: keys of config.json for the number of experts and of those used per token; rows: of an expert's gate
        and up, if it is to be written; layers: how many layers have experts stored one by one, by default all (0: they are
        stored in stacks), which bounds a number that can be right. Raises FormatError for numbers that cannot be.
        """
        experts = self.config.count(n_key, layers=self.n_layers if layers is None else layers)
        used = self.config.integer(used_key)
        if experts > MAX_EXPERTS:
            raise self.config.error(f"{n_key} is {experts}; at most {MAX_EXPERTS} can be converted")
        if used > experts:
            raise self.config.error(f"{used_key} is {used}, more than {n_key}, which is {experts}")
        self.add_uint32({"expert_count": experts, "expert_used_count": used})
        if rows:
            self.add_uint32({"expert_feed_forward_length": rows})
        return experts

    def add_draft_layers(
        self,
        layer: list[LayerTensor] | Callable[[int], list[LayerTensor]],
        *,
        count: int | None = None,
        source: Callable[[int], str] | None = None,
        parts: Callable[[int], str] | None = None,
        names: Mapping[str, str] = DEEPSEEK_NAMES,
        norm_transform: Transform = unchanged,
        prefixes: tuple[str, ...] = (),
        metadata: Mapping[str, np.ndarray] | None = None,
        refused_by: str = "",
    ) -> None:
        """The layers after the last one that draft further tokens.

        layer     the tensors of each, or a function from its number in the GGUF to them
        count     how many, by default num_nextn_predict_layers
        source    number in the GGUF -> prefix in the checkpoint, by default model.layers.NUMBER
        parts     number -> prefix of the parts that join embedding and hidden state, by default the layer's; names: theirs
        prefixes, metadata, refused_by  as in `DraftLayers`; prefixes are by default those of the layers
        """
        count = self.config.count("num_nextn_predict_layers", 0, minimum=0) if count is None else count
        source = source or "model.layers.{}".format
        layers = []
        for number in range(self.n_layers, self.n_layers + count):
            block, own = f"blk.{number}", source(number)
            nextn, optional = nextn_tensors(
                block, (parts or source)(number), (self.vocab_size, self.hidden_size), names, norm_transform
            )
            tensors = [tensor.spec(block, own) for tensor in (layer if isinstance(layer, list) else layer(number))]
            layers.append(DraftLayer(f"{own}.", (*tensors, *nextn), tuple(optional)))
        if count:
            prefixes = prefixes or tuple(each.prefix for each in layers)
            self.draft = DraftLayers(tuple(layers), prefixes, metadata or {}, refused_by)

    def skip_prediction_layers(self, count: int, what: str = "multi-token prediction layers") -> None:
        """The `count` layers after the last one, for multi-token prediction, are left out; what: they are, for the user."""
        for number in range(self.n_layers, self.n_layers + count):
            self.skipped_prefixes[f"model.layers.{number}."] = what

    def build(
        self,
        layer: list[LayerTensor] | Callable[[int], list[LayerTensor]],
        names: CheckpointNames | None = None,
        *,
        norm_transform: Transform = unchanged,
        norm_bias: bool = False,
        has_norm: bool = True,
        head_bias: bool = False,
        output_norm: str = "output_norm",
        head_transform: Transform = unchanged,
        tied: bool = False,
        needs_output: bool = False,
    ) -> ModelSpec:
        """The complete model: embedding, layers, output norm and output.

        layer: the tensors of every layer, or a function from a layer's number to its tensors. norm_transform, norm_bias: of the
        output norm; output_norm: its name in the GGUF; has_norm: whether it has weights. head_transform, head_bias: of the
        output. tied: whether the output shares the embedding's weights if config.json has no tie_word_embeddings; needs_output:
        it is written all the same, as loaders of the architecture do without none.
        """
        names = names or CheckpointNames()
        config, shape = self.config, (self.vocab_size, self.hidden_size)
        is_tied = config.flag("tie_word_embeddings", tied)
        tensors: list[TensorSpec] = []
        if self.rope.scaling == "llama3":
            factors = partial(llama3_factors, config, self.rope, self.rotary_dim)
            tensors.append(TensorSpec("rope_freqs.weight", (), (self.rotary_dim // 2,), computed(factors)))
        for name, values in self._rope_factors.items():
            tensors.append(TensorSpec(name, (), values.shape, computed(lambda values=values: values)))
        tied_source = names.head if is_tied else None
        tensors.append(TensorSpec("token_embd.weight", (names.embedding,), shape, fallback_source=tied_source))
        for i in range(self.n_layers):
            layer_tensors = layer if isinstance(layer, list) else layer(i)
            tensors += [tensor.spec(f"blk.{i}", names.layer.format(i)) for tensor in layer_tensors]
        if has_norm:
            tensors.append(TensorSpec(f"{output_norm}.weight", (names.norm,), (self.hidden_size,), norm_transform))
        if norm_bias:
            bias = f"{names.norm.removesuffix('weight')}bias"
            tensors.append(TensorSpec(f"{output_norm}.bias", (bias,), (self.hidden_size,)))
        skipped_prefixes = dict(self.skipped_prefixes)
        if is_tied:
            skipped_prefixes[names.head] = "output tied to the embeddings"
            if needs_output:
                tensors.append(TensorSpec("output.weight", (names.embedding,), shape, head_transform, names.head))
        else:
            tensors.append(TensorSpec("output.weight", (names.head,), shape, head_transform))
        if head_bias:
            tensors.append(TensorSpec("output.bias", (f"{names.head.removesuffix('weight')}bias",), shape[:1]))
        return ModelSpec(
            self.architecture,
            self.metadata,
            tensors,
            self.vocab_size,
            skipped_prefixes,
            self.notes,
            self.renamed_prefixes,
            self.stored_values,
            draft=self.draft,
        )
