"""Where the names of points go in a picture, so that none lies on another, on a point or on a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Box = tuple[float, float, float, float]  # left, lower y, right, upper y, in pixels
Point = tuple[float, float]
_GAP = 8, 2  # pixels between labels beside and above each other


def label_boxes(
    points: Sequence[Point], sizes: Sequence[Point], lines: Sequence[Sequence[Point]], area: Box, radius: float = 5
) -> list[Box]:
    """A box of the given size (width, height) for each point. lines: what is drawn through which points; area: that the boxes
    lie in; radius: of the points' marks. All in pixels."""
    taken: list[Box] = [(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    taken += [box for line in lines for a, b in pairwise(line) for box in _boxes_along(a, b)]
    found: dict[int, Box] = {}
    for number in sorted(range(len(points)), key=lambda i: points[i]):
        places = _places(points[number], *sizes[number], radius + 2)
        costs = [(_cost(box, taken, area) + 0.02 * distance, i) for i, (box, distance) in enumerate(places)]
        best = found[number] = places[min(costs)[1]][0]
        taken.append((best[0] - _GAP[0], best[1] - _GAP[1], best[2] + _GAP[0], best[3] + _GAP[1]))
    return [found[number] for number in range(len(points))]


def _places(point: Point, width: float, height: float, nearest: float) -> list[tuple[Box, float]]:
    """Boxes around a point, and how far away each is."""
    found = []
    for ring in range(12):
        gap = nearest + ring * 0.6 * height
        for dx, dy in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            left = point[0] + (gap if dx > 0 else -gap - width if dx < 0 else -width / 2)
            bottom = point[1] + (gap if dy > 0 else -gap - height if dy < 0 else -height / 2)
            found.append(((left, bottom, left + width, bottom + height), gap))
    return found


def _boxes_along(a: Point, b: Point) -> list[Box]:
    """Small boxes that cover a line."""
    steps = max(1, int(max(abs(b[0] - a[0]), abs(b[1] - a[1])) / 6))
    middles = [(a[0] + (b[0] - a[0]) * i / steps, a[1] + (b[1] - a[1]) * i / steps) for i in range(steps + 1)]
    return [(x - 2, y - 2, x + 2, y + 2) for x, y in middles]


def _cost(box: Box, taken: Sequence[Box], area: Box) -> float:
    """Pixels of the box that lie on what is there, and many more for what lies outside of the area."""
    covered = sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0])) * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in taken
    )
    outside = max(0.0, area[0] - box[0], box[2] - area[2]) + max(0.0, area[1] - box[1], box[3] - area[3])
    return covered + 1000 * outside
