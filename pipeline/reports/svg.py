"""Small pictures as inline SVG: stacked bars, lines and heat maps. Colours are the page's variables:
--c0 ... --c9, --ink, --grid, --card.

Drawn 340 units wide, the width of a telephone, so that letters keep their size there; wider screens magnify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from ...data_classes import dataclass
from .labels import Box, Point, label_boxes

_WIDEST = 0.4  # of the scale that one gap between neighbouring values may take


@dataclass(frozen=True)
class ColourScale:
    """Where values above 0 lie between the lightest shade (0) and the darkest (1), linear in the logarithm between neighbours.

    values: those of the map, each once, ascending. places: theirs. is_narrowed: whether a gap takes less than its logarithm.
    """

    values: Sequence[float]
    places: Sequence[float]
    is_narrowed: bool

    def place(self, value: float) -> float:
        """The place of a value, of one beyond the ends that of the end."""
        return float(np.interp(math.log(value), np.log(self.values), self.places))

    def steps(self, n: int) -> list[float]:
        """At most n values for a legend: those of the map if they are no more, else n at even distances on the scale."""
        if len(self.values) <= n:
            return list(self.values)
        return np.exp(np.interp(np.linspace(0, 1, n), self.places, np.log(self.values))).tolist()


def scale_of(values: Sequence[float]) -> ColourScale:
    """The scale of values above 0: logarithmic, but no gap between two neighbours takes more than a share of it, so that one
    row of 32 bits among many of 3 to 6 does not make these alike."""
    distinct = np.unique(np.asarray(values, np.float64))
    gaps = np.diff(np.log(distinct))
    if not gaps.size:
        return ColourScale(distinct.tolist(), [1.0], False)
    limit = _widest(gaps.tolist(), max(_WIDEST, 1 / gaps.size))
    places = np.concatenate(([0.0], np.cumsum(np.minimum(gaps, limit))))
    return ColourScale(distinct.tolist(), (places / places[-1]).tolist(), bool(gaps.max() > limit * (1 + 1e-9)))


def _widest(gaps: Sequence[float], share: float) -> float:
    """The gap c that is this share of the sum of all gaps, none of which is taken for wider than c."""
    descending = sorted(gaps, reverse=True)
    for n, gap in enumerate(descending):  # n are wider than c
        limit = share * sum(descending[n:]) / (1 - share * n)
        if gap <= limit:
            return limit
    return descending[-1]


WIDTH = 340
COLOURS = 10
_LEFT, _RIGHT = 46, 8  # of the area in which lines are drawn
_LETTER = 5.6  # estimated width of a letter of font size 10


@dataclass(frozen=True)
class Series:
    """A line through points; y is None where there is none. dashed: a limit or a baseline, not a measurement. error: standard
    errors of y, drawn as a band of one to both sides, as a bar around a single point. labels: names of the points, which then
    have bars each. joined: whether there is a line at all."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    colour: int | None = None
    error: Sequence[float | None] | None = None
    labels: Sequence[str] = ()
    joined: bool = True

    def bands(self) -> list[list[tuple[float, float, float]]]:
        """Runs of points with an error: (x, lower end, upper end)."""
        runs: list[list[tuple[float, float, float]]] = [[]]
        for x, y, e in zip(self.x, self.y, self.error or (), strict=self.error is not None):
            if y is None or e is None or not math.isfinite(y + e):
                runs.append([])
            else:
                runs[-1].append((x, y - e, y + e))
        return [[point] for run in runs for point in run] if self.labels else [run for run in runs if run]


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], keys: Sequence[str], unit: str = "") -> str:
    """A stacked bar for each row (label, [(key, value)]), all to one scale, and a legend of the keys.

    keys: in the order of their colours, see `_area`. unit: of the values, in the texts that show on touch.
    """
    most = max((sum(v for _, v in parts) for _, parts in rows), default=0.0) or 1.0
    out, y = [], 0
    for label, parts in rows:
        out.append(_text(0, y + 11, label))
        x = 0.0
        for key, value in parts:
            width = value / most * WIDTH
            title = f"<title>{escape(f'{key}: {value:,.4g}{unit}')}</title>"
            out.append(_area(x, y + 16, max(width, 0.4), 14, keys.index(key), title))
            x += width
        y += 36
    legend, height = _legend([(key, i, False) for i, key in enumerate(keys)], y + 4)
    return _picture(out + legend, height)


def lines(
    series: Sequence[Series], x_label: str, y_label: str, *, log: bool = False, from_zero: bool = False, height: int = 190
) -> str:
    """Lines over a common x axis. log: logarithmic y axis, on which values of 0 lie at the bottom. from_zero: y begins at 0."""
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True) if y is not None and math.isfinite(y)]
    if not points:
        return ""
    ends = [end for s in series for band in s.bands() for _, *ends in band[len(band) // 4 :] for end in ends]  # settled
    ys = [y for _, y in points] + ends
    scale = _Log(ys) if log and max(ys) > 0 else _Linear(ys, from_zero)
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top, bottom = 18, height - 30

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low) if high > low else 0.5
        up = min(max(scale.place(y), 0.0), 1.0)  # a band may reach out of the picture at its beginning
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), bottom - up * (bottom - top)

    out = [_text(0, 10, y_label)]
    for value in scale.ticks:
        y = at(low, value)[1]
        out.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(_text(_LEFT - 5, y + 3.5, short_number(value), "end"))
    out += [_text(at(value, ys[0])[0], bottom + 13, short_number(value), "middle") for value in _integer_ticks(low, high)]
    out.append(_text((WIDTH + _LEFT) / 2, bottom + 26, x_label, "middle"))
    for i, s in enumerate(series):
        out += _line(s, i, at)
    out += _labels(series, at, (_LEFT, top - 14, WIDTH, bottom))
    legend, below = _legend([(s.label, _colour(s, i), s.dashed) for i, s in enumerate(series)], height + 6)
    return _picture(out + legend, below)


def heat_map(cells: Mapping[tuple[str, int], tuple[float, str]], x_label: str) -> str:
    """A row for each name and a column for each number, darker where a value is larger, on the scale of `scale_of`.

    cells: (row, column) -> (value above 0, text that shows on touch). What is missing stays blank. The legend says so where the
    scale is not a logarithmic one.
    """
    if not cells:
        return ""
    rows, last = sorted({row for row, _ in cells}), max(column for _, column in cells)
    left = max(len(row) for row in rows) * _LETTER + 6
    width, height = (WIDTH - left) / (last + 1), 14
    values = sorted({value for value, _ in cells.values()})
    scale = scale_of(values)

    def shade(value: float) -> str:
        return f'class="f0" fill-opacity="{0.1 + 0.9 * scale.place(value):.2f}"'

    out = [_text(left - 5, i * height + 10.5, row, "end") for i, row in enumerate(rows)]
    for (row, column), (value, text) in cells.items():
        place = f'x="{left + column * width:.2f}" y="{rows.index(row) * height}"'
        size = f'width="{max(width - 0.6, 0.6):.2f}" height="{height - 1}"'
        out.append(f"<rect {place} {size} {shade(value)}><title>{escape(text)}</title></rect>")
    bottom = len(rows) * height
    ticks = [(left + (value + 0.5) * width, short_number(value)) for value in _integer_ticks(0, last)]
    out += [_text(x, bottom + 12, label, "middle") for x, label in ticks]
    out.append(_text((WIDTH + left) / 2, bottom + 26, x_label, "middle"))
    digits = 4 if len(values) <= 6 else 2  # of values of the map, or of places between them
    for i, value in enumerate(scale.steps(6)):
        x = i * WIDTH / 6
        out.append(f'<rect x="{x:.1f}" y="{bottom + 36}" width="10" height="10" {shade(value)}/>')
        out.append(_text(x + 14, bottom + 45, short_number(float(f"{value:.{digits}g}"))))
    if scale.is_narrowed:
        out.append(_text(0, bottom + 61, "Shades: logarithmic, the widest gap between values narrowed"))
    return _picture(out, bottom + (68 if scale.is_narrowed else 52))


def _line(s: Series, index: int, at: Callable[[float, float], Point]) -> list[str]:
    colour, dashes = _colour(s, index), ' stroke-dasharray="4 3"' if s.dashed else ""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(s.x, s.y, strict=True):
        if y is None or not math.isfinite(y):
            runs.append([])
        else:
            runs[-1].append(at(x, y))
    out = []
    for band in s.bands():
        if len(band) == 1:
            (x, low, high) = band[0]
            (across, bottom), (_, top) = at(x, low), at(x, high)
            out.append(f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{bottom:.1f}" y2="{top:.1f}" class="s{colour}"/>')
            continue
        corners = [at(x, high) for x, _, high in band] + [at(x, low) for x, low, _ in reversed(band)]
        out.append(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" class="f{colour} band"/>')
    for run in runs:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
        if len(run) > 1 and s.joined:
            out.append(f'<polyline points="{path}" class="s{colour}"{dashes}/>')
        if not s.dashed and len(run) <= 40:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" class="f{colour}"/>' for x, y in run]
    return out


def _labels(series: Sequence[Series], at: Callable[[float, float], Point], area: Box) -> list[str]:
    """The names of the points that have one, with a thin line to a point that a name had to leave."""
    named = [(s, i) for s in series for i in range(len(s.labels)) if _is_drawn(s.y[i])]
    points = [at(s.x[i], float(s.y[i] or 0)) for s, i in named]
    sizes = [(len(s.labels[i]) * _LETTER, 10.0) for s, i in named]
    drawn = [[at(x, float(y)) for x, y in zip(s.x, s.y, strict=True) if y is not None and _is_drawn(y)] for s in series]
    joined = [line for s, line in zip(series, drawn, strict=True) if s.joined]
    bars = [[at(x, low), at(x, high)] for s in series for band in s.bands() if s.labels for x, low, high in band]
    out = []
    for (s, i), (x, y), box in zip(named, points, label_boxes(points, sizes, [*joined, *bars], area, radius=3), strict=True):
        near = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if math.dist(near, (x, y)) > 10:
            out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{near[0]:.1f}" y2="{near[1]:.1f}" class="grid"/>')
        out.append(_text(box[0], box[3] - 2, s.labels[i]))
    return out


def _is_drawn(y: float | None) -> bool:
    return y is not None and math.isfinite(y)


def _colour(s: Series, index: int) -> int:
    return (s.colour if s.colour is not None else index) % COLOURS


class _Linear:
    def __init__(self, values: Sequence[float], from_zero: bool):
        low, high = min(values), max(values)
        if from_zero:
            low = min(low, 0.0)
        if high <= low:
            low, high = (low - abs(low) * 0.05 - 1e-12, high + abs(high) * 0.05 + 1e-12) if not from_zero else (low, low + 1.0)
        step = _step(high - low, 4)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        self.ticks = [i * step for i in range(first, last + 1)]

    def place(self, y: float) -> float:
        return (y - self.ticks[0]) / ((self.ticks[-1] - self.ticks[0]) or 1.0)


class _Log:
    def __init__(self, values: Sequence[float]):
        positive = [v for v in values if v > 0]
        self.low = math.floor(math.log10(min(positive)) + 1e-9) - (min(values) <= 0)
        self.high = max(math.ceil(math.log10(max(positive)) - 1e-9), self.low + 1)
        every = max(1, -(-(self.high - self.low) // 6))
        self.ticks = [10.0**e for e in range(self.low, self.high + 1, every)]

    def place(self, y: float) -> float:
        return (max(math.log10(y), self.low) - self.low) / (self.high - self.low) if y > 0 else 0.0


def _step(span: float, parts: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides the span into at most about `parts` parts."""
    power = 10.0 ** math.floor(math.log10(span / parts))
    return next(power * m for m in (1, 2, 5, 10) if power * m * parts >= span * 0.999)


def _integer_ticks(low: float, high: float) -> list[float]:
    """Whole numbers at even distances within the range."""
    step = max(1.0, _step(high - low, 6)) if high > low else 1.0
    first = math.ceil(low / step)
    ticks = [i * step for i in range(first, math.floor(high / step) + 1)]
    return ticks or [low]


def short_number(value: float) -> str:
    """A number in short: 12, 0.05, 1e-06, 20k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _area(x: float, y: float, width: float, height: float, index: int, title: str = "") -> str:
    """A rectangle in the colour of an index; from COLOURS on the colours repeat, with a stripe for each repetition."""
    across = f'x="{x:.1f}" width="{width:.1f}"'
    thick, stripes = height / 5, index // COLOURS
    gaps = (y + height * (i + 1) / (stripes + 1) - thick / 2 for i in range(stripes))
    cut = "".join(f'<rect {across} y="{gap:.1f}" height="{thick:.1f}" class="gap"/>' for gap in gaps)
    return f'<rect {across} y="{y:.1f}" height="{height:g}" class="f{index % COLOURS}">{title}</rect>{cut}'


def _legend(entries: Sequence[tuple[str, int, bool]], y: float) -> tuple[list[str], float]:
    """(elements, height of the picture down to their end): a coloured square and a name for each entry, wrapped into lines."""
    out, x = [], 0.0
    for label, colour, dashed in entries:
        width = 26 + len(label) * _LETTER
        if x and x + width > WIDTH:
            x, y = 0.0, y + 16
        if dashed:
            ends = f'x1="{x:.1f}" x2="{x + 11:.1f}" y1="{y + 5:.1f}" y2="{y + 5:.1f}"'
            out.append(f'<line {ends} class="s{colour}" stroke-dasharray="4 3"/>')
        else:
            out.append(_area(x, y, 10, 10, colour))
        out.append(_text(x + 14, y + 9, label))
        x += width
    return out, y + 16


def _picture(elements: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">{"".join(elements)}</svg>'
