"""How all pictures look: size, colours, grid; and where labels go so that none lies on another."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ParamSpec

from ...formats import PlanError

P = ParamSpec("P")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by the colour-blind (Okabe, Ito)
INK, PALE = "#333333", "#999999"
_GAP = 8, 2  # pixels between labels beside and above each other
_RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": PALE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "errorbar.capsize": 2,
}


def check_picture(path: Path) -> None:
    """Raises PlanError if no picture can be drawn to that file; called before the work is done, not after."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise PlanError("--plot needs matplotlib: pip install matplotlib") from None
    if path.suffix.lower() not in ("", ".png", ".svg", ".pdf"):
        raise PlanError(f"--plot: {path} cannot be drawn; its name may end in .png, .svg or .pdf")
    if not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise PlanError(f"--plot: the folder {path.absolute().parent} is not there, or cannot be written to")


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # which measures texts
    return figure


def new_axes(rows: int, columns: int, width: float, height: float, *, sharex: bool = False) -> tuple[Any, list[Any]]:
    """A figure of so many inches, and its axes row by row."""
    figure = new_figure(width, height)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex).ravel())


def styled(draw: Callable[P, None]) -> Callable[P, None]:
    """The function, whose pictures have the style."""

    @functools.wraps(draw)
    def drawn(*arguments: P.args, **keywords: P.kwargs) -> None:
        import matplotlib

        with matplotlib.rc_context(_RC):
            draw(*arguments, **keywords)

    return drawn


def save_figure(figure: Any, path: Path) -> None:
    """Writes the figure. Raises PlanError for a suffix that is no picture."""
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from None


def place_labels(
    axes: Any, points: Sequence[tuple[float, float, str, str]], lines: Sequence[Sequence[tuple[float, float]]]
) -> None:
    """Writes a label beside each point, where it lies on no other label, point or line, with a thin line to a point that it had
    to leave. Called when the axes have their limits and the figure its layout.

    points: (x, y, label, colour); lines: what is drawn through which points, in the axes' units.
    """
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    area = axes.get_window_extent(renderer)
    at = [tuple(axes.transData.transform((x, y))) for x, y, _, _ in points]
    taken: list[tuple[float, float, float, float]] = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    for line in lines:
        ends = [tuple(axes.transData.transform(point)) for point in line]
        taken += [box for a, b in pairwise(ends) for box in _boxes_along(a, b)]
    scale = figure.dpi / 72
    for number in sorted(range(len(points)), key=lambda i: at[i]):
        x, y, label, colour = points[number]
        text = axes.annotate(label, (x, y), fontsize=7.5, color=colour, annotation_clip=False)
        extent = text.get_window_extent(renderer)
        text.remove()
        best = min(
            (_cost(box, taken, area) + 0.02 * distance, i, box)
            for i, (box, distance) in enumerate(_places(at[number], extent.width, extent.height))
        )[2]
        taken.append((best[0] - _GAP[0], best[1] - _GAP[1], best[2] + _GAP[0], best[3] + _GAP[1]))
        offset = ((best[0] - at[number][0]) / scale, (best[1] - at[number][1]) / scale)
        far = max(abs(offset[0]), abs(offset[1])) > 1.5 * max(extent.height, 12) / scale
        arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": PALE, "shrinkA": 0, "shrinkB": 3} if far else None
        axes.annotate(label, (x, y), offset, textcoords="offset points", fontsize=7.5, color=colour, arrowprops=arrow)


def _places(point: tuple[float, float], width: float, height: float) -> list[tuple[tuple[float, float, float, float], float]]:
    """Boxes (left, bottom, right, top) around a point in pixels, and how far away each is."""
    found = []
    for ring in range(12):
        gap = 7 + ring * 0.6 * height
        for dx, dy in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            left = point[0] + (gap if dx > 0 else -gap - width if dx < 0 else -width / 2)
            bottom = point[1] + (gap if dy > 0 else -gap - height if dy < 0 else -height / 2)
            found.append(((left, bottom, left + width, bottom + height), gap))
    return found


def _boxes_along(a: tuple[float, float], b: tuple[float, float]) -> list[tuple[float, float, float, float]]:
    """Small boxes that cover a line."""
    steps = max(1, int(max(abs(b[0] - a[0]), abs(b[1] - a[1])) / 6))
    middles = [(a[0] + (b[0] - a[0]) * i / steps, a[1] + (b[1] - a[1]) * i / steps) for i in range(steps + 1)]
    return [(x - 2, y - 2, x + 2, y + 2) for x, y in middles]


def _cost(box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]], area: Any) -> float:
    """Pixels of the box that lie on what is there, and many more for what lies outside of the axes."""
    covered = sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0])) * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in taken
    )
    outside = max(0.0, area.x0 - box[0], box[2] - area.x1) + max(0.0, area.y0 - box[1], box[3] - area.y1)
    return covered + 1000 * outside
