"""Heat maps of values by tensor: a row for each layer, a column for each kind of tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...imatrix.coverage import layer_and_role

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
