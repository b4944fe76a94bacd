"""Pictures of measurements, as PNG files (or SVG or PDF, as the file's suffix says); they need the extra `plot`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import COLOURS, new_axes, save_figure, styled

if TYPE_CHECKING:
    from ...runtime.evaluate.bench import Depth
    from ...runtime.evaluate.compare import Comparison


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
    """Errors of the layers above, those of the weights (and products) of each tensor by layer below."""
    parts = [bool(comparison.layers), any(t.relative > 0 for t in comparison.tensors)]
    figure, axes = new_axes(max(1, sum(parts)), 1, 10, 4.0 * max(1, sum(parts)))
    if parts[0]:
        top = axes.pop(0)
        numbers = [e.layer for e in comparison.layers]
        top.plot(numbers, [e.relative for e in comparison.layers], "o-", markersize=4, label="all tokens")
        top.plot(numbers, [e.worst for e in comparison.layers], "^:", markersize=4, label="worst token")
        top.set(xlabel="layer", ylabel="relative error", title="outputs of the layers")
        if any(e.worst > 0 for e in comparison.layers):
            top.set_yscale("log")
        top.xaxis.get_major_locator().set_params(integer=True)
        top.legend(fontsize=8)
    if parts[1]:
        _weights(axes.pop(0), comparison)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _weights(axes: Any, comparison: Comparison) -> None:
    by_role: dict[str, list[tuple[int, float]]] = {}
    last = max((e.layer for e in comparison.layers), default=-1)
    for t in comparison.tensors:
        match = re.match(r"blk\.(\d+)\.(.+?)(\.weight)?$", t.name)
        last = max(last, int(match[1])) if match else last
    for t in comparison.tensors:
        if t.relative <= 0:
            continue
        match = re.match(r"blk\.(\d+)\.(.+?)(\.weight)?$", t.name)
        layer = int(match[1]) if match else (-1 if t.name.startswith("token_embd") else last + 1)
        by_role.setdefault(match[2] if match else t.name.removesuffix(".weight"), []).append((layer, t.relative))
    markers = "osv^D<>pPX*"
    for i, (role, points) in enumerate(sorted(by_role.items())):
        axes.plot(*zip(*points, strict=True), markers[i % len(markers)] + "-", markersize=4, linewidth=0.8, label=role)
    axes.set(xlabel="layer (embedding before the first, output after the last)", ylabel="relative error", title="weights")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, ncols=1 + len(by_role) // 12, loc="center left", bbox_to_anchor=(1.0, 0.5))
