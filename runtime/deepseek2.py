"""Graph of the `deepseek2` architecture (DeepSeek V2, V3, R1): latent attention (MLA) and grouped mixture of experts.

Latent attention (arXiv:2405.04434, section 2.1): per token only a latent c [rank] and one rotated key k_pe, shared by all
heads, are kept. Head h's key is (K_h c, k_pe) and its value V_h c. GGUF holds K and V in up to two ways:

    attn_kv_b            [heads, nope + v, rank]: K_h above V_h
    attn_k_b, attn_v_b   K_h transposed, and V_h; as one 2D tensor each (ik_llama.cpp, beside kv_b) or 3D with a matrix per
                         head (llama.cpp, without kv_b)

and there are two ways to compute with them, equal but for rounding: expand the keys and values of all tokens, or absorb K_h
into the query (q_h K_h) and V_h into the output, so that attention runs on the latents themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..formats import FormatError, PlanError
from .attention import causal_attention
from .cache import KVCache
from .decoder import Block, Decoder, Settings, Step, embedding_and_head
from .feedforward import GatedFeedForward
from .hyper import Hyper
from .moe import MixtureOfExperts, Router
from .norms import RMSNorm
from .rope import Rope, rope_from, yarn_mscale
from .weights import Linear, WeightStore

MODES = ("auto", "expand", "absorb")


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
        self.store, self.shape = store, shape
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

    def observe(self, latents: np.ndarray, q_nope: np.ndarray, mixed: np.ndarray | None) -> None:
        """latents [n, rank]; q_nope [n, heads, nope]; mixed [heads, n, rank]: each head's attention-weighted latents."""
        if self.kv_b is not None:
            self.kv_b.observe(latents)
        if self.k_b is not None:
            _observe_heads(self.k_b, q_nope.transpose(1, 0, 2))
        if self.v_b is not None and mixed is not None:
            _observe_heads(self.v_b, mixed)


def _observe_heads(linear: Linear, inputs: np.ndarray) -> None:
    """inputs [heads, n, columns]: rows of their own matrix each, or all of the one matrix of a 2D tensor."""
    if linear.matrices == 1:
        linear.observe(inputs)
        return
    for head, rows in enumerate(inputs):
        linear.observe(rows, head)


class LatentAttention:
    """One layer's attention; the cache holds (latent, rotated key) of each token: rank + rope numbers."""

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
        self.store, self.layer, self.rope, self.scale = store, layer, rope, np.float32(scale)
        self.mode, self.scores_bytes = settings.mla, settings.scores_bytes

    def __call__(self, x: np.ndarray, step: Step) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        shape, n = self.shape, len(x)
        q = self.q.matmul(self.q_a_norm(self.q_a.matmul(x)) if self.q_a is not None else x)
        q = q.reshape(n, shape.n_head, shape.nope + shape.rope)
        kept = self.kv_a.matmul(x)
        kept[:, : shape.rank] = self.kv_a_norm(kept[:, : shape.rank])
        table = step.table(self.rope)
        self.rope.rotate(q[..., shape.nope :], table)
        self.rope.rotate(kept[:, None, shape.rank :], table)
        queries = q * self.scale
        keys, values = self.matrices.load()
        mixed = np.empty((n, shape.n_head, shape.v), np.float32)
        for cache, rows in step.segments:
            past = cache.append(self.layer, "kv", kept[rows, None])[0]
            latent_mix = None
            absorb = self._absorb_is_cheaper(rows.stop - rows.start, len(past))
            if absorb or (self.store.observer is not None and self.matrices.v_b is not None):
                latent_mix = self._attend_latents(queries[rows], past, keys)
            if absorb:
                assert latent_mix is not None
                np.matmul(latent_mix, values.transpose(0, 2, 1), out=mixed[rows].transpose(1, 0, 2))
            else:
                mixed[rows] = self._attend_expanded(queries[rows], past, keys, values)
            if self.store.observer is not None:
                self.matrices.observe(kept[rows, : shape.rank], q[rows, :, : shape.nope], latent_mix)
        return self.output.matmul(mixed.reshape(n, -1))

    def _absorb_is_cheaper(self, new: int, total: int) -> bool:
        """Multiplications per head: expanding costs `total` products with K and V, absorbing costs wider attention."""
        if self.mode != "auto":
            return self.mode == "absorb"
        s = self.shape
        expand = total * s.rank * (s.nope + s.v) + new * total * (s.nope + s.rope + s.v)
        absorb = new * s.rank * (s.nope + s.v) + new * total * (2 * s.rank + s.rope)
        return absorb < expand

    def _attend_latents(self, q: np.ndarray, past: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """q [n, heads, nope + rope], past [m, rank + rope] -> each head's weighted latents [heads, n, rank]."""
        s = self.shape
        wide = np.empty((s.n_head, len(q), s.rank + s.rope), np.float32)
        np.matmul(q[..., : s.nope].transpose(1, 0, 2), keys, out=wide[..., : s.rank])
        wide[..., s.rank :] = q[..., s.nope :].transpose(1, 0, 2)
        return causal_attention(wide[None], past[None], past[None, :, : s.rank], self.scores_bytes, self.store.workers)[0]

    def _attend_expanded(self, q: np.ndarray, past: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """q [n, heads, nope + rope], past [m, rank + rope] -> [n, heads, v]; a few heads at a time, to bound their K and V."""
        s, m, workers = self.shape, len(past), self.store.workers
        latents = past[:, : s.rank]
        out = np.empty((len(q), s.n_head, s.v), np.float32)
        bounded = max(1, self.scores_bytes // (4 * m * (s.nope + s.rope + s.v)))
        step = min(bounded, -(-s.n_head // workers.count))

        def attend(a: int) -> None:
            b = min(a + step, s.n_head)
            k = np.empty((b - a, m, s.nope + s.rope), np.float32)
            np.matmul(latents, keys[a:b].transpose(0, 2, 1), out=k[..., : s.nope])
            k[..., s.nope :] = past[:, s.rank :]
            v = np.matmul(latents, values[a:b].transpose(0, 2, 1))
            result = causal_attention(q[:, a:b].transpose(1, 0, 2)[:, None], k, v, self.scores_bytes, workers)
            out[:, a:b] = result[:, 0].transpose(1, 0, 2)

        workers.map(attend, range(0, s.n_head, step), s.n_head * m * (s.rank + len(q)) * (s.nope + s.rope + s.v))
        return out


def _feed_forward(store: WeightStore, hyper: Hyper, layer: int) -> Callable[[np.ndarray], np.ndarray]:
    prefix, n_embd = f"blk.{layer}.", hyper.int("embedding_length")
    if layer < hyper.int("leading_dense_block_count", 0):
        return GatedFeedForward.load(store, prefix, "", n_embd, hyper.int("feed_forward_length"))
    n_expert, n_ff = hyper.int("expert_count"), hyper.int("expert_feed_forward_length")
    # Published files call the bias exp_probs_b.bias; the first ones left the suffix away.
    bias = next((name for name in (f"{prefix}exp_probs_b.bias", f"{prefix}exp_probs_b") if name in store), None)
    router = Router(
        store.linear(f"{prefix}ffn_gate_inp.weight", n_embd, n_expert),
        used=hyper.int("expert_used_count"),
        gating=hyper.int("expert_gating_func", 1) or 1,
        bias=store.vector(bias, n_expert) if bias else None,
        groups=hyper.int("expert_group_count", 1) or 1,
        groups_used=hyper.int("expert_group_used_count", 1) or 1,
        normalise=hyper.flag("expert_weights_norm"),
        scale=hyper.float("expert_weights_scale", 1.0) or 1.0,
    )
    if router.gating not in (1, 2):
        raise PlanError(f"{hyper.where}: expert gating function {router.gating} is not supported (1 softmax, 2 sigmoid)")
    shared, n_shared = None, hyper.int("expert_shared_count", 0)
    if n_shared:
        shared = GatedFeedForward.load(store, prefix, "_shexp", n_embd, n_ff * n_shared)
    return MixtureOfExperts(router, GatedFeedForward.load(store, prefix, "_exps", n_embd, n_ff, n_expert), shared)


def build(store: WeightStore, hyper: Hyper, settings: Settings) -> Decoder:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for an unknown setting."""
    if settings.mla not in MODES:
        raise PlanError(f"mla is one of {', '.join(MODES)}, not {settings.mla!r}")
    shape, epsilon = Shape(hyper), hyper.float("attention.layer_norm_rms_epsilon")
    rope = rope_from(hyper, shape.rope, True)
    scale = (shape.nope + shape.rope) ** -0.5
    if "rope.scaling.yarn_log_multiplier" in hyper:
        scale *= yarn_mscale(hyper.float("rope.scaling.factor"), hyper.float("rope.scaling.yarn_log_multiplier")) ** 2
    blocks = [
        Block(
            RMSNorm(store, f"blk.{i}.attn_norm.weight", shape.n_embd, epsilon),
            LatentAttention(store, hyper, i, rope, scale, settings),
            RMSNorm(store, f"blk.{i}.ffn_norm.weight", shape.n_embd, epsilon),
            _feed_forward(store, hyper, i),
        )
        for i in range(hyper.int("block_count"))
    ]
    embedding, head = embedding_and_head(store, shape.n_embd)

    def new_cache(limit: int) -> KVCache:
        return KVCache(len(blocks), {"kv": (1, shape.rank + shape.rope)}, limit)

    norm = RMSNorm(store, "output_norm.weight", shape.n_embd, epsilon)
    return Decoder(store, embedding, blocks, norm, head, hyper.int("context_length"), new_cache, settings)
