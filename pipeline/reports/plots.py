"""Pictures of measurements, as PNG files (or SVG or PDF, as the file's suffix says); they need the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...imatrix.coverage import layer_and_role
from .style import COLOURS, new_axes, new_figure, save_figure, styled

if TYPE_CHECKING:
    from ...runtime.evaluate.bench import Depth
    from ...runtime.evaluate.compare import Comparison, LayerError


_OUTSIDE = "outside"  # the row of what is in no layer
_WITHOUT_DATA = "#d62728"  # without data


def tensor_grid(values: Mapping[str, float]) -> tuple[np.ndarray, list[str], list[str]]:
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


def draw_map(figure: Any, axes: Any, grid: np.ndarray, rows: Sequence[str], label: str, **options: Any) -> Any:
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


def label_roles(axes: Any, roles: Sequence[str]) -> None:
    axes.set_xticks(range(len(roles)), roles, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)


def map_height(rows: int) -> float:
    return 2.2 + min(8.0, 0.22 * rows)


def colours_of(name: str) -> Any:
    import matplotlib

    return matplotlib.colormaps[name].with_extremes(under=_WITHOUT_DATA, bad="white")


@styled
def plot_sweep(rows: Sequence[Depth], title: str, path: Path) -> None:
    """Prompt and generation speed over the tokens in the cache, with standard deviations where there are repetitions."""
    figure, (upper, lower) = new_axes(2, 1, 10, 6.5, sharex=True)
    depths = [r.n_kv for r in rows]
    for axes, label, speeds, errors, colour in (
        (upper, f"prompt, {rows[0].pp} tokens", [r.s_pp for r in rows], [r.stddev_pp for r in rows], COLOURS[0]),
        (lower, f"generation, {rows[0].tg} tokens", [r.s_tg for r in rows], [r.stddev_tg for r in rows], COLOURS[1]),
    ):
        axes.errorbar(depths, speeds, errors if any(errors) else None, fmt="o-", color=colour, markersize=4, elinewidth=1)
        highest = max(speed + error for speed, error in zip(speeds, errors, strict=True))
        axes.set(ylabel="tokens per second", title=label, ylim=(0, 1.05 * highest))
    lower.set(xlabel="tokens in the context before")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


@styled
def plot_comparison(comparison: Comparison, title: str, path: Path) -> None:
    """Errors of the layers' outputs; below, heat maps of the errors of weights, and of products, layers by kinds of tensors."""
    maps = [
        ("relative error of the weights", {t.name: t.relative for t in comparison.tensors if t.relative > 0}),
        ("relative error of the products", {t.name: t.product for t in comparison.tensors if t.product}),
    ]
    grids = [(label, *tensor_grid(values)) for label, values in maps if values]
    heights = [3.4] * bool(comparison.layers) + [map_height(len(rows)) + 0.8 for _, _, rows, _ in grids]
    figure = new_figure(10, sum(heights) or 2.0)
    panels = list(figure.subplots(max(1, len(heights)), 1, squeeze=False, height_ratios=heights or [1.0])[:, 0])
    if comparison.layers:
        _layers(panels.pop(0), comparison.layers)
    for axes, (label, grid, rows, roles) in zip(panels, grids, strict=False):
        axes.grid(False)
        draw_map(figure, axes, grid, rows, "relative error", cmap=colours_of("viridis"), vmin=0)
        label_roles(axes, roles)
        axes.set_title(label)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _layers(axes: Any, layers: Sequence[LayerError]) -> None:
    """The error of each layer's outputs, of all tokens and of the worst one, with plain numbers on a logarithmic scale."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    numbers = [e.layer for e in layers]
    axes.plot(numbers, [e.worst for e in layers], "^--", color=COLOURS[1], markersize=4, label="worst token")
    axes.plot(numbers, [e.relative for e in layers], "o-", color=COLOURS[0], markersize=4, label="all tokens")
    axes.set(xlabel="layer", ylabel="relative error", title="outputs of the layers")
    if all(e.relative > 0 for e in layers):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
