"""Gated short convolutions (LFM2, arXiv:2511.23404)."""

from __future__ import annotations

from ...graph import GraphBuilder, Value


def gated_convolution(graph: GraphBuilder, x: Value, layer: int) -> Value:
    """out(c * convolution(b * v)), b, c and v from one matrix: the tensors blk.N.shortconv.{in_proj,conv,out_proj}."""
    prefix, n = f"blk.{layer}.shortconv.", x.shape[0]
    b, c, values = graph.split(graph.linear(x, f"{prefix}in_proj", 3 * n), n, n, n)
    mixed = graph.short_convolution(graph.gated(b, values, "identity"), f"{prefix}conv", layer, "none")
    return graph.linear(graph.gated(c, mixed, "identity"), f"{prefix}out_proj", n)
