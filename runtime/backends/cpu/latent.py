"""Latent attention (MLA) of DeepSeek V2 and V3 (arXiv:2405.04434, section 2.1).

Per token only a latent c [rank] and one rotated key k_pe, shared by all heads, are computed from the input. Head h's key is
(K_h c, k_pe) and its value V_h c. GGUF holds K and V in up to two ways:

    attn_kv_b            [heads, nope + v, rank]: K_h above V_h
    attn_k_b, attn_v_b   K_h transposed, and V_h; as one 2D tensor each (ik_llama.cpp, beside kv_b) or 3D with a matrix per
                         head (llama.cpp, without kv_b)

and there are two ways to compute with them, equal but for rounding: expand keys and values from the latents, or absorb K_h
into the query (q_h K_h) and V_h into the output, so that attention runs on the latents themselves. For a few tokens the packed
rows of k_b, and of v_b or V in kv_b, absorb; where a file lacks k_b, it is made from kv_b and kept in memory (as q8_0, unless
kv_b holds floats). Everything else takes decoded matrices, those of kv_b where it is there. What is cached, and which way is
taken when, is the setting `mla` (numbered as in ik_llama.cpp):

    0  each head's keys and values are cached
    1  latents and rotated keys are cached, and the latents once more as values, in a type of their own; absorbs
    2  latents and rotated keys are cached; expands
    3  as 2, but takes whichever way multiplies less: expanding for prompts, absorbing for generation
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....formats import TYPES, FormatError, PlanError, SourceTensor
from ....quantize import decode
from ....simd.workers import PARALLEL_THRESHOLD, Workers
from ...hparams import HParams
from .attention import Span
from .decoder import Settings, Step
from .kernels.attention.shared_values import Shared
from .kernels.gemm import gemm
from .kv_cache import KVCache, Part, encoded, part_of
from .norms import RMSNorm
from .rope import Rope, rotated_dims
from .weights import Linear, PerHead, WeightStore

_ALONE = Workers(1)
_LANES = 16  # rows that kernels read are filled up to a multiple of so many numbers
_CHUNK_BYTES = 8 << 20  # keys and values that a thread expands at a time: more only push each other out of its cache


class Shape:
    """Sizes of latent attention from the metadata.

    In the layout of llama.cpp key_length and value_length are those of the latents, and the heads' own have keys with _mla.
    """

    def __init__(self, hparams: HParams):
        self.n_embd, self.n_head = hparams.size("embedding_length"), hparams.size("attention.head_count")
        key = hparams.size("attention.key_length_mla" if "attention.key_length_mla" in hparams else "attention.key_length")
        self.rank, self.rope = hparams.size("attention.kv_lora_rank"), rotated_dims(hparams, key)
        self.v = hparams.size(
            "attention.value_length_mla" if "attention.value_length_mla" in hparams else "attention.value_length"
        )
        self.nope, self.q_rank = key - self.rope, hparams.size("attention.q_lora_rank", 0, 0)
        if self.nope <= 0:
            raise FormatError(f"{hparams.path}: heads of {key} elements cannot have {self.rope} rotated ones and others")


class KeyValueMatrices:
    """K [heads, nope, rank] and V [heads, v, rank] of a layer, whichever tensors hold them, and what an observer is told."""

    def __init__(self, store: WeightStore, prefix: str, shape: Shape):
        self.store, self.shape, self.prefix = store, shape, prefix
        rank, heads, height = shape.rank, shape.n_head, shape.nope + shape.v
        self.kv_b = self._find(f"{prefix}kv_b.weight", (rank, heads * height))
        self.k_b = self._find(f"{prefix}k_b.weight", (shape.nope, rank * heads), (shape.nope, rank, heads))
        self.v_b = self._find(f"{prefix}v_b.weight", (rank, heads * shape.v), (rank, shape.v, heads))
        if self.kv_b is None and (self.k_b is None or self.v_b is None):
            raise FormatError(f"{store.source.path}: {prefix}kv_b.weight is missing, and so is {prefix}k_b or {prefix}v_b")
        # What multiplies along the rows of a tensor can do so from its packed bytes; the first that can is taken.
        linear = self.k_b if self.k_b is not None else self._transposed()
        self.into_query = [] if linear is None else [PerHead(linear, heads)]
        self.into_output = [PerHead(self.v_b, heads)] if self.v_b is not None else []
        if self.kv_b is not None:
            self.into_output.append(PerHead(self.kv_b, heads, (shape.nope, height)))

    def _find(self, name: str, *shapes: tuple[int, ...]) -> Linear | None:
        if name not in self.store:
            return None
        found = self.store.tensor(name).shape
        if found not in shapes:
            expected = " or ".join(map(str, shapes))
            raise FormatError(f"{self.store.source.path}: tensor {name} has shape {found}, expected is {expected}")
        return self.store.linear(name)

    def _transposed(self) -> Linear | None:
        """k_b as kv_b has it, to be made when it is first used, if there is room for it."""
        s, held = self.shape, self.kv_b.tensor if self.kv_b is not None else None
        if held is None or held.stored is None or (self.store.exact and not held.stored.is_float):
            return None
        kind = TYPES[held.stored.base or held.stored.name]
        kind = kind if kind.is_float else TYPES["q8_0"]
        if not kind.fits(s.nope):
            return None

        def raw(start: int, stop: int) -> np.ndarray:
            """Rows of one head."""
            head, first = divmod(start, s.rank)
            rows = held.read(head * (s.nope + s.v), (head + 1) * (s.nope + s.v))[: s.nope]
            return encoded(np.ascontiguousarray(rows.T[first : first + stop - start], np.float32), kind.name)

        def read(start: int, stop: int) -> np.ndarray:
            return decode(raw(start, stop), kind.name, s.nope)

        shape = (s.nope, s.rank, s.n_head)
        return Linear(self.store, SourceTensor(f"{held.name} (K, transposed)", shape, kind.name, read, raw, kind))

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """K, V as float32 views. kv_b wins where both are there."""
        heads = self.shape.n_head
        if self.kv_b is not None:
            both = self.kv_b.heads(heads)
            self.store.check(self.kv_b.name, both)
            return both[:, : self.shape.nope], both[:, self.shape.nope :]
        assert self.k_b is not None
        assert self.v_b is not None
        k, v = self.k_b.heads(heads), self.v_b.heads(heads)
        self.store.check(self.k_b.name, k)
        self.store.check(self.v_b.name, v)
        return k.transpose(0, 2, 1), v

    def absorb(self, q: np.ndarray) -> np.ndarray:
        """Each head's queries times K: float32 [heads, n, nope] -> [heads, n, rank]."""
        ready = next((each for each in self.into_query if each.takes(q.shape[1])), None)
        return ready.matmul(q) if ready is not None else self._with_all(q, self.load()[0])

    def finish(self, weighted: np.ndarray) -> np.ndarray:
        """V times each head's weighted latents: float32 [heads, n, rank] -> [heads, n, v]."""
        ready = next((each for each in self.into_output if each.takes(weighted.shape[1])), None)
        return ready.matmul(weighted) if ready is not None else self._with_all(weighted, self.load()[1].transpose(0, 2, 1))

    def expand(self, latents: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Fills in every head's keys and values of latents [n, rank]: k [n, heads, nope], v [n, heads, v]."""
        if self.kv_b is not None:
            both = self.kv_b.unobserved(latents).reshape(len(latents), self.shape.n_head, -1)
            k[...], v[...] = both[..., : self.shape.nope], both[..., self.shape.nope :]
            return
        keys, values = self.load()
        k[...] = self._with_all(latents, keys.transpose(0, 2, 1)).transpose(1, 0, 2)
        v[...] = self._with_all(latents, values.transpose(0, 2, 1)).transpose(1, 0, 2)

    def _with_all(self, x: np.ndarray, matrices: np.ndarray) -> np.ndarray:
        """x [heads, n, inner] or [n, inner] times matrices [heads, inner, outer] -> float32 [heads, n, outer]."""
        workers = self.store.workers
        team = workers.ready() if x.shape[-2] * matrices.size >= PARALLEL_THRESHOLD else 0
        return gemm.matmul(x, matrices, None, team, workers.count)

    @property
    def exact(self) -> bool:
        """Whether products with these are made in float32, of however many tokens."""
        return any(each.multiplies_float32 for each in (self.kv_b, self.v_b) if each is not None)

    def observe(self, latents: np.ndarray, q_nope: np.ndarray, mixed: np.ndarray) -> None:
        """latents [n, rank]; q_nope [n, heads, nope]; mixed: each head's attention-weighted latents, float32 [n, heads, rank],
        or the sums of their squares, float64 [heads, rank], for an observer with `squares`.

        All three tensors are reported, those too that this file does not have: what is learnt here may be for another layout.
        Of these, k_b and v_b have a matrix per head.
        """
        observer: Any = self.store.observer
        squares = getattr(observer, "squares", None)
        self.store.tell(f"{self.prefix}kv_b.weight", 0, np.ascontiguousarray(latents) if squares is None else latents)
        for part, linear, inputs in (("k_b", self.k_b, q_nope), ("v_b", self.v_b, mixed)):
            name, pooled = f"{self.prefix}{part}.weight", linear is not None and linear.matrices == 1
            if squares is not None:
                observer.add_heads(name, inputs if inputs.dtype == np.float64 else squares(inputs), len(latents), pooled)
                continue
            rows = np.ascontiguousarray(inputs.transpose(1, 0, 2))
            for matrix, x in enumerate(rows.reshape(1, -1, rows.shape[2]) if pooled else rows):
                self.store.tell(name, matrix, x)


def observed_parts(parts: dict[str, Part], shape: Shape) -> dict[str, Part]:
    """What a layer keeps per token while somebody observes: the latents too, which mode 0 does not need otherwise."""
    return {"kv": Part(1, shape.rank + shape.rope), **parts}


def cached_parts(shape: Shape, settings: Settings) -> dict[str, Part]:
    """What a layer keeps per token. Raises PlanError for types that do not fit the model or the kind of attention."""
    k, v = settings.cache_types
    if settings.mla == 0:
        keys = part_of("keys", "-ctk", shape.n_head, shape.nope + shape.rope, k)
        return {"k": keys, "v": part_of("values", "-ctv", shape.n_head, shape.v, v)}
    parts = {"kv": part_of("latents with their rotated keys", "-ctk", 1, shape.rank + shape.rope, k)}
    if settings.mla == 1:
        parts["v"] = part_of("latents", "-ctv", 1, shape.rank, v)
    elif settings.cache_v is not None and v.lower() != k.lower():
        raise PlanError(
            f"-ctv {v} has nothing to act on: with -mla {settings.mla} only latents are cached, as {k} (-ctk); "
            "leave it away, or use -mla 0 or 1"
        )
    return parts


def _rows_of(segments: list[tuple[KVCache, slice]], n: int) -> slice | np.ndarray:
    """The rows of some of a pass's segments, of n in all."""
    if sum(at.stop - at.start for _, at in segments) == n:
        return slice(0, n)
    return np.concatenate([np.arange(at.start, at.stop) for _, at in segments])


class LatentAttention:
    """One layer's attention."""

    def __init__(self, store: WeightStore, hparams: HParams, layer: int, rope: Rope, scale: float, settings: Settings):
        shape = self.shape = Shape(hparams)
        prefix, epsilon = f"blk.{layer}.attn_", hparams.float("attention.layer_norm_rms_epsilon")
        q_rows = shape.n_head * (shape.nope + shape.rope)
        if shape.q_rank:
            self.q_a = store.linear(f"{prefix}q_a.weight", shape.n_embd, shape.q_rank)
            self.q_a_norm = RMSNorm(store, f"{prefix}q_a_norm.weight", shape.q_rank, epsilon)
            self.q = store.linear(f"{prefix}q_b.weight", shape.q_rank, q_rows)
        else:
            self.q_a = None
            self.q = store.linear(f"{prefix}q.weight", shape.n_embd, q_rows)
        self.kv_a = store.linear(f"{prefix}kv_a_mqa.weight", shape.n_embd, shape.rank + shape.rope)
        self.kv_a_norm = RMSNorm(store, f"{prefix}kv_a_norm.weight", shape.rank, epsilon)
        self.matrices = KeyValueMatrices(store, prefix, shape)
        self.output = store.linear(f"{prefix}output.weight", shape.n_head * shape.v, shape.n_embd)
        self.store, self.layer, self.rope, self.span = store, layer, rope, Span(scale)
        self.mode, self.buffer_bytes = settings.mla, settings.attention_bytes

    def __call__(self, x: np.ndarray, step: Step) -> np.ndarray:
        """float32 [n, n_embd] -> the same. Raises PlanError in mode 0 for an observer that the cache is not made for."""
        shape, n = self.shape, len(x)
        q = self.q.matmul(self.q_a_norm(self.q_a.matmul(x)) if self.q_a is not None else x)
        q = q.reshape(n, shape.n_head, shape.nope + shape.rope)
        kept = self.kv_a.matmul(x)
        kept[:, : shape.rank] = self.kv_a_norm(kept[:, : shape.rank])
        table = step.table(self.rope)
        self.rope.rotate(q[..., shape.nope :], table, step.workers)
        self.rope.rotate(kept[:, None, shape.rank :], table, step.workers)
        # The input of attn_v_b is each head's weighted latents, which absorbing computes, and expanding on request.
        watched = self.store.observer is not None
        if self.mode == 0:
            mixed = self._attend_heads(step, q, kept)
            weighted = self._only_weigh(step, q, kept) if watched else None
        else:
            mixed, weighted = self._attend_latents(step, q, kept)
        step.check(self.store, self.layer, mixed)
        if weighted is not None:
            self.matrices.observe(kept[:, : shape.rank], q[..., : shape.nope], weighted)
        return self.output.matmul(mixed.reshape(n, -1))

    def _attend_heads(self, step: Step, q: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Attention over cached keys and values, [n, heads * v]."""
        s, n = self.shape, len(q)
        k, v = np.empty(q.shape, np.float32), np.empty((n, s.n_head, s.v), np.float32)
        self.matrices.expand(kept[:, : s.rank], k[..., : s.nope], v)
        k[..., s.nope :] = kept[:, None, s.rank :]
        return step.attend(self.layer, q, k, v, self.span)

    def _only_weigh(self, step: Step, q: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """In mode 0: each head's weighted latents [n, heads, rank]."""
        if any("kv" not in cache.parts for cache, _ in step.segments):
            raise PlanError("with -mla 0 an observer has to be set before the cache is made: it keeps the latents for it")
        step.put(self.layer, {"kv": kept[:, None]})
        return self._weighted(step, q, ("kv", "kv"), step.segments)

    def _weighted(self, step: Step, q: np.ndarray, names: tuple[str, str], segments: list[tuple[KVCache, slice]]) -> np.ndarray:
        """Each head's attention-weighted latents [n, heads, rank]; only the rows of the given segments are filled in."""
        s, n = self.shape, len(q)
        wide = np.empty((n, s.n_head, s.rank + s.rope), np.float32)
        wide[..., s.rank :] = q[..., s.nope :]
        rows = _rows_of(segments, n)
        wide[rows, :, : s.rank] = self.matrices.absorb(q[rows, :, : s.nope].transpose(1, 0, 2)).transpose(1, 0, 2)
        weighted = step.look(self.layer, wide, names, (1, s.rank), self.span, segments)
        return weighted.reshape(n, s.n_head, s.rank)

    def _attend_latents(self, step: Step, q: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Attention over cached latents: [n, heads, v], and what `observe` wants of the weighted latents if there is need."""
        s, n = self.shape, len(q)
        rows = {"kv": kept[:, None], "v": kept[:, None, : s.rank]}
        step.put(self.layer, {name: rows[name] for name in step.segments[0][0].parts})
        mixed = np.empty((n, s.n_head, s.v), np.float32)
        absorbing, expanding = [], []
        for cache, at in step.segments:
            (absorbing if self.absorbs(at.stop - at.start, cache.length) else expanding).append((cache, at))
        watched, squares = self.store.observer is not None, getattr(self.store.observer, "squares", None)
        weighted = np.empty((n, s.n_head, s.rank), np.float32) if watched and squares is None and not absorbing else None
        sums = np.zeros((s.n_head, s.rank))
        if absorbing:
            weighted = self._weighted(step, q, ("kv", "v" if self.mode == 1 else "kv"), absorbing)
            some = _rows_of(absorbing, n)
            mixed[some] = self.matrices.finish(weighted[some].transpose(1, 0, 2)).transpose(1, 0, 2)
            if squares is not None:
                sums += squares(weighted[some])
        if expanding:
            keys, values = self.matrices.load()
            for cache, at in expanding:
                past = cache.read(self.layer, "kv", at.stop - at.start)[0]
                found = np.empty((s.n_head, s.rank))
                wanted = found if squares is not None else weighted[at] if watched and weighted is not None else None
                self._attend_expanded(step, q[at], past, keys, values, mixed[at], wanted)
                if squares is not None:
                    sums += found
        return mixed, sums if squares is not None else weighted if watched else None

    def absorbs(self, new: int, past: int) -> bool:
        """Multiplications per head: expanding costs products of all tokens with K and V, absorbing costs wider attention.

        A single token absorbs whatever the past is: expanding takes decoded matrices.
        """
        if self.mode != 3 or new == 1:
            return self.mode in (1, 3)
        s, total = self.shape, past + new
        expand = total * s.rank * (s.nope + s.v) + new * total * (s.nope + s.rope + s.v)
        absorb = new * s.rank * (s.nope + s.v) + new * total * (2 * s.rank + s.rope)
        return absorb < expand

    def _attend_expanded(
        self,
        step: Step,
        q: np.ndarray,
        past: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        out: np.ndarray,
        wanted: np.ndarray | None = None,
    ) -> None:
        """q [n, heads, nope + rope], past [m, rank + rope]: fills in out [n, heads, v].

        A few heads at a time, so that their keys and values take no more than `buffer_bytes` (or what one head needs).
        wanted: takes each head's weighted latents, float32 [n, heads, rank], or the sums of their squares, float64 [heads,
        rank], for which they may be rounded.
        """
        s, m, workers = self.shape, len(past), self.store.workers
        k_width, v_width = (-(-width // _LANES) * _LANES for width in (s.nope + s.rope, s.v))
        per_head = 4 * m * (k_width + v_width)
        bounded = self.buffer_bytes // per_head
        side_by_side = bounded >= workers.count
        most = min(bounded // workers.count, _CHUNK_BYTES // per_head) if side_by_side else bounded
        heads = max(1, min(most, -(-s.n_head // workers.count)))

        latents = None
        if wanted is not None:
            latents = Shared(past[:, : s.rank], self.matrices.exact or wanted.dtype == np.float32)

        def expand(a: int) -> None:
            b = min(a + heads, s.n_head)
            k, v = np.zeros((b - a, m, k_width), np.float32), np.zeros((b - a, m, v_width), np.float32)
            team = _ALONE if side_by_side else workers
            gemm.matmul(past[:, : s.rank], keys[a:b].transpose(0, 2, 1), k[..., : s.nope], team.ready(), team.count)
            k[..., s.nope : s.nope + s.rope] = past[:, s.rank :]
            gemm.matmul(past[:, : s.rank], values[a:b].transpose(0, 2, 1), v[..., : s.v], team.ready(), team.count)
            result = np.empty((len(q), b - a, s.v), np.float32)
            queries = np.ascontiguousarray(q[:, a:b])
            if latents is None or wanted is None:
                step.over(queries, k, v, result, self.span, team)
            else:
                found = wanted[a:b] if wanted.dtype == np.float64 else wanted[:, a:b]
                step.over(queries, k, v, result, self.span, team, latents, found)
            out[:, a:b] = result

        runs = range(0, s.n_head, heads)
        if side_by_side:
            workers.map(expand, runs, s.n_head * m * (s.rank + len(q)) * (s.nope + s.rope + s.v))
        else:
            for a in runs:
                expand(a)
