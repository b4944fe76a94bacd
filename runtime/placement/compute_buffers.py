"""Buffers that attention and what passes through the layers take, apart from weights and cache.

`compute_bytes` is what a GPU needs that computes whole layers, by the formulae of ik_llama.cpp with latent attention (its pull
request 235 and the sizes that its runs log); of other models it is an estimate. `processor_bytes` is what the cpu backend
takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...data_classes import dataclass
from ...formats import PlanError
from ...formats.metadata_values import MAX_LAYERS, whole_number
from ...operating_system.processors import allowed_cpus
from ...request_fields import values_of
from ..hparams import HParams
from ..models.latent_attention import LatentHeads
from ..models.variants import ENCODERS, VARIANTS
from ..settings import CacheTypes, Settings, check_latent, settings_from

MIB = 1 << 20
_BESIDE = 192 * MIB  # at most, of what other buffers than those of latent attention take (fits the logged sizes)
_SCORES_OVERHEAD = 1.09  # logged size over that of the scores alone, without flash attention
_TABLES = MIB  # of tasks and other small arrays
_LANES = 16  # expanded rows are filled up to a multiple of this many numbers
_CHUNK_BYTES = 8 << 20  # of keys and values that a thread expands at a time: more do not stay in its cache
SCORES_BYTES = 2 << 20  # of the scores that a thread stores at a time, without flash attention: about what its own cache holds


@dataclass(frozen=True)
class Use(CacheTypes):
    """How the model is to be run; names and defaults (None) as in `Settings`. attention_bytes None: not bounded (no -amb)."""

    n_ctx: int
    ubatch: int = 512
    mla: int | None = None
    flash: bool = True
    attention_bytes: int | None = None
    gpu_layers: int | None = None  # None: all, if there is a GPU
    tensor_split: Sequence[float] | None = None  # shares of the GPUs; None: by memory
    threads: int | None = None  # None: one per processor that this process may use

    def settings(self, hparams: HParams) -> Settings:
        """What attention is run with. Raises PlanError for what `load_model` would refuse."""
        chosen = values_of(self, CacheTypes) | {"mla": self.mla, "flash": self.flash}
        given = {name: value for name, value in chosen.items() if value is not None}
        check_latent(given, hparams)
        return settings_from(given)


def _is_encoder(hparams: HParams) -> bool:
    """Whether the architecture makes embeddings only; its tokens all see each other unless the metadata says otherwise."""
    variant = VARIANTS.get(hparams.architecture)
    return hparams.architecture in ENCODERS or (variant is not None and not variant.has_head)


def sequence_length(hparams: HParams, n_ctx: int) -> int:
    """Tokens that are kept: a text whose tokens all see each other has no more of them than the model was trained for."""
    is_causal = hparams.flag("attention.causal", not _is_encoder(hparams))
    return n_ctx if is_causal else min(n_ctx, hparams.int("context_length", n_ctx))


def of_layer(hparams: HParams, key: str, layer: int, default: int | None = None) -> int:
    """A number that is the same for all layers, or one of a list with one for each. Raises PlanError if it is missing,
    FormatError if it is no number."""
    value = hparams.metadata.get(f"{hparams.architecture}.{key}", default)
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
        value = value[min(layer, len(value) - 1)] if len(value) else None
    if value is None:
        raise PlanError(f"{hparams.path}: metadata has no {hparams.architecture}.{key}")
    name = f"{hparams.architecture}.{key}"
    return whole_number({name: value}, name, path=hparams.path)


def compute_bytes(metadata: Mapping[str, Any], use: Use) -> int:
    """The buffer that a device which computes whole layers needs.

    Latent attention: per token of the context the expanded keys and values in f16, the latents in f32 and a row of the mask;
    with them the scores up to their bound, queries, and what every model has. Within 4 % of the logged single-GPU sizes.
    """
    hparams = HParams(dict(metadata), "the model")
    n_head, ub, n_ctx = of_layer(hparams, "attention.head_count", 0), use.ubatch, use.n_ctx
    bound = use.attention_bytes
    if hparams.is_latent:
        heads = LatentHeads.of(hparams)
        width = heads.nope + heads.rope
        if not use.flash:
            return _scores(n_ctx, n_head, ub, bound) + n_ctx * heads.rank * 4
        expanded = n_head * (width + heads.v_width) * 2 if use.settings(hparams).mla in (2, 3) else 0
        queries = ub * n_head * (width + heads.rope) * 4
        scores = min(n_ctx * n_head * ub * 4, bound or 512 * MIB)
        beside = min(_passing(hparams, ub), _BESIDE)
        return n_ctx * (expanded + heads.rank * 4 + ub * 2) + scores + beside + queries
    n_ctx = sequence_length(hparams, n_ctx)
    return _passing(hparams, ub) + (n_ctx * ub * 2 if use.flash else _scores(n_ctx, n_head, ub, bound))


def _passing(hparams: HParams, ub: int) -> int:
    """Bytes of what passes through a layer and the output: rows of the residual stream, of the feed-forward and of logits."""
    n_embd = hparams.int("embedding_length")
    has_head = not _is_encoder(hparams) and "pooling_type" not in hparams
    n_vocab = hparams.int("vocab_size", 0) if has_head else 0
    layers = range(hparams.size("block_count", maximum=MAX_LAYERS))
    inner = max(of_layer(hparams, "feed_forward_length", layer, 4 * n_embd) for layer in layers)
    return ub * 4 * (3 * n_embd + 3 * inner + n_vocab)


def _scores(n_ctx: int, n_head: int, ub: int, bound: int | None) -> int:
    scores = n_ctx * n_head * ub * 4
    return int(_SCORES_OVERHEAD * (min(scores, bound) if bound is not None else scores))


@dataclass(frozen=True)
class Expansion:
    """How the keys and values of heads are made from latents, for `tokens` tokens: those of `heads` heads at a time, by all
    threads together, or `concurrent`: by each of that many threads for heads of its own.

    k_width, v_width  numbers of a row in memory
    """

    tokens: int
    heads: int
    concurrent: int
    k_width: int
    v_width: int

    @classmethod
    def of(cls, heads: int, tokens: int, k_width: int, v_width: int, attention_bytes: int, threads: int) -> Expansion:
        """attention_bytes: most that keys and values take, unless one head's take more."""
        k_width, v_width = (-(-width // _LANES) * _LANES for width in (k_width, v_width))
        per_head = 4 * tokens * (k_width + v_width)
        most = attention_bytes // per_head
        is_concurrent = most >= threads
        if is_concurrent:
            most = min(most // threads, _CHUNK_BYTES // per_head)
        at_a_time = max(1, min(most, -(-heads // threads)))
        return cls(tokens, at_a_time, min(threads, -(-heads // at_a_time)) if is_concurrent else 0, k_width, v_width)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that there are at a time."""
        return 4 * self.tokens * (self.k_width + self.v_width) * self.heads * max(1, self.concurrent)


def processor_bytes(metadata: Mapping[str, Any], use: Use) -> int:
    """The buffers of the cpu backend that reads a prompt of n_ctx tokens, `ubatch` per pass.

    Latent attention: within 10 % of what the demo model takes. Of other models what passes through the layers is an estimate.
    """
    hparams = HParams(dict(metadata), "the model")
    settings, n_ctx = use.settings(hparams), sequence_length(hparams, use.n_ctx)
    ub, threads = min(use.ubatch, n_ctx), use.threads or len(allowed_cpus())
    bound = settings.attention_bytes if use.attention_bytes is None else use.attention_bytes
    rows = 2 * ub * hparams.int("embedding_length") * 4  # that a pass returns
    passing = _passing(hparams, ub) + rows + _rotated(hparams, settings, ub) + _TABLES
    scores = 0 if use.flash else threads * min(bound, SCORES_BYTES)
    if not hparams.is_latent:
        layers = range(hparams.size("block_count", maximum=MAX_LAYERS))
        decoded = 0 if use.flash else max(_kv_numbers(hparams, layer) for layer in layers) * n_ctx * 4
        return passing + scores + decoded
    heads = LatentHeads.of(hparams)
    width, latent = heads.nope + heads.rope, heads.rank + heads.rope
    if settings.mla == 0:
        decoded = 0 if use.flash else heads.n * (width + heads.v_width) * n_ctx * 4
        return passing + scores + decoded + ub * heads.n * (width + heads.nope + 2 * heads.v_width) * 4
    # Queries as wide as latents, weighted latents and these once more as products take them, and queries by head.
    decoded = 0 if use.flash else (latent + heads.rank) * n_ctx * 4
    absorbing = ub * heads.n * (2 * heads.rank + latent + 2 * heads.nope) * 4 + decoded

    def expanded(tokens: int) -> int:
        return tokens * latent * 4 + Expansion.of(heads.n, tokens, width, heads.v_width, bound, threads).nbytes

    # Shorter texts can take more: of them each thread expands several heads at a time.
    most = max(map(expanded, (*range(ub, n_ctx, ub), n_ctx)))
    expanding = most + ub * heads.n * (width + heads.v_width) * 4
    of_mode = {1: absorbing, 2: expanding, 3: max(absorbing, expanding)}
    return passing + scores + of_mode[settings.mla]


def _rotated(hparams: HParams, settings: Settings, ub: int) -> int:
    """Bytes of queries that are rotated as the keys in the cache are; those of latents are in their place."""
    if not settings.flash or not settings.cache_rotations[0] or (hparams.is_latent and settings.mla):
        return 0
    if hparams.is_latent:
        heads = LatentHeads.of(hparams)
        return ub * heads.n * (heads.nope + heads.rope) * 4
    n_head = of_layer(hparams, "attention.head_count", 0)
    return ub * n_head * hparams.int("attention.key_length", hparams.int("embedding_length") // max(1, n_head)) * 4


def _kv_numbers(hparams: HParams, layer: int) -> int:
    """Numbers of a token's keys and values."""
    n_head = of_layer(hparams, "attention.head_count", layer)
    size = hparams.int("embedding_length") // max(1, n_head)
    widths = sum(hparams.int(f"attention.{part}_length", size) for part in ("key", "value"))
    return of_layer(hparams, "attention.head_count_kv", layer, n_head) * widths
