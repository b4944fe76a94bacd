"""What decoders with grouped-query attention have in common: the outline that a family's module fills in.

    outline = Outline("qwen3", config)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(head_norms=True),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.gated(),
    ]
    return outline.describe(layer)

A layer is a list of parts, each the name of a tensor in the GGUF (after blk.N.), in the checkpoint (after the layer's own
prefix), and its shape. The outline knows the sizes from config.json and writes the keys that such models have in common; what
else a family has goes into `metadata`, `notes` and `left_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..checkpoint import Description, Wanted
from ..config import Config
from ..metadata import RMS_NORM, common, counts, llama3_factors, longrope, read_rope, rope_scaling
from ..tensor_transforms import Edit, constant, half_rows, interleaved, plain, stack_rows, stacked

ATTENTION = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "output": "self_attn.o_proj"}


@dataclass(frozen=True)
class Part:
    """A kind of tensor that each layer has: full names, with {} in `source` for the number of one of `experts`."""

    name: str
    source: str
    shape: tuple[int, ...]
    edit: Edit = plain
    experts: int = 0
    instead: Part | None = None

    def wanted(self, block: str, layer: str) -> Wanted:
        numbers = range(self.experts) if self.experts else (0,)
        sources = tuple(f"{layer}.{self.source.format(number)}" for number in numbers)
        instead = self.instead.wanted(block, layer) if self.instead else None
        return Wanted(f"{block}.{self.name}", sources, self.shape, self.edit, instead=instead)


@dataclass(frozen=True)
class Names:
    """Where a checkpoint keeps its layers ({}: the number), and what stands around them."""

    layer: str = "model.layers.{}"
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


def linear(name: str, source: str, shape: tuple[int, int], *, bias: bool = False, edit: Edit = plain) -> list[Part]:
    """A matrix NAME.weight [rows, columns] and, if it has one, NAME.bias [rows]; the edit is for both."""
    parts = [Part(f"{name}.weight", f"{source}.weight", shape, edit)]
    return [*parts, Part(f"{name}.bias", f"{source}.bias", shape[:1], edit)] if bias else parts


class Outline:
    """Sizes, metadata and parts of one model.

    inner, experts, ...   elements and numbers from config.json; `rotary` are the rotated elements of a head
    metadata, notes       to be added to; left_out and renamed are those of Description
    """

    def __init__(
        self,
        architecture: str,
        config: Config,
        *,
        keys: Mapping[str, str] | None = None,
        norm: tuple[str, str] = RMS_NORM,
        rope: Config | None = None,
        rope_kinds: Mapping[str, str] | None = None,
    ):
        """keys: further or other keys of the GGUF and of config.json than metadata.COMMON has. rope: where to look for rotary
        settings, if not in config; rope_kinds: scalings that this family has beside the usual. Raises FormatError for a
        config.json whose sizes cannot be.
        """
        self.architecture, self.config = architecture, config
        self.notes: list[str] = []
        self.left_out: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.hidden, self.n_vocab = config.integer("hidden_size"), config.integer("vocab_size")
        self.inner = config.integer((keys or {}).get("feed_forward_length", "intermediate_size"))
        self.layers = config.count("num_hidden_layers")
        self.heads = config.integer("num_attention_heads")
        self.heads_kv = config.integer("num_key_value_heads", self.heads)
        self.head = config.integer("head_dim", self.hidden // self.heads)
        if self.heads % self.heads_kv or self.head % 2:
            raise config.fail(f"{self.heads} heads over {self.heads_kv} key-value heads of {self.head} elements cannot be")
        self.rope = read_rope(rope or config, rope_kinds)
        self.rotary = int(self.head * self.rope.part)
        self.metadata = common(architecture, config, self.rope, keys, norm)
        self.count({"attention.head_count_kv": self.heads_kv, "rope.dimension_count": self.rotary})
        if config.get("head_dim") is not None:
            self.count({"attention.key_length": self.head, "attention.value_length": self.head})
        self.metadata |= rope_scaling(architecture, self.rope, self.notes)
        self.factors: dict[str, np.ndarray] = {}
        if self.rope.kind == "longrope":
            keys, self.factors = longrope(architecture, config, self.rope, self.rotary)
            self.metadata |= keys

    def count(self, values: Mapping[str, int]) -> None:
        """Adds uint32 keys, named as they are after the architecture."""
        self.metadata |= counts(self.architecture, values)

    def real(self, values: Mapping[str, float]) -> None:
        """As `count`, for float32 keys."""
        self.metadata |= {f"{self.architecture}.{key}": np.float32(value) for key, value in values.items()}

    def window(self, is_local: Sequence[bool], period: int = 0) -> None:
        """Adds the sliding window's keys. is_local: for each layer, whether it sees sliding_window tokens instead of all.

        period: what readers take for granted: all but every period-th layer are local (0: all are). Where layers are otherwise
        a flag for each is written (attention.sliding_window_pattern).
        """
        if not any(is_local):
            return
        size = self.config.integer("sliding_window")
        self.count({"attention.sliding_window": size})
        if list(is_local) != [period == 0 or (i + 1) % period != 0 for i in range(self.layers)]:
            self.metadata[f"{self.architecture}.attention.sliding_window_pattern"] = np.array(is_local, bool)

    def layer_types(self, default: Callable[[int], bool]) -> list[bool]:
        """For each layer whether it is local: by config.json's layer_types, else by default(number of the layer)."""
        kinds = self.config.get("layer_types")
        if kinds is None:
            return [default(i) for i in range(self.layers)]
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(kinds, list) or len(kinds) != self.layers or any(str(kind) not in known for kind in kinds):
            raise self.config.fail(f"layer_types is {kinds!r:.80}; one of {' and '.join(known)} is needed for each layer")
        return [known[kind] for kind in kinds]

    def norm(self, name: str, source: str, size: int | None = None, edit: Edit = plain) -> Part:
        """The weights of a normalisation, of the width of the model unless told otherwise."""
        return Part(f"{name}.weight", f"{source}.weight", (size or self.hidden,), edit)

    def layer_norm(self, name: str, source: str, edit: Edit = plain) -> list[Part]:
        """Weights and bias of a LayerNorm of the width of the model; the edit is for the weights."""
        return [self.norm(name, source, edit=edit), Part(f"{name}.bias", f"{source}.bias", (self.hidden,))]

    def attention(
        self,
        names: Mapping[str, str] | None = None,
        *,
        bias: bool = False,
        output_bias: bool = False,
        pairs: bool = False,
        head_norms: Edit | None = None,
    ) -> list[Part]:
        """attn_q, attn_k, attn_v and attn_output, from matrices of their own.

        names: of q, k, v and output in the checkpoint; bias: q, k and v have one; pairs: the reader rotates neighbouring pairs;
        head_norms: the edit of q_norm and k_norm, which normalise each head, in a model that has them.
        """
        names = names or ATTENTION
        width, width_kv = self.heads * self.head, self.heads_kv * self.head
        if pairs and self.rotary != self.head:
            raise self.config.fail("rotating a part of each head cannot be converted for this architecture")
        edits = (interleaved(self.heads), interleaved(self.heads_kv)) if pairs else (plain, plain)
        parts = [
            *linear("attn_q", names["q"], (width, self.hidden), bias=bias, edit=edits[0]),
            *linear("attn_k", names["k"], (width_kv, self.hidden), bias=bias, edit=edits[1]),
            *linear("attn_v", names["v"], (width_kv, self.hidden), bias=bias),
            *linear("attn_output", names["output"], (self.hidden, width), bias=output_bias),
        ]
        if head_norms is not None:
            parts += [self.norm(f"attn_{part}_norm", f"self_attn.{part}_norm", self.head, head_norms) for part in "qk"]
        return parts

    def gated(self, source: str = "mlp", inner: int | None = None, suffix: str = "", *, bias: bool = False) -> list[Part]:
        """A feed-forward block of gate, up and down: ffn_{gate,up,down}SUFFIX from SOURCE.{gate,up,down}_proj."""
        rows = inner or self.inner
        shapes = {"gate": (rows, self.hidden), "up": (rows, self.hidden), "down": (self.hidden, rows)}
        parts = (linear(f"ffn_{p}{suffix}", f"{source}.{p}_proj", s, bias=bias) for p, s in shapes.items())
        return [part for pair in parts for part in pair]

    def routed(self, n: int, inner: int, sources: Mapping[str, str], router: str = "mlp.gate") -> list[Part]:
        """The router and stacks of n experts; sources: of gate, up and down in the checkpoint, {} for the expert's number."""
        shapes = {"gate": (inner, self.hidden), "up": (inner, self.hidden), "down": (self.hidden, inner)}
        parts = [Part("ffn_gate_inp.weight", f"{router}.weight", (n, self.hidden))]
        stack = sources["up"].partition(".{}")[0]
        both, whole = (n, 2 * inner, self.hidden), (n, self.hidden, inner)
        # As transformers keeps them in memory: all experts in one tensor, the gates' rows in front of the ups'.
        fused = {
            "gate": Part("ffn_gate_exps.weight", f"{stack}.gate_up_proj", both, half_rows(0)),
            "up": Part("ffn_up_exps.weight", f"{stack}.gate_up_proj", both, half_rows(1)),
            "down": Part("ffn_down_exps.weight", f"{stack}.down_proj", whole, stack_rows()),
        }
        for p, s in shapes.items():
            parts.append(Part(f"ffn_{p}_exps.weight", f"{sources[p]}.weight", s, stacked, n, fused[p]))
        return parts

    def expert_counts(
        self, n: str, inner: int | None = None, used: str = "num_experts_per_tok", layers: int | None = None
    ) -> int:
        """Adds the keys of experts: n and used are keys of config.json, inner the width of one. Returns how many there are.

        layers: how many have experts that are stored one by one, if not all have (0: experts are stored in stacks).
        """
        times = self.layers if layers is None else layers
        experts = self.config.count(n, times=times, where=f" in each of {times} layers")
        chosen = self.config.integer(used)
        if chosen > experts:
            raise self.config.fail(f"{used} is {chosen}, more than {n}, which is {experts}")
        self.count({"expert_count": experts, "expert_used_count": chosen})
        if inner:
            self.count({"expert_feed_forward_length": inner})
        return experts

    def describe(
        self,
        layer: list[Part] | Callable[[int], list[Part]],
        names: Names | None = None,
        *,
        norm_edit: Edit = plain,
        norm_bias: bool = False,
        tied: bool = False,
    ) -> Description:
        """layer: the parts of every layer, or of the layer of a number. tied: what an absent tie_word_embeddings means.

        norm_bias: the output's norm has one.
        """
        names = names or Names()
        config, shape = self.config, (self.n_vocab, self.hidden)
        is_tied = config.flag("tie_word_embeddings", tied)
        wanted: list[Wanted] = []
        if self.rope.kind == "llama3":
            factors = partial(llama3_factors, config, self.rope, self.rotary)
            wanted.append(Wanted("rope_freqs.weight", (), (self.rotary // 2,), constant(factors)))
        for name, values in self.factors.items():
            wanted.append(Wanted(name, (), values.shape, constant(lambda values=values: values)))
        wanted.append(Wanted("token_embd.weight", (names.embedding,), shape, or_else=names.head if is_tied else None))
        for i in range(self.layers):
            parts = layer if isinstance(layer, list) else layer(i)
            wanted += [part.wanted(f"blk.{i}", names.layer.format(i)) for part in parts]
        wanted.append(Wanted("output_norm.weight", (names.norm,), (self.hidden,), norm_edit))
        if norm_bias:
            wanted.append(Wanted("output_norm.bias", (f"{names.norm.removesuffix('weight')}bias",), (self.hidden,)))
        left_out = dict(self.left_out)
        if is_tied:
            left_out[names.head] = "output tied to the embeddings"
        else:
            wanted.append(Wanted("output.weight", (names.head,), shape))
        return Description(self.architecture, self.metadata, wanted, self.n_vocab, left_out, self.notes, self.renamed)
