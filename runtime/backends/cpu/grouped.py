"""Grouped-query attention: what every architecture without latent attention uses, its variants being options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention import Span
from .decoder import Settings, Step
from .kv_cache import Part, part_of
from .norms import heads_norm
from .rope import Rope
from .weights import Together, WeightStore


@dataclass(frozen=True)
class Heads:
    """n queries that share n_kv keys and values; widths are elements per head."""

    n: int
    n_kv: int
    k_width: int
    v_width: int


def cached_parts(heads: Heads, settings: Settings) -> dict[str, Part]:
    """What a layer keeps per token. Raises PlanError for types that do not fit the model or the kind of attention."""
    k, v = settings.cache_types
    keys, values = (
        part_of("keys", "-ctk", heads.n_kv, heads.k_width, k),
        part_of("values", "-ctv", heads.n_kv, heads.v_width, v),
    )
    return {"k": keys, "v": values}


class GroupedAttention:
    """One layer's attention, from the tensors PREFIX{q,k,v,output}, or PREFIX{qkv,output}.

    PREFIX{q,k,v,output}.bias, PREFIX{q,k}_norm and PREFIX{sinks} are used where the model has them. Norms are of each head, or,
    as their shape says, of all heads together or of each with weights of its own.

    rope              None: no rotation in this layer
    span              what a query sees of the past, and how its scores are treated
    norm_after_rope   q and k are normalised after their rotation instead of before
    """

    def __init__(
        self,
        store: WeightStore,
        layer: int,
        n_embd: int,
        heads: Heads,
        rope: Rope | None,
        span: Span,
        epsilon: float,
        norm_after_rope: bool = False,
    ):
        prefix = f"blk.{layer}.attn_"
        outputs = {"q": heads.n * heads.k_width, "k": heads.n_kv * heads.k_width, "v": heads.n_kv * heads.v_width}
        self.fused = f"{prefix}qkv.weight" in store
        inputs = {"qkv": sum(outputs.values())} if self.fused else outputs
        self.input = Together([store.linear(f"{prefix}{part}.weight", n_embd, rows) for part, rows in inputs.items()])
        self.ends = np.cumsum(list(outputs.values()))[:-1]
        self.output = store.linear(f"{prefix}output.weight", heads.n * heads.v_width, n_embd)
        outputs["output"] = n_embd
        names = {part: f"{prefix}{part}.bias" for part in outputs}
        self.bias = {part: store.vector(names[part], rows) for part, rows in outputs.items() if names[part] in store}
        names = {part: (f"{prefix}{part}_norm.weight", n) for part, n in (("q", heads.n), ("k", heads.n_kv))}
        self.norm = {p: heads_norm(store, name, n, heads.k_width, epsilon) for p, (name, n) in names.items() if name in store}
        self.layer, self.heads, self.rope, self.span, self.norm_after_rope = layer, heads, rope, span, norm_after_rope

    def _with_bias(self, part: str, out: np.ndarray, heads: int, width: int) -> np.ndarray:
        if part in self.bias:
            out += self.bias[part]
        return out.reshape(len(out), heads, width)

    def _rotated(self, part: str, out: np.ndarray, heads: int, step: Step) -> np.ndarray:
        out = self._with_bias(part, out, heads, self.heads.k_width)
        if part in self.norm and not self.norm_after_rope:
            out = self.norm[part](out)
        if self.rope is not None:
            self.rope.rotate(out, step.table(self.rope), step.workers)
        if part in self.norm and self.norm_after_rope:
            out = self.norm[part](out)
        return out

    def __call__(self, x: np.ndarray, step: Step) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        heads = self.heads
        outputs = self.input.matmul(x)
        if self.fused:
            outputs = [np.ascontiguousarray(part) for part in np.split(outputs[0], self.ends, axis=1)]
        q, k, v = outputs
        q = self._rotated("q", q, heads.n, step)
        k = self._rotated("k", k, heads.n_kv, step)
        v = self._with_bias("v", v, heads.n_kv, heads.v_width)
        mixed = step.attend(self.layer, q, k, v, self.span)
        step.check(self.output.store, self.layer, mixed)
        out = self.output.matmul(mixed)
        if "output" in self.bias:
            out += self.bias["output"]
        return out
