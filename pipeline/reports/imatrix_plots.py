"""Pictures of importance matrices, as PNG files; they need the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...formats import TensorSource
from ...imatrix import Imatrix
from ...imatrix.coverage import covered_layers, layer_and_role
from ...imatrix.entries import MIN_TOKENS, has_data
from ...quantize.recipes.type_selection import is_quantizable
from .style import new_figure, save_figure

if TYPE_CHECKING:
    from ...imatrix.statistics import ImatrixComparison, Similarity, TensorStatistics

_OUTSIDE = "outside"  # the row of what is in no layer
_WITHOUT_DATA = "#d62728"  # without data


def _grid(values: Mapping[str, float]) -> tuple[np.ndarray, list[str], list[str]]:
    """Values by tensor name as an array [layers, kinds], NaN where there is none; names of its rows and columns."""
    places = {name: layer_and_role(name) for name in values}
    inside = {layer for layer, _ in places.values() if layer is not None}
    rows = [str(layer) for layer in sorted(inside)]
    if any(layer is None for layer, _ in places.values()):
        rows.append(_OUTSIDE)
    roles = sorted({kind for _, kind in places.values()})
    grid = np.full((len(rows), len(roles)), np.nan)
    for name, (layer, kind) in places.items():
        grid[rows.index(_OUTSIDE if layer is None else str(layer)), roles.index(kind)] = values[name]
    return grid, rows, roles


def _map(figure: Any, axes: Any, grid: np.ndarray, rows: Sequence[str], label: str, **options: Any) -> Any:
    from matplotlib.colors import LogNorm

    image = axes.imshow(np.ma.masked_invalid(grid), aspect="auto", interpolation="nearest", **options)
    step = max(1, -(-len(rows) // 24))
    ticks = list(range(0, len(rows), step))
    if rows and rows[-1] == _OUTSIDE and ticks[-1] != len(rows) - 1:
        ticks[-1] = len(rows) - 1
    axes.set_yticks(ticks, [rows[i] for i in ticks], fontsize=7)
    axes.set_ylabel("layer")
    bar = figure.colorbar(image, ax=axes, label=label)
    if isinstance(image.norm, LogNorm):
        ticks = _counts_within(*image.get_clim())
        bar.set_ticks(ticks, labels=[f"{tick:,.0f}" for tick in ticks])
        bar.minorticks_off()
    return image


def _counts_within(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic scale: powers of ten, or where few are within, finer ones."""
    from matplotlib.ticker import MaxNLocator

    powers = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for steps in (powers, [m * p for p in powers for m in (1, 2, 5)], MaxNLocator(4, integer=True).tick_values(low, high)):
        within = [float(step) for step in steps if low <= step <= high]
        if len(within) > 2:
            break
    return within


def _label_roles(axes: Any, roles: Sequence[str]) -> None:
    axes.set_xticks(range(len(roles)), roles, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)


def _height(rows: int) -> float:
    return 2.2 + min(8.0, 0.22 * rows)


def plot_coverage(imatrix: Imatrix, source: TensorSource, title: str, path: Path) -> None:
    """Tokens that each tensor saw, layers by tensors, red without data; below, those of each expert, red without a token."""
    from matplotlib.colors import LogNorm

    tokens = {}
    for tensor in filter(is_quantizable, source.tensors.values()):
        entry = imatrix.entries.get(tensor.name)
        tokens[tensor.name] = float(entry[1].mean()) if entry is not None and has_data(*entry) else 0.0
    grid, rows, roles = _grid(tokens)
    layers = [row for row in covered_layers(imatrix, source) if row.experts]
    parts = 2 if layers else 1
    figure = new_figure(10, _height(len(rows)) + 1.0 + (_height(len(layers)) if layers else 0))
    upper, *lower = list(figure.subplots(parts, 1, squeeze=False)[:, 0])
    colours = _colours("viridis")
    most = float(np.nanmax(grid, initial=2.0))
    shown = np.where(grid == 0, 0.5, grid)  # below the scale: drawn in red
    _map(figure, upper, shown, rows, "tokens (per matrix)", cmap=colours, norm=LogNorm(1, most))
    _label_roles(upper, roles)
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
        _map(figure, axes, seen, [str(row.layer) for row in layers], "tokens", cmap=colours, norm=LogNorm(max(least, 1), most))
        axes.set_xlabel("expert")
        axes.xaxis.get_major_locator().set_params(integer=True)
        none, few = sum(len(row.unseen) for row in layers), sum(len(row.undersampled) for row in layers)
        axes.set_title(f"experts: {none} without a token (red), {few} with fewer than {MIN_TOKENS}", fontsize=9)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _colours(name: str) -> Any:
    import matplotlib

    return matplotlib.colormaps[name].with_extremes(under=_WITHOUT_DATA, bad="white")


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


def plot_comparison(comparison: ImatrixComparison, title: str, path: Path) -> None:
    """Layers by tensors: 1 - cosine (logarithm), and the ratio of the sums (logarithm to base 2)."""
    distances = {d.name: np.log10(max(1 - d.cosine, 1e-12)) for d in comparison.differences if d.cosine is not None}
    ratios = {d.name: np.log2(d.ratio) for d in comparison.differences if d.ratio}
    widest = max((abs(r) for r in ratios.values()), default=0.0) or 1e-6
    maps = [("log10 of 1 - cosine", distances, "magma", None), ("log2 of second / first", ratios, "RdBu_r", (-widest, widest))]
    _maps([m for m in maps if m[1]], title, path)


def _each(statistics: Sequence[TensorStatistics], value: Callable[[TensorStatistics], float]) -> dict[str, float]:
    return {entry.name: value(entry) for entry in statistics}


def _maps(maps: Sequence[tuple[str, Mapping[str, float], str, tuple[float, float] | None]], title: str, path: Path) -> None:
    grids = [(label, *_grid(values), colours, limits) for label, values, colours, limits in maps]
    figure = new_figure(10, sum(_height(len(rows)) + 0.8 for _, _, rows, _, _, _ in grids) or 2.0)
    ratios = [_height(len(rows)) for _, _, rows, _, _, _ in grids] or [1.0]
    panels = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, (label, grid, rows, roles, colours, limits) in zip(panels, grids, strict=False):
        low, high = limits or (None, None)
        _map(figure, axes, grid, rows, label, cmap=_colours(colours), vmin=low, vmax=high)
        _label_roles(axes, roles)
        axes.set_title(label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
