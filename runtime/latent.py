"""Latent attention (MLA) of DeepSeek V2 and V3 (arXiv:2405.04434, section 2.1).

Per token only a latent c [rank] and one rotated key k_pe, shared by all heads, are computed from the input. Head h's key is
(K_h c, k_pe) and its value V_h c. GGUF holds K and V in up to two ways:

    attn_kv_b            [heads, nope + v, rank]: K_h above V_h
    attn_k_b, attn_v_b   K_h transposed, and V_h; as one 2D tensor each (ik_llama.cpp, beside kv_b) or 3D with a matrix per
                         head (llama.cpp, without kv_b)

and there are two ways to compute with them, equal but for rounding: expand keys and values from the latents, or absorb K_h
into the query (q_h K_h) and V_h into the output, so that attention runs on the latents themselves. What is cached, and which
way is taken when, is the setting `mla` (numbered as in ik_llama.cpp):

    0  each head's keys and values are cached
    1  latents and rotated keys are cached, and the latents once more as values, in a type of their own; absorbs
    2  latents and rotated keys are cached; expands
    3  as 2, but takes whichever way multiplies less: expanding for prompts, absorbing for generation
"""

from __future__ import annotations

import numpy as np

from ..formats import FormatError, PlanError
from .attention import Span
from .cache import KVCache, Part, part_of
from .decoder import Settings, Step
from .hyper import Hyper
from .norms import RMSNorm
from .rope import Rope
from .threads import Workers
from .weights import Linear, WeightStore

_ALONE = Workers(1)
_LANES = 16  # rows that kernels read are filled up to a multiple of so many numbers
_CHUNK_BYTES = 8 << 20  # keys and values that a thread expands at a time: more only push each other out of its cache


class Shape:
    """Sizes of latent attention from the metadata.

    In the layout of llama.cpp key_length and value_length are those of the latents, and the heads' own have keys with _mla.
    """

    def __init__(self, hyper: Hyper):
        self.n_embd, self.n_head = hyper.int("embedding_length"), hyper.int("attention.head_count")
        self.rank, self.rope = hyper.int("attention.kv_lora_rank"), hyper.int("rope.dimension_count")
        key = hyper.int("attention.key_length_mla" if "attention.key_length_mla" in hyper else "attention.key_length")
        self.v = hyper.int("attention.value_length_mla" if "attention.value_length_mla" in hyper else "attention.value_length")
        self.nope, self.q_rank = key - self.rope, hyper.int("attention.q_lora_rank", 0)
        if self.nope <= 0:
            raise FormatError(f"{hyper.where}: heads of {key} elements cannot have {self.rope} rotated ones and others")


class KeyValueMatrices:
    """K [heads, nope, rank] and V [heads, v, rank] of a layer, whichever tensors hold them, and what an observer is told."""

    def __init__(self, store: WeightStore, prefix: str, shape: Shape):
        self.store, self.shape, self.prefix = store, shape, prefix
        rank, heads = shape.rank, shape.n_head
        self.kv_b = self._find(f"{prefix}kv_b.weight", (rank, heads * (shape.nope + shape.v)))
        self.k_b = self._find(f"{prefix}k_b.weight", (shape.nope, rank * heads), (shape.nope, rank, heads))
        self.v_b = self._find(f"{prefix}v_b.weight", (rank, heads * shape.v), (rank, shape.v, heads))
        if self.kv_b is None and (self.k_b is None or self.v_b is None):
            raise FormatError(f"{store.source.path}: {prefix}kv_b.weight is missing, and so is {prefix}k_b or {prefix}v_b")

    def _find(self, name: str, *shapes: tuple[int, ...]) -> Linear | None:
        if name not in self.store:
            return None
        found = self.store.tensor(name).shape
        if found not in shapes:
            expected = " or ".join(map(str, shapes))
            raise FormatError(f"{self.store.source.path}: tensor {name} has shape {found}, expected is {expected}")
        return self.store.linear(name)

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """K, V as float32 views. kv_b wins where both are there, so that all ways of computing use the same numbers."""
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

    def observe(self, latents: np.ndarray, q_nope: np.ndarray, mixed: np.ndarray) -> None:
        """latents [n, rank]; q_nope [n, heads, nope]; mixed [heads, n, rank]: each head's attention-weighted latents.

        All three tensors are reported, those too that this file does not have: what is learnt here may be for another layout.
        Of these, k_b and v_b have a matrix per head.
        """
        inputs = {"kv_b": latents[None], "k_b": q_nope.transpose(1, 0, 2), "v_b": mixed}
        for part, linear in (("kv_b", self.kv_b), ("k_b", self.k_b), ("v_b", self.v_b)):
            rows = np.ascontiguousarray(inputs[part], np.float32)
            if linear is not None and linear.matrices == 1:
                rows = rows.reshape(1, -1, rows.shape[2])
            for matrix, x in enumerate(rows):
                self.store.tell(f"{self.prefix}{part}.weight", matrix, x)


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


class LatentAttention:
    """One layer's attention."""

    def __init__(self, store: WeightStore, hyper: Hyper, layer: int, rope: Rope, scale: float, settings: Settings):
        shape = self.shape = Shape(hyper)
        prefix, epsilon = f"blk.{layer}.attn_", hyper.float("attention.layer_norm_rms_epsilon")
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
        """float32 [n, n_embd] -> float32 [n, n_embd]. Raises PlanError in mode 0 for an observer that a cache is not made for."""
        shape, n = self.shape, len(x)
        q = self.q.matmul(self.q_a_norm(self.q_a.matmul(x)) if self.q_a is not None else x)
        q = q.reshape(n, shape.n_head, shape.nope + shape.rope)
        kept = self.kv_a.matmul(x)
        kept[:, : shape.rank] = self.kv_a_norm(kept[:, : shape.rank])
        table = step.table(self.rope)
        self.rope.rotate(q[..., shape.nope :], table, step.workers)
        self.rope.rotate(kept[:, None, shape.rank :], table, step.workers)
        keys, values = self.matrices.load()
        # The input of attn_v_b is each head's weighted latents, which only absorbing computes.
        watched = self.store.observer is not None
        if self.mode == 0:
            mixed = self._attend_heads(step, q, kept, keys, values)
            weighted = self._only_weigh(step, q, kept, keys) if watched else None
        else:
            mixed, weighted = self._attend_latents(step, q, kept, keys, values, watched)
        if weighted is not None:
            self.matrices.observe(kept[:, : shape.rank], q[..., : shape.nope], weighted)
        return self.output.matmul(mixed.reshape(n, -1))

    def _attend_heads(self, step: Step, q: np.ndarray, kept: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Attention over cached keys and values, [n, heads * v]."""
        s, n = self.shape, len(q)
        k, v = np.empty(q.shape, np.float32), np.empty((n, s.n_head, s.v), np.float32)
        np.matmul(kept[:, : s.rank], keys.transpose(0, 2, 1), out=k[..., : s.nope].transpose(1, 0, 2))
        k[..., s.nope :] = kept[:, None, s.rank :]
        np.matmul(kept[:, : s.rank], values.transpose(0, 2, 1), out=v.transpose(1, 0, 2))
        return step.attend(self.layer, q, k, v, self.span)

    def _only_weigh(self, step: Step, q: np.ndarray, kept: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """In mode 0: each head's weighted latents [heads, n, rank]."""
        if any("kv" not in cache.parts for cache, _ in step.segments):
            raise PlanError("with -mla 0 an observer has to be set before the cache is made: it keeps the latents for it")
        step.put(self.layer, {"kv": kept[:, None]})
        return self._weighted(step, q, keys, ("kv", "kv"), step.segments)

    def _weighted(
        self, step: Step, q: np.ndarray, keys: np.ndarray, names: tuple[str, str], segments: list[tuple[KVCache, slice]]
    ) -> np.ndarray:
        """Each head's attention-weighted latents [heads, n, rank], of the given segments."""
        s, n = self.shape, len(q)
        wide = np.empty((n, s.n_head, s.rank + s.rope), np.float32)
        np.matmul(q[..., : s.nope].transpose(1, 0, 2), keys, out=wide[..., : s.rank].transpose(1, 0, 2))
        wide[..., s.rank :] = q[..., s.nope :]
        weighted = step.look(self.layer, wide, names, (1, s.rank), self.span, segments)
        return weighted.reshape(n, s.n_head, s.rank).transpose(1, 0, 2)

    def _attend_latents(
        self, step: Step, q: np.ndarray, kept: np.ndarray, keys: np.ndarray, values: np.ndarray, watched: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Attention over cached latents: [n, heads, v], and each head's weighted latents [heads, n, rank] if watched."""
        s, n = self.shape, len(q)
        rows = {"kv": kept[:, None], "v": kept[:, None, : s.rank]}
        step.put(self.layer, {name: rows[name] for name in step.segments[0][0].parts})
        mixed = np.empty((n, s.n_head, s.v), np.float32)
        reorder = watched and getattr(self.store.observer, "may_reorder", False)
        absorbing, expanding = [], []
        for cache, at in step.segments:
            (absorbing if reorder or self._absorbs(at.stop - at.start, cache.length) else expanding).append((cache, at))
        weighted = None
        if absorbing or watched:
            names = ("kv", "v" if self.mode == 1 else "kv")
            weighted = self._weighted(step, q, keys, names, step.segments if watched else absorbing)
            for _, rows_ in absorbing:
                np.matmul(weighted[:, rows_], values.transpose(0, 2, 1), out=mixed[rows_].transpose(1, 0, 2))
        for cache, rows_ in expanding:
            past = cache.read(self.layer, "kv", rows_.stop - rows_.start)[0]
            self._attend_expanded(step, q[rows_], past, keys, values, mixed[rows_])
        return mixed, weighted if watched else None

    def _absorbs(self, new: int, past: int) -> bool:
        """Multiplications per head: expanding costs products of all tokens with K and V, absorbing costs wider attention."""
        if self.mode != 3:
            return self.mode == 1
        s, total = self.shape, past + new
        expand = total * s.rank * (s.nope + s.v) + new * total * (s.nope + s.rope + s.v)
        absorb = new * s.rank * (s.nope + s.v) + new * total * (2 * s.rank + s.rope)
        return absorb < expand

    def _attend_expanded(
        self, step: Step, q: np.ndarray, past: np.ndarray, keys: np.ndarray, values: np.ndarray, out: np.ndarray
    ) -> None:
        """q [n, heads, nope + rope], past [m, rank + rope]: fills in out [n, heads, v].

        A few heads at a time, so that their keys and values take no more than `buffer_bytes` (or what one head needs).
        """
        s, m, workers = self.shape, len(past), self.store.workers
        k_width, v_width = (-(-width // _LANES) * _LANES for width in (s.nope + s.rope, s.v))
        per_head = 4 * m * (k_width + v_width)
        bounded = self.buffer_bytes // per_head
        side_by_side = bounded >= workers.count
        most = min(bounded // workers.count, _CHUNK_BYTES // per_head) if side_by_side else bounded
        heads = max(1, min(most, -(-s.n_head // workers.count)))

        def expand(a: int) -> None:
            b = min(a + heads, s.n_head)
            k, v = np.zeros((b - a, m, k_width), np.float32), np.zeros((b - a, m, v_width), np.float32)
            np.matmul(past[:, : s.rank], keys[a:b].transpose(0, 2, 1), out=k[..., : s.nope])
            k[..., s.nope : s.nope + s.rope] = past[:, s.rank :]
            np.matmul(past[:, : s.rank], values[a:b].transpose(0, 2, 1), out=v[..., : s.v])
            result = np.empty((len(q), b - a, s.v), np.float32)
            team = _ALONE if side_by_side else workers
            queries = np.ascontiguousarray(q[:, a:b])
            step.over(queries, k, v, result, self.span, team)
            out[:, a:b] = result

        runs = range(0, s.n_head, heads)
        if side_by_side:
            workers.map(expand, runs, s.n_head * m * (s.rank + len(q)) * (s.nope + s.rope + s.v))
        else:
            for a in runs:
                expand(a)
