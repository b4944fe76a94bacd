"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each element of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....data_classes import dataclass
from ....formats import PlanError
from ...hparams import HParams

if TYPE_CHECKING:
    from ...graph import GraphBuilder, Value

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class KimiDeltaHeads:
    """n heads of queries, keys and values of `width` elements; kernel: tokens of their convolutions; lower_bound: of the
    logarithm of a decay, 0 for none."""

    n: int
    width: int
    kernel: int
    lower_bound: float = 0.0

    @classmethod
    def of(cls, hparams: HParams) -> KimiDeltaHeads:
        """Raises PlanError for a bound that the file says is not used."""
        n, width, kernel = (hparams.size(key) for key in ("attention.head_count", "kda.head_dim", "ssm.conv_kernel"))
        bound = hparams.float("kda.gate_lower_bound", 0.0)
        if bound > 0 or (bound and not hparams.flag("kda.safe_gate", True)):
            raise PlanError(
                f"{hparams.path}: kda.gate_lower_bound {bound:g} without kda.safe_gate, or above 0, is not supported"
            )
        return cls(n, width, kernel, bound)

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer keeps per sequence."""
        convolutions = {f"convolution_{part}": (self.kernel - 1, self.n * self.width) for part in PARTS}
        return convolutions | {"delta": (self.n, self.width, self.width)}


def kimi_delta_attention(graph: GraphBuilder, x: Value, layer: int, heads: KimiDeltaHeads, *, epsilon: float) -> Value:
    """From the tensors blk.N.attn_{q,k,v,output} and ssm_{conv1d_q,conv1d_k,conv1d_v,f_a,f_b,beta,a,dt,g_a,g_b,norm}. Those of
    f and g are two matrices, or one with the name ssm_X_a (Ling 3) or ssm_X (Kimi K3)."""
    prefix, size = f"blk.{layer}.", heads.n * heads.width

    def by_head(part: Value) -> Value:
        return graph.reshape(part, heads.n, heads.width)

    def projected(name: str) -> Value:
        name = f"{prefix}ssm_{name}"
        if f"{name}_b.weight" in graph:
            return by_head(graph.linear(graph.linear(x, f"{name}_a", heads.width), f"{name}_b", size))
        return by_head(graph.linear(x, name if f"{name}.weight" in graph else f"{name}_a", size))

    def convolved(part: str) -> Value:
        inputs = graph.linear(x, f"{prefix}attn_{part}", size)
        return by_head(graph.short_convolution(inputs, f"{prefix}ssm_conv1d_{part}", layer, state=f"convolution_{part}"))

    q, k, v = (convolved(part) for part in PARTS)
    alpha, beta = projected("f"), graph.linear(x, f"{prefix}ssm_beta", heads.n)
    out = graph.gated_delta_rule(q, k, v, alpha, beta, layer, f"{prefix}ssm_", lower_bound=heads.lower_bound)
    out = graph.gated(projected("g"), graph.norm(out, f"{prefix}ssm_norm", epsilon), "sigmoid")
    return graph.linear(out, f"{prefix}attn_output", x.shape[0])
