"""Latent attention with keys and values that are weights: parameter sinks (openPangu 2)."""

from __future__ import annotations

from ...data_classes import dataclass
from .op import Op
from .values import Value, Weight


@dataclass(frozen=True)
class SinkAttention(Op):
    """As `LatentAttention`, where all queries see the latents `sinks`, normalised, with the keys `sink_k_pe` besides.

    q (heads, nope + rope), latent (rank,), k_pe (rope,) -> (heads, v_width)

    k_b, v_b   as in `LatentAttention`
    sinks      (rank, n); norm (rank,): of an RMS norm with epsilon; sink_k_pe (rope, n), not rotated
    window     keys that are seen, the token's own and those before it; 0: all
    selection  the keys that each query sees, of `SelectKeys`; None: all
    """

    q: Value
    latent: Value
    k_pe: Value
    layer: int
    scale: float
    v_width: int
    k_b: Weight
    v_b: Weight
    sinks: Weight
    sink_k_pe: Weight
    norm: Weight
    epsilon: float
    window: int = 0
    selection: Value | None = None
