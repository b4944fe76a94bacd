"""How all pictures look: size, colours, grid; and where labels go so that none lies on another."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from ...errors import PlanError, installation
from .labels import label_boxes

P = ParamSpec("P")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by the colour-blind (Okabe, Ito)
INK, PALE = "#333333", "#999999"
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


def missing_matplotlib() -> str | None:
    """None if pictures can be drawn, else what is missing for that and how it is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return f"matplotlib: {installation('matplotlib')}"
    return None


def check_picture(path: Path) -> None:
    """Raises PlanError if no picture can be drawn to that file; called before the work is done, not after."""
    if (missing := missing_matplotlib()) is not None:
        raise PlanError(f"--plot needs {missing}")
    if path.suffix.lower() not in ("", ".png", ".svg", ".pdf"):
        raise PlanError(f"--plot: {path} cannot be drawn; its name may end in .png, .svg or .pdf")
    if not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise PlanError(f"--plot: the folder {path.absolute().parent} does not exist, or cannot be written to")


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
    bounds = axes.get_window_extent(renderer)
    at = [tuple(axes.transData.transform((x, y))) for x, y, _, _ in points]
    drawn = [[tuple(axes.transData.transform(point)) for point in line] for line in lines]
    extents = []
    for x, y, label, _ in points:
        text = axes.annotate(label, (x, y), fontsize=7.5, annotation_clip=False)
        extents.append(text.get_window_extent(renderer))
        text.remove()
    sizes = [(extent.width, extent.height) for extent in extents]
    boxes = label_boxes(at, sizes, drawn, (bounds.x0, bounds.y0, bounds.x1, bounds.y1))
    scale = figure.dpi / 72
    for (x, y, label, colour), place, (_, height), box in zip(points, at, sizes, boxes, strict=True):
        offset = ((box[0] - place[0]) / scale, (box[1] - place[1]) / scale)
        far = max(abs(offset[0]), abs(offset[1])) > 1.5 * max(height, 12) / scale
        arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": PALE, "shrinkA": 0, "shrinkB": 3} if far else None
        axes.annotate(label, (x, y), offset, textcoords="offset points", fontsize=7.5, color=colour, arrowprops=arrow)
