"""Attention of DeepSeek-V4, from the normalised input of a layer: to a window, and to entries that each stand for a run of
earlier tokens, all of them or those that an indexer selects."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from ...data_classes import dataclass
from ...formats import FormatError
from ..graph import GraphBuilder, Value, compressed_attention_ops, ops
from ..graph.values import CacheSpec, RotaryEmbedding, StateSpec
from ..hparams import HParams
from .latent_attention import Indexer
from .rotary import plain_frequencies, rotary_embedding


@dataclass(frozen=True)
class CompressedHeads:
    """Heads that share one key, which is the value too, of `width` numbers; the last `rope.dims` are rotated.

    q_rank          size of the latent that queries come from
    groups, o_rank  the result of each group of heads is projected to so many numbers
    window          tokens that are seen as they are
    rope, long_rope  of layers without compressed entries, and of those with them
    """

    n: int
    width: int
    q_rank: int
    groups: int
    o_rank: int
    window: int
    rope: RotaryEmbedding
    long_rope: RotaryEmbedding

    @classmethod
    def of(cls, hparams: HParams) -> CompressedHeads:
        """Raises FormatError for sizes that do not fit together."""
        n, width = hparams.size("attention.head_count"), hparams.size("attention.key_length")
        groups, dims = hparams.size("attention.output_group_count"), hparams.size("rope.dimension_count", maximum=width)
        if dims % 2 or n % groups:
            raise FormatError(f"{hparams.path}: {n} heads in {groups} groups, with {dims} rotated elements each")
        base = f"{hparams.architecture}.rope.freq_base"
        compressed = {base: hparams.positive("attention.compress_rope_freq_base")}
        long_rope = rotary_embedding(HParams({**hparams.metadata, **compressed}, hparams.path), dims, interleaved=True)
        return cls(
            n,
            width,
            hparams.size("attention.q_lora_rank"),
            groups,
            hparams.size("attention.output_lora_rank"),
            hparams.size("attention.sliding_window"),
            RotaryEmbedding(plain_frequencies(hparams.positive("rope.freq_base", 10000.0), dims), interleaved=True),
            replace(long_rope, magnitude=1.0),  # without YaRN's factor
        )


def run_length(hparams: HParams, layer: int) -> int:
    """Tokens that an entry of this layer stands for; 0: it has none."""
    return hparams.of_layer("attention.compress_ratios", layer, 0, 0)


def selects_entries(layer: int, tensors: Container[str]) -> bool:
    """Whether a layer has an indexer. tensors: names."""
    return f"blk.{layer}.indexer.proj.weight" in tensors


def compressed_states(hparams: HParams, layer: int, tensors: Container[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a layer keeps per sequence, whatever its length. tensors: names."""
    width, every = hparams.size("attention.key_length"), run_length(hparams, layer)
    series = 1 + selects_entries(layer, tensors)
    states = {"window": (hparams.size("attention.sliding_window"), width)}
    if every:
        states["compressor"] = compressor_state(width, series, every)
    if every and series == 2:
        states["index_compressor"] = compressor_state(hparams.size("attention.indexer.key_length"), series, every)
    return states


def compressor_state(width: int, series: int, every: int) -> tuple[int, int]:
    """Of the tokens of a run (and of the one before, if they count for the next): their numbers, and their gates."""
    return series * every, 2 * series * width


@dataclass(frozen=True)
class _Runs:
    """Runs of `every` tokens that entries stand for. series: see `Compress`."""

    every: int
    series: int
    rope: RotaryEmbedding
    epsilon: float

    def entries(self, graph: GraphBuilder, x: Value, prefix: str, layer: int, state: str, width: int) -> Value:
        """The entry that each token completes, rotated by the position of the first token of its run; from the tensors
        PREFIX_{kv,gate,ape,norm}."""
        numbers, gate = (graph.linear(x, f"{prefix}_{part}", self.series * width) for part in ("kv", "gate"))
        bias = graph.weight(f"{prefix}_ape.weight", (self.series * width, self.every))
        graph.cache.append(StateSpec(layer, state, compressor_state(width, self.series, self.every)))
        entry = graph.append(
            compressed_attention_ops.Compress(graph.value(width), numbers, gate, bias, layer, state, self.every)
        )
        rope = replace(self.rope, offset=1 - self.every)
        return graph.rope(graph.norm(entry, f"{prefix}_norm", self.epsilon), rope, width - rope.dims)

    def select(self, graph: GraphBuilder, x: Value, q_latent: Value, layer: int, indexer: Indexer) -> Value:
        """Which entries are seen; from the tensors blk.N.indexer.{attn_q_b,proj} and blk.N.indexer_compressor_*."""
        prefix, width = f"blk.{layer}.indexer", indexer.width
        q = graph.reshape(graph.linear(q_latent, f"{prefix}.attn_q_b", indexer.heads * width), indexer.heads, width)
        k = self.entries(graph, x, f"{prefix}_compressor", layer, "index_compressor", width)
        factors = graph.linear(x, f"{prefix}.proj", indexer.heads)
        return graph.select_keys(graph.rope(q, self.rope, width - self.rope.dims), k, factors, layer, indexer.top_k, self.every)


def compressed_attention(
    graph: GraphBuilder, x: Value, layer: int, heads: CompressedHeads, every: int, epsilon: float, indexer: Indexer | None
) -> Value:
    """From the tensors blk.N.attn_{q_a,q_a_norm,q_b,kv,kv_a_norm,sinks,output_a,output_b}; with entries (every is not 0) also
    attn_compressor_{kv,gate,ape,norm}; where the layer has indexer.proj, also the tensors of an indexer."""
    prefix = f"blk.{layer}.attn_"
    rope = heads.long_rope if every else heads.rope
    nope = heads.width - rope.dims
    q_latent = graph.norm(graph.linear(x, f"{prefix}q_a", heads.q_rank), f"{prefix}q_a_norm", epsilon)
    q = graph.reshape(graph.linear(q_latent, f"{prefix}q_b", heads.n * heads.width), heads.n, heads.width)
    q = graph.rope(graph.plain_norm(q, epsilon), rope, nope)
    kv = graph.rope(graph.norm(graph.linear(x, f"{prefix}kv", heads.width), f"{prefix}kv_a_norm", epsilon), rope, nope)
    entries = selection = None
    if every:
        runs = _Runs(every, 1, rope, epsilon)
        if selects_entries(layer, graph) and indexer is not None:
            runs = replace(runs, series=2)
            selection = runs.select(graph, x, q_latent, layer, indexer)
        entries = runs.entries(graph, x, f"{prefix}compressor", layer, "compressor", heads.width)
        graph.cache.append(CacheSpec(layer, "entries", 1, heads.width, every))
    sinks = graph.weight(f"{prefix}sinks.weight", (heads.n,))
    graph.cache.append(StateSpec(layer, "window", (heads.window, heads.width)))
    out, scale = graph.value(heads.n, heads.width), heads.width**-0.5
    attention = compressed_attention_ops.WindowAttention(
        out, q, kv, layer, scale, heads.window, sinks, entries, every, selection
    )
    # Values were rotated by their positions: turned back by the query's, they are by the distance.
    out = graph.rope(graph.append(attention), replace(rope, frequencies=-rope.frequencies), nope)
    out = graph.reshape(out, heads.groups, heads.n * heads.width // heads.groups)
    weight = graph.weight(f"{prefix}output_a.weight", (out.shape[1], heads.groups * heads.o_rank))
    out = graph.append(ops.GroupedLinear(graph.value(heads.groups * heads.o_rank), out, weight))
    return graph.linear(out, f"{prefix}output_b", x.shape[0])
