"""Layers of state space models: Mamba (arXiv:2312.00752), Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....data_classes import dataclass
from ....formats import FormatError
from ...hparams import HParams

if TYPE_CHECKING:
    from ...graph import GraphBuilder, Value


@dataclass(frozen=True)
class StateSpace:
    """Sizes of a layer.

    inner   numbers of its values in all heads together
    heads   of Mamba-2, which share the factors b and c of `groups` groups; None in Mamba: one for all values
    rank    of Mamba: of the matrix that its steps come from
    size    of the state: numbers per value
    kernel  tokens of its convolution
    """

    inner: int
    heads: int | None
    groups: int
    rank: int
    size: int
    kernel: int

    @classmethod
    def of(cls, hparams: HParams, *, has_heads: bool) -> StateSpace:
        """Raises FormatError where heads cannot share values or groups evenly."""
        inner, size, kernel = (hparams.size(f"ssm.{key}") for key in ("inner_size", "state_size", "conv_kernel"))
        rank, groups = hparams.size("ssm.time_step_rank"), hparams.size("ssm.group_count", 1, 0) or 1
        if has_heads and (inner % rank or rank % groups or inner % groups):
            raise FormatError(f"{hparams.path}: {rank} heads of {inner} numbers in all cannot share {groups} groups evenly")
        return cls(inner, rank if has_heads else None, groups if has_heads else 1, rank, size, kernel)

    @property
    def channels(self) -> int:
        """Of the convolution: the values, in Mamba-2 followed by b and c of all groups."""
        return self.inner + (2 * self.groups * self.size if self.heads else 0)

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer keeps per sequence."""
        heads = self.heads or 1
        return {"convolution": (self.kernel - 1, self.channels), "scan": (heads, self.size, self.inner // heads)}


def state_space(graph: GraphBuilder, x: Value, layer: int, sizes: StateSpace, *, epsilon: float, plain_norms: bool) -> Value:
    """From the tensors blk.N.ssm_{in,conv1d,a,d,out}; of Mamba-2 ssm_dt.bias and, if it has one, ssm_norm of each group;
    of Mamba ssm_{x,dt} and, if it has them, ssm_{dt,b,c}_norm.

    plain_norms: Mamba's steps and factors are normalised without weights (Falcon Mamba)
    """
    prefix = f"blk.{layer}.ssm_"
    if sizes.heads is None:
        gate, out = _mamba(graph, x, layer, prefix, sizes, epsilon, plain_norms)
    else:
        gate, out = _mamba2(graph, x, layer, prefix, sizes, sizes.heads)
    out = graph.gated(gate, graph.reshape(out, sizes.inner), "silu")
    if f"{prefix}norm.weight" in graph:
        out = graph.norm(graph.reshape(out, sizes.groups, sizes.inner // sizes.groups), f"{prefix}norm", epsilon)
    return graph.linear(out, f"{prefix}out", x.shape[0])


def _mamba2(graph: GraphBuilder, x: Value, layer: int, prefix: str, sizes: StateSpace, heads: int) -> tuple[Value, Value]:
    """The gate and the result of the scan."""
    shared = sizes.groups * sizes.size
    projected = graph.linear(x, f"{prefix}in", sizes.inner + sizes.channels + heads)
    gate, mixed, dt = graph.split(projected, sizes.inner, sizes.channels, heads)
    mixed = graph.short_convolution(mixed, f"{prefix}conv1d", layer)
    values, b, c = graph.split(mixed, sizes.inner, shared, shared)
    b, c = (graph.reshape(part, sizes.groups, sizes.size) for part in (b, c))
    return gate, graph.selective_scan(graph.reshape(values, heads, sizes.inner // heads), dt, b, c, layer, prefix)


def _mamba(
    graph: GraphBuilder, x: Value, layer: int, prefix: str, sizes: StateSpace, epsilon: float, plain_norms: bool
) -> tuple[Value, Value]:
    """The gate and the result of the scan."""
    values, gate = graph.split(graph.linear(x, f"{prefix}in", 2 * sizes.inner), sizes.inner, sizes.inner)
    values = graph.short_convolution(values, f"{prefix}conv1d", layer)
    parts = graph.split(graph.linear(values, f"{prefix}x", sizes.rank + 2 * sizes.size), sizes.rank, sizes.size, sizes.size)

    def normalised(part: Value, name: str) -> Value:
        if f"{prefix}{name}_norm.weight" in graph:
            return graph.norm(part, f"{prefix}{name}_norm", epsilon)
        return graph.plain_norm(part, epsilon) if plain_norms else part

    dt, b, c = (normalised(part, name) for part, name in zip(parts, ("dt", "b", "c"), strict=True))
    dt = graph.linear(dt, f"{prefix}dt", sizes.inner)
    values, dt, b, c = (graph.reshape(part, 1, part.shape[0]) for part in (values, dt, b, c))
    return gate, graph.selective_scan(values, dt, b, c, layer, prefix)
