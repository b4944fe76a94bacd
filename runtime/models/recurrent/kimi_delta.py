"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each element of a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...hparams import HParams

if TYPE_CHECKING:
    from ...graph import GraphBuilder, Value

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class KimiDeltaHeads:
    """n heads of queries, keys and values of `width` elements; kernel: tokens of their convolutions."""

    n: int
    width: int
    kernel: int

    @classmethod
    def of(cls, hparams: HParams) -> KimiDeltaHeads:
        return cls(*(hparams.size(key) for key in ("attention.head_count", "kda.head_dim", "ssm.conv_kernel")))

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer keeps per sequence."""
        convolutions = {f"convolution_{part}": (self.kernel - 1, self.n * self.width) for part in PARTS}
        return convolutions | {"delta": (self.n, self.width, self.width)}


def kimi_delta_attention(graph: GraphBuilder, x: Value, layer: int, heads: KimiDeltaHeads, *, epsilon: float) -> Value:
    """From the tensors blk.N.attn_{q,k,v,output} and ssm_{conv1d_q,conv1d_k,conv1d_v,f_a,f_b,beta,a,dt,g_a,g_b,norm}."""
    prefix, size = f"blk.{layer}.", heads.n * heads.width

    def by_head(part: Value) -> Value:
        return graph.reshape(part, heads.n, heads.width)

    def low_rank(name: str) -> Value:
        """Numbers of all heads from one head's width."""
        return by_head(graph.linear(graph.linear(x, f"{prefix}ssm_{name}_a", heads.width), f"{prefix}ssm_{name}_b", size))

    def convolved(part: str) -> Value:
        projected = graph.linear(x, f"{prefix}attn_{part}", size)
        return by_head(graph.short_convolution(projected, f"{prefix}ssm_conv1d_{part}", layer, state=f"convolution_{part}"))

    q, k, v = (convolved(part) for part in PARTS)
    alpha, beta = low_rank("f"), graph.linear(x, f"{prefix}ssm_beta", heads.n)
    out = graph.gated_delta_rule(q, k, v, alpha, beta, layer, f"{prefix}ssm_", tiled=False)
    out = graph.gated(low_rank("g"), graph.norm(out, f"{prefix}ssm_norm", epsilon), "sigmoid")
    return graph.linear(out, f"{prefix}attn_output", x.shape[0])
