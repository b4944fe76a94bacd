"""Pictures of importance matrices, as PNG files; they need the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...formats import TensorSource
from ...imatrix import Imatrix
from ...imatrix.coverage import covered_layers
from ...imatrix.entries import MIN_TOKENS, has_data
from ...quantize.recipes.type_selection import is_quantizable
from .plots import colours_of, draw_map, label_roles, map_height, tensor_grid
from .style import new_figure, save_figure

if TYPE_CHECKING:
    from ...imatrix.statistics import ImatrixComparison, Similarity, TensorStatistics


def plot_coverage(imatrix: Imatrix, source: TensorSource, title: str, path: Path) -> None:
    """Tokens that each tensor saw, layers by tensors, red without data; below, those of each expert, red without a token."""
    from matplotlib.colors import LogNorm

    tokens = {}
    for tensor in filter(is_quantizable, source.tensors.values()):
        entry = imatrix.entries.get(tensor.name)
        tokens[tensor.name] = float(entry[1].mean()) if entry is not None and has_data(*entry) else 0.0
    grid, rows, roles = tensor_grid(tokens)
    layers = [row for row in covered_layers(imatrix, source) if row.experts]
    parts = 2 if layers else 1
    figure = new_figure(10, map_height(len(rows)) + 1.0 + (map_height(len(layers)) if layers else 0))
    upper, *lower = list(figure.subplots(parts, 1, squeeze=False)[:, 0])
    colours = colours_of("viridis")
    most = float(np.nanmax(grid, initial=2.0))
    shown = np.where(grid == 0, 0.5, grid)  # below the scale: drawn in red
    draw_map(figure, upper, shown, rows, "tokens (per matrix)", cmap=colours, norm=LogNorm(1, most))
    label_roles(upper, roles)
    without_data = int((grid == 0).sum())
    upper.set_title(f"tensors: {without_data} without data (red), white: no such tensor", fontsize=9)
    if layers:
        widest = max(row.experts for row in layers)
        seen = np.full((len(layers), widest), np.nan)
        for i, row in enumerate(layers):
            seen[i, : row.experts] = np.maximum(row.tokens, 0.5)
        most = max(float(np.nanmax(seen)), 2.0)
        least = min(float(seen[seen >= 1].min(initial=most)), most / 2)
        axes = lower[0]
        draw_map(
            figure, axes, seen, [str(row.layer) for row in layers], "tokens", cmap=colours, norm=LogNorm(max(least, 1), most)
        )
        axes.set_xlabel("expert")
        axes.xaxis.get_major_locator().set_params(integer=True)
        none, few = sum(len(row.unseen) for row in layers), sum(len(row.undersampled) for row in layers)
        axes.set_title(f"experts: {none} without a token (red), {few} with fewer than {MIN_TOKENS}", fontsize=9)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def plot_statistics(statistics: Sequence[TensorStatistics], similarity: Sequence[Similarity], title: str, path: Path) -> None:
    """Layers by tensors: the mean square (logarithm), how evenly it is spread over the columns, and what the ten largest have;
    with similarities, those too."""
    maps: list[tuple[str, Mapping[str, float], str, tuple[float, float] | None]] = [
        (
            "log10 of the mean square",
            _each(statistics, lambda e: np.log10(e.mean_square) if e.mean_square else np.nan),
            "magma",
            None,
        ),
        ("evenness over the columns", _each(statistics, lambda e: e.evenness), "viridis", (0.0, 1.0)),
        ("share of the ten largest columns", _each(statistics, lambda e: e.top_share), "cividis", (0.0, 1.0)),
    ]
    if similarity:
        cosines = {f"blk.{s.layer}.{s.kind}.weight": np.nan if s.cosine is None else s.cosine for s in similarity}
        maps.append(("cosine with the layer before", cosines, "viridis", None))
    _maps(maps, title, path)


def plot_imatrix_comparison(comparison: ImatrixComparison, title: str, path: Path) -> None:
    """Layers by tensors: 1 - cosine (logarithm), and the ratio of the sums (logarithm to base 2)."""
    distances = {d.name: np.log10(max(1 - d.cosine, 1e-12)) for d in comparison.differences if d.cosine is not None}
    ratios = {d.name: np.log2(d.ratio) for d in comparison.differences if d.ratio}
    widest = max((abs(r) for r in ratios.values()), default=0.0) or 1e-6
    maps = [("log10 of 1 - cosine", distances, "magma", None), ("log2 of second / first", ratios, "RdBu_r", (-widest, widest))]
    _maps([m for m in maps if m[1]], title, path)


def _each(statistics: Sequence[TensorStatistics], value: Callable[[TensorStatistics], float]) -> dict[str, float]:
    return {entry.name: value(entry) for entry in statistics}


def _maps(maps: Sequence[tuple[str, Mapping[str, float], str, tuple[float, float] | None]], title: str, path: Path) -> None:
    grids = [(label, *tensor_grid(values), colours, limits) for label, values, colours, limits in maps]
    figure = new_figure(10, sum(map_height(len(rows)) + 0.8 for _, _, rows, _, _, _ in grids) or 2.0)
    ratios = [map_height(len(rows)) for _, _, rows, _, _, _ in grids] or [1.0]
    panels = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, (label, grid, rows, roles, colours, limits) in zip(panels, grids, strict=False):
        low, high = limits or (None, None)
        draw_map(figure, axes, grid, rows, label, cmap=colours_of(colours), vmin=low, vmax=high)
        label_roles(axes, roles)
        axes.set_title(label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
