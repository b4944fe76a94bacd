"""Which option each unit takes so that together they fit a budget and do the least damage: the multiple-choice knapsack.

The lower convex hull of every unit's options and one price per byte (the Lagrangian) decide all but a few units (Sinha and
Zoltners 1979). What is left of the budget is then spent on the units whose choice was closest to another one, the core
(Pisinger 1995), by dynamic programming, and at last on single steps that still fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...formats import PlanError

CORE = 48  # units that the dynamic programme decides anew
BINS = 1 << 16  # steps of the budget that it tells apart


@dataclass(frozen=True)
class Option:
    """What a unit would take (bytes) and what damage it would do (in any unit that adds up)."""

    nbytes: int
    damage: float


def allocate(units: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The index of the option that each unit takes: bytes at most `budget`, and the least damage in all.

    Deterministic; the bound is exact, the optimum near to exact. Raises PlanError when the smallest options exceed the budget.
    """
    fronts = [_front(options) for options in units]
    least = sum(options[front[0]].nbytes for options, front in zip(units, fronts, strict=True))
    if least > budget:
        raise PlanError(f"the smallest types allowed take {least:,} bytes, more than the {budget:,} there are")
    chosen, price = _greedy(units, fronts, budget)
    better = _core(units, fronts, chosen, price, budget)
    return _filled(units, fronts, better, budget)


def total(units: Sequence[Sequence[Option]], chosen: Sequence[int]) -> Option:
    """Bytes and damage of a choice."""
    picked = [options[i] for options, i in zip(units, chosen, strict=True)]
    return Option(sum(o.nbytes for o in picked), float(sum(o.damage for o in picked)))


def smallest(units: Sequence[Sequence[Option]], damage: float) -> list[int]:
    """The choice of fewest bytes whose damage is at most that; found by halving the budget. Raises PlanError if none is."""
    low = total(units, [_front(options)[0] for options in units]).nbytes
    high = total(units, [_front(options)[-1] for options in units]).nbytes
    best = allocate(units, high)
    if total(units, best).damage > damage:
        raise PlanError(
            f"the largest types allowed do a damage of {total(units, best).damage:.3g}, more than {damage:.3g}: allow larger"
        )
    while high - low > max(1, high // 20000):
        middle = (low + high) // 2
        found = allocate(units, middle)
        if total(units, found).damage <= damage:
            best, high = found, middle
        else:
            low = middle
    return best


def _front(options: Sequence[Option]) -> list[int]:
    """Options that no other one beats in both, from the smallest to the one of least damage."""
    order = sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].damage))
    front: list[int] = []
    for i in order:
        if not front or options[i].damage < options[front[-1]].damage:
            front.append(i)
    return front


def _hull(options: Sequence[Option], front: Sequence[int]) -> list[int]:
    """The part of a front on its lower convex hull: each step saves less damage per byte than the one before."""
    hull: list[int] = []
    for i in front:
        while len(hull) > 1 and _gain(options, hull[-2], hull[-1]) <= _gain(options, hull[-2], i):
            hull.pop()
        hull.append(i)
    return hull


def _gain(options: Sequence[Option], small: int, large: int) -> float:
    """Damage saved per byte."""
    return (options[small].damage - options[large].damage) / (options[large].nbytes - options[small].nbytes)


def _greedy(units: Sequence[Sequence[Option]], fronts: Sequence[list[int]], budget: int) -> tuple[list[int], float]:
    """Steps along the hulls, best first, until one does not fit; and the price of a byte there."""
    chosen = [front[0] for front in fronts]
    left = budget - total(units, chosen).nbytes
    steps = []
    for u, (options, front) in enumerate(zip(units, fronts, strict=True)):
        steps += [(-_gain(options, a, b), u, b) for a, b in pairwise(_hull(options, front))]
    for slope, u, option in sorted(steps):
        cost = units[u][option].nbytes - units[u][chosen[u]].nbytes
        if cost > left:
            return chosen, -slope
        chosen[u] = option
        left -= cost
    return chosen, 0.0


def _core(
    units: Sequence[Sequence[Option]], fronts: Sequence[list[int]], chosen: list[int], price: float, budget: int
) -> list[int]:
    """The choice with the units decided anew whose second-best option is next to as good at that price."""

    def regret(u: int) -> float:
        cost = [units[u][i].damage + price * units[u][i].nbytes for i in fronts[u] if i != chosen[u]]
        mine = units[u][chosen[u]]
        return min(cost) - (mine.damage + price * mine.nbytes)

    core = sorted((u for u, front in enumerate(fronts) if len(front) > 1), key=lambda u: (regret(u), u))[:CORE]
    if not core:
        return chosen
    floor = sum(units[u][fronts[u][0]].nbytes for u in core)
    rest = sum(options[i].nbytes for u, (options, i) in enumerate(zip(units, chosen, strict=True)) if u not in set(core))
    room = budget - rest - floor
    unit = max(1, -(-room // BINS))
    bins = room // unit
    best = np.zeros(bins + 1)
    taken = np.zeros((len(core), bins + 1), np.uint8)
    for row, u in enumerate(core):
        new = np.full(bins + 1, np.inf)
        for k, i in enumerate(fronts[u]):
            weight = -(-(units[u][i].nbytes - units[u][fronts[u][0]].nbytes) // unit)
            if weight > bins:
                break
            damage = best[: bins + 1 - weight] + units[u][i].damage
            better = damage < new[weight:]
            new[weight:][better] = damage[better]
            taken[row, weight:][better] = k
        best = new
    found, at = list(chosen), int(np.argmin(best))
    for row in range(len(core) - 1, -1, -1):
        u = core[row]
        found[u] = fronts[u][taken[row, at]]
        at -= -(-(units[u][found[u]].nbytes - units[u][fronts[u][0]].nbytes) // unit)
    return found if total(units, found).damage < total(units, chosen).damage else chosen


def _filled(units: Sequence[Sequence[Option]], fronts: Sequence[list[int]], chosen: list[int], budget: int) -> list[int]:
    """The choice with larger options taken, each time that which saves most, while one fits in what is left."""
    chosen = list(chosen)
    left = budget - total(units, chosen).nbytes
    while True:
        steps = [
            (units[u][i].damage - units[u][chosen[u]].damage, u, i)
            for u, front in enumerate(fronts)
            for i in front
            if 0 < units[u][i].nbytes - units[u][chosen[u]].nbytes <= left
        ]
        if not steps:
            return chosen
        _, u, i = min(steps)
        left -= units[u][i].nbytes - units[u][chosen[u]].nbytes
        chosen[u] = i
