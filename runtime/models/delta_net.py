"""Linear attention by the gated delta rule (Gated Delta Networks, arXiv:2412.06464), as Qwen3-Next and Qwen 3.5 have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...data_classes import dataclass
from ...formats import FormatError
from ..hparams import HParams, n_layers

if TYPE_CHECKING:
    from ..graph import GraphBuilder, Value

DELTA_NET_ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")


@dataclass(frozen=True)
class DeltaHeads:
    """n value heads share the queries and keys of n_k heads; widths are elements per head; kernel: the convolution's tokens."""

    n: int
    n_k: int
    k_width: int
    v_width: int
    kernel: int

    @classmethod
    def of(cls, hparams: HParams) -> DeltaHeads:
        """Raises FormatError where value heads cannot share keys evenly."""
        n, n_k, inner = (hparams.size(f"ssm.{key}") for key in ("time_step_rank", "group_count", "inner_size"))
        if n % n_k or inner % n:
            raise FormatError(f"{hparams.path}: {n} value heads of {inner} numbers in all cannot share {n_k} keys evenly")
        return cls(n, n_k, hparams.size("ssm.state_size"), inner // n, hparams.size("ssm.conv_kernel"))

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values."""
        return 2 * self.n_k * self.k_width + self.n * self.v_width

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer keeps per sequence."""
        return {"convolution": (self.kernel - 1, self.channels), "delta": (self.n, self.k_width, self.v_width)}


def recurrent_layers(hparams: HParams) -> list[bool]:
    """For each layer whether it keeps a recurrent state, as the metadata say: all do in a model without these keys."""
    count = n_layers(hparams)
    listed = hparams.flags("attention.recurrent_layers", count)
    if listed is not None:
        return listed
    return hparams.flags("full_attention_interval", count) or [(i + 1) % 4 != 0 for i in range(count)]


def gated_delta_net(
    graph: GraphBuilder, x: Value, layer: int, heads: DeltaHeads, *, epsilon: float, tiled: bool, gate_function: str = "silu"
) -> Value:
    """From the tensors blk.N.attn_{qkv,gate}, ssm_{conv1d,a,dt,norm,out}, and ssm_ba, or ssm_alpha and ssm_beta.

    tiled: see `ops.GatedDeltaRule`; gate_function: of the gate of the result, see `ops.GatedActivation`.
    """
    prefix, keys, values = f"blk.{layer}.", heads.n_k * heads.k_width, heads.n * heads.v_width
    projected = graph.linear(x, f"{prefix}attn_qkv", heads.channels)
    gate = graph.reshape(graph.linear(x, f"{prefix}attn_gate", values), heads.n, heads.v_width)
    beta, alpha = _factors(graph, x, f"{prefix}ssm_", heads)
    q, k, v = graph.split(graph.short_convolution(projected, f"{prefix}ssm_conv1d", layer), keys, keys, values)
    q, k = (graph.reshape(part, heads.n_k, heads.k_width) for part in (q, k))
    v = graph.reshape(v, heads.n, heads.v_width)
    out = graph.gated_delta_rule(q, k, v, alpha, beta, layer, f"{prefix}ssm_", tiled=tiled)
    out = graph.gated(gate, graph.norm(out, f"{prefix}ssm_norm", epsilon), gate_function)
    return graph.linear(out, f"{prefix}ssm_out", x.shape[0])


def _factors(graph: GraphBuilder, x: Value, prefix: str, heads: DeltaHeads) -> tuple[Value, Value]:
    """beta and alpha of each value head: from one matrix, where those of the heads that share keys come in succession, or from
    two."""
    if f"{prefix}ba.weight" not in graph:
        return graph.linear(x, f"{prefix}beta", heads.n), graph.linear(x, f"{prefix}alpha", heads.n)
    shared = heads.n // heads.n_k
    joined = graph.reshape(graph.linear(x, f"{prefix}ba", 2 * heads.n), heads.n_k, 2 * shared)
    beta, alpha = (graph.reshape(part, heads.n) for part in graph.split(joined, shared, shared))
    return beta, alpha
