"""Pictures of measurements, as PNG files (or SVG or PDF, as the file's suffix says); they need the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .heat_maps import colours_of, draw_map, label_roles, map_height, tensor_grid
from .style import COLOURS, new_axes, new_figure, save_figure, styled

if TYPE_CHECKING:
    from ...runtime.evaluate.bench import Depth
    from ...runtime.evaluate.compare import Comparison, LayerError


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
