"""Multi-head latent attention and the indexer of sparse attention, from the normalised input of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...data_classes import dataclass
from ...formats import FormatError
from ..hparams import HParams
from .attention import gated_output
from .rotary import rotated_dims

if TYPE_CHECKING:
    from ..graph import GraphBuilder, Value
    from ..graph.values import RotaryEmbedding, Temperature

INDEXER_NAMES = ("indexer.attn_q_b", "indexer.attn_k", "indexer.k_norm", "indexer.proj")
INDEXER_EPSILON = 1e-6  # of the norm of its keys; the metadata does not say it


@dataclass(frozen=True)
class LatentHeads:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): n heads whose keys and values come from one
    latent of `rank` numbers per token.

    nope, rope  elements of a query or key that are not rotated, and that are
    v_width     elements of a value
    q_rank      size of the latent that queries come from; 0: they come from the input
    """

    n: int
    nope: int
    rope: int
    v_width: int
    rank: int
    q_rank: int

    @classmethod
    def of(cls, hparams: HParams) -> LatentHeads:
        """In the layout of llama.cpp key_length and value_length are those of the latents, and those of heads have keys with
        _mla. Raises FormatError for heads without elements that are not rotated."""
        k_key, v_key = (f"attention.{part}_length" for part in ("key", "value"))
        width = hparams.size(f"{k_key}_mla" if f"{k_key}_mla" in hparams else k_key)
        rope = rotated_dims(hparams, width)
        if rope == width:
            raise FormatError(f"{hparams.path}: heads of {width} elements cannot have {rope} rotated ones and others")
        v_width = hparams.size(f"{v_key}_mla" if f"{v_key}_mla" in hparams else v_key)
        n, q_rank = hparams.size("attention.head_count"), hparams.size("attention.q_lora_rank", 0, 0)
        return cls(n, width - rope, rope, v_width, hparams.size("attention.kv_lora_rank"), q_rank)


@dataclass(frozen=True)
class Indexer:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): which top_k keys each query sees.

    heads, width  of its queries; one key of that width per token
    interleaved   whether it rotates neighbouring elements, as GLM-5 does
    """

    heads: int
    width: int
    top_k: int
    interleaved: bool

    @classmethod
    def of(cls, hparams: HParams) -> Indexer | None:
        """None where the metadata has no attention.indexer.* keys."""
        prefix = "attention.indexer."
        if f"{prefix}top_k" not in hparams:
            return None
        heads, width, top_k = (hparams.size(prefix + key) for key in ("head_count", "key_length", "top_k"))
        return cls(heads, width, top_k, hparams.architecture == "glm-dsa")


def latent_attention(
    graph: GraphBuilder,
    x: Value,
    layer: int,
    heads: LatentHeads,
    *,
    scale: float,
    epsilon: float,
    rope: RotaryEmbedding | None,
    temperature: Temperature | None = None,
    indexer: Indexer | None = None,
    selection: Value | None = None,
) -> tuple[Value, Value | None]:
    """From the tensors blk.N.attn_{q_a,q_a_norm,q_b}, or attn_q; attn_{kv_a_mqa,kv_a_norm,output}; attn_kv_b, or
    attn_{k_b,v_b}; with attn_gate the heads' results are gated. Returns the result, and which keys were seen (None: all).

    rope         None: no rotation (Kimi Linear)
    temperature  of the queries
    selection    of the layer before, for a layer without an indexer of its own
    """
    prefix, q_rows = f"blk.{layer}.attn_", heads.n * (heads.nope + heads.rope)
    q_latent = x
    if heads.q_rank:
        q_latent = graph.norm(graph.linear(x, f"{prefix}q_a", heads.q_rank), f"{prefix}q_a_norm", epsilon)
        q = graph.linear(q_latent, f"{prefix}q_b", q_rows)
    else:
        q = graph.linear(x, f"{prefix}q", q_rows)
    if indexer is not None and rope is not None and f"blk.{layer}.indexer.attn_k.weight" in graph:
        selection = select_keys(graph, x, q_latent, layer, indexer, rope)
    q = graph.reshape(q, heads.n, heads.nope + heads.rope)
    q = q if rope is None else graph.rope(q, rope, start=heads.nope)
    q = graph.scale_by_position(q, temperature)
    latent, k_pe = graph.split(graph.linear(x, f"{prefix}kv_a_mqa", heads.rank + heads.rope), heads.rank, heads.rope)
    latent = graph.norm(latent, f"{prefix}kv_a_norm", epsilon)
    k_pe = k_pe if rope is None else graph.rope(k_pe, rope)
    out = graph.latent_attention(q, latent, k_pe, layer, scale, heads.v_width, prefix, selection)
    return graph.linear(gated_output(graph, x, out, prefix), f"{prefix}output", x.shape[0]), selection


def select_keys(
    graph: GraphBuilder, x: Value, q_latent: Value, layer: int, indexer: Indexer, rope: RotaryEmbedding, names=INDEXER_NAMES
) -> Value:
    """From the tensors of these names behind blk.N.: of the queries, the key, its norm (without a bias RMS), the factors."""
    q_name, k_name, norm_name, factors_name = (f"blk.{layer}.{name}" for name in names)
    rope, kind = replace(rope, interleaved=indexer.interleaved), "layer" if f"{norm_name}.bias" in graph else "rms"
    q = graph.reshape(graph.linear(q_latent, q_name, indexer.heads * indexer.width), indexer.heads, indexer.width)
    k = graph.norm(graph.linear(x, k_name, indexer.width), norm_name, INDEXER_EPSILON, kind=kind)
    factors = graph.linear(x, factors_name, indexer.heads)
    return graph.select_keys(graph.rope(q, rope), graph.rope(k, rope), factors, layer, indexer.top_k)
