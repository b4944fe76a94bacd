"""Attention blocks, from the normalised input of a layer to what is added to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...formats import FormatError
from ..graph.values import RotaryEmbedding, StateSpec, Temperature
from ..hparams import HParams

if TYPE_CHECKING:
    from ..graph import GraphBuilder, Value


@dataclass(frozen=True)
class Heads:
    """Grouped-query attention: n query heads share n_kv keys and values; widths are elements per head."""

    n: int
    n_kv: int
    k_width: int
    v_width: int

    @classmethod
    def of(cls, hparams: HParams, layer: int = 0) -> Heads:
        """Raises FormatError where queries cannot share keys and values evenly."""
        n_embd, n_head = hparams.size("embedding_length"), hparams.of_layer("attention.head_count", layer)
        n_kv = hparams.of_layer("attention.head_count_kv", layer, n_head)
        if n_head % n_kv:
            raise FormatError(f"{hparams.path}: {n_head} heads cannot share {n_kv} keys and values evenly")
        k_width = hparams.size("attention.key_length", n_embd // n_head)
        return cls(n_head, n_kv, k_width, hparams.size("attention.value_length", n_embd // n_head))


@dataclass(frozen=True)
class RunIndexer:
    """Attention to selected runs of `block` keys (Qwen 4 Exp): the top_k complete runs whose mean keys fit `heads` queries of
    `width` numbers best, and the tokens of the run that is not complete."""

    heads: int
    width: int
    block: int
    top_k: int

    @classmethod
    def of(cls, hparams: HParams, layer: int) -> RunIndexer | None:
        """None for a layer whose keys are all seen. Raises FormatError for a number of keys that is not one of runs."""
        block = hparams.of_layer("attention.compress_ratios", layer, 0, 0)
        if not block:
            return None
        heads, width, keys = (hparams.size(f"attention.indexer.{k}") for k in ("head_count", "key_length", "top_k"))
        if keys % block:
            raise FormatError(f"{hparams.path}: {keys} selected keys (attention.indexer.top_k) are not runs of {block}")
        return cls(heads, width, block, keys // block)

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer keeps per sequence."""
        return {"index_run": (self.block, self.width)}

    def select(self, graph: GraphBuilder, x: Value, layer: int, rope: RotaryEmbedding, epsilon: float) -> Value:
        from ..graph.compressed_attention_ops import AverageRun

        prefix = f"blk.{layer}.indexer."
        q = graph.reshape(graph.linear(x, f"{prefix}q_proj", self.heads * self.width), self.heads, self.width)
        k = graph.linear(x, f"{prefix}k_proj", self.width)
        for state, shape in self.states.items():
            graph.cache.append(StateSpec(layer, state, shape))
            k = graph.append(AverageRun(graph.value(self.width), k, layer, state, self.block))
        q = graph.rope(graph.norm(q, f"{prefix}q_norm", epsilon), rope)
        k = graph.rope(graph.norm(k, f"{prefix}k_norm", epsilon), replace(rope, offset=1 - self.block))
        return graph.reshape(graph.select_keys(q, k, None, layer, self.top_k, self.block, open_run=True), 1, self.top_k + 1)


@dataclass(frozen=True)
class BlockIndexer:
    """MiniMax Sparse Attention: which top_k blocks of `block` keys each query sees, by queries of `heads` times `width` numbers
    and one key of that width per token. local: blocks up to the token's own that are always seen."""

    heads: int
    width: int
    block: int
    top_k: int
    local: int

    @classmethod
    def of(cls, hparams: HParams) -> BlockIndexer | None:
        """None where the metadata has no attention.indexer.block_size."""
        prefix = "attention.indexer."
        if f"{prefix}block_size" not in hparams:
            return None
        heads, width, block, top_k = (hparams.size(prefix + k) for k in ("head_count", "key_length", "block_size", "top_k"))
        return cls(heads, width, block, top_k, hparams.size(f"{prefix}local_blocks", 1, 0))

    def select(self, graph: GraphBuilder, x: Value, layer: int, rope: RotaryEmbedding, epsilon: float) -> Value:
        prefix = f"blk.{layer}.indexer."
        q = graph.reshape(graph.linear(x, f"{prefix}q_proj", self.heads * self.width), self.heads, self.width)
        k = graph.linear(x, f"{prefix}k_proj", self.width)
        q, k = (graph.rope(graph.norm(part, f"{prefix}{n}_norm", epsilon), rope) for n, part in (("q", q), ("k", k)))
        return graph.select_blocks(q, k, layer, block=self.block, top_k=self.top_k, local=self.local)


def grouped_attention(
    graph: GraphBuilder,
    x: Value,
    layer: int,
    heads: Heads,
    *,
    scale: float,
    epsilon: float,
    rope: RotaryEmbedding | None,
    norm_after_rope: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    temperature: Temperature | None = None,
    chunked: bool = False,
    alibi: float = 0.0,
    causal: bool = True,
    plain_head_norms: bool = False,
    clamp: float = 0.0,
    gate_function: str = "sigmoid",
    blocks: BlockIndexer | RunIndexer | None = None,
) -> Value:
    """From the tensors blk.N.attn_{q,k,v,output}, or attn_{qkv,output}, with biases, attn_{q,k}_norm, attn_sinks and attn_gate
    (factors of heads, or of all their numbers) where the model has them. Where attn_q has twice the rows, each head's queries
    are followed by as many numbers whose sigmoid its result is multiplied with (Qwen3-Next).

    rope             None: no rotation in this layer
    norm_after_rope  queries and keys are normalised after their rotation instead of before
    window, softcap, chunked, alibi, causal  as in `ops.Attention`
    temperature      of the queries
    plain_head_norms  queries and keys are normalised without weights after their rotation
    clamp            limit of queries, keys and values; 0: none
    gate_function    of attn_gate: 'sigmoid' or 'softplus'
    blocks           the indexer of a layer that has the tensors blk.N.indexer.{q_proj,k_proj,q_norm,k_norm}
    """
    prefix = f"blk.{layer}.attn_"
    shapes = {"q": (heads.n, heads.k_width), "k": (heads.n_kv, heads.k_width), "v": (heads.n_kv, heads.v_width)}
    sizes = [n * width for n, width in shapes.values()]
    gate = None
    if f"{prefix}qkv.weight" in graph:
        projected = graph.split(graph.linear(x, f"{prefix}qkv", sum(sizes)), *sizes)
    else:
        if graph.shape(f"{prefix}q.weight")[-1] == 2 * sizes[0]:
            shapes["q"] = (heads.n, 2 * heads.k_width)
        projected = [graph.linear(x, prefix + part, prod(shape)) for part, shape in shapes.items()]
    projected = [graph.clamp(part, clamp) for part in projected]
    q, k, v = (graph.reshape(part, *shape) for part, shape in zip(projected, shapes.values(), strict=True))
    if q.shape[1] == 2 * heads.k_width:
        q, gate = graph.split(q, heads.k_width, heads.k_width)

    def positioned(part: str, heads: Value) -> Value:
        """The norm of each head, if there is one, and the rotation."""
        if not norm_after_rope:
            heads = _head_norm(graph, heads, f"{prefix}{part}_norm", epsilon)
        if rope is not None:
            heads = graph.rope(heads, rope)
        if plain_head_norms:
            heads = graph.plain_norm(heads, epsilon)
        return _head_norm(graph, heads, f"{prefix}{part}_norm", epsilon) if norm_after_rope else heads

    sinks = graph.optional(f"{prefix}sinks.weight", (heads.n,))
    q, k = graph.scale_by_position(positioned("q", q), temperature), positioned("k", k)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "chunked": chunked}
    options |= {"alibi": alibi, "causal": causal}
    if blocks is not None and rope is not None and f"blk.{layer}.indexer.q_proj.weight" in graph:
        options |= {"selection": blocks.select(graph, x, layer, rope, epsilon), "block": blocks.block}
    out = graph.attention(q, k, v, layer, scale, **options)
    if gate is not None:
        out = graph.gated(gate, out, "sigmoid")
    return graph.linear(gated_output(graph, x, out, prefix, gate_function), f"{prefix}output", x.shape[0])


def gated_output(graph: GraphBuilder, x: Value, out: Value, prefix: str, function: str = "sigmoid") -> Value:
    """The heads of an attention's result times a function of PREFIXgate's product with x, a number for each head or element;
    as they are where there is no such tensor."""
    if f"{prefix}gate.weight" not in graph:
        return out
    gate = graph.linear(x, f"{prefix}gate", graph.shape(f"{prefix}gate.weight")[1])
    if function == "softplus":
        return graph.softplus_gate(gate, out)
    if gate.shape == out.shape[:1]:
        return graph.gate_heads(out, gate)
    return graph.gated(graph.reshape(gate, *out.shape), out, function)


def _head_norm(graph: GraphBuilder, x: Value, name: str, epsilon: float) -> Value:
    """RMS norm of queries or keys, of each head or of all together, as the weights' shape says; layer norm where each head has
    weights of its own (Cohere) or there is a bias (Jina v2). x itself where the model has no such norm."""
    if f"{name}.weight" not in graph:
        return x
    has_own_weights = len(graph.shape(f"{name}.weight")) > 1
    return graph.norm(x, name, epsilon, kind="layer" if has_own_weights or f"{name}.bias" in graph else "rms")


def temperature_of(hparams: HParams, offset: int = 0) -> Temperature | None:
    """By which queries are scaled; None where the metadata has no attention.temperature_scale.

    Raises FormatError without a length: that of the key attention.temperature_length, or else the original context's."""
    scale = hparams.float("attention.temperature_scale", 0.0)
    if not scale:
        return None
    has_length = hparams.int("attention.temperature_length", 0) > 0
    key = "attention.temperature_length" if has_length else "rope.scaling.original_context_length"
    return Temperature(scale, hparams.size(key), offset)
