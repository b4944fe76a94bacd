"""Choosing one option per unit so that all fit a byte budget at the least total loss: the multiple-choice knapsack problem.

The lower convex hull of every unit's options and one price per byte (the Lagrange multiplier) decide all but a few units
(Sinha and Zoltners, "The Multiple-Choice Knapsack Problem", 1979). What remains of the budget is spent on the units whose
choice was closest to another one, the core (Pisinger, "A minimal algorithm for the Multiple-Choice Knapsack Problem", 1995), by
dynamic programming, and finally on single upgrades that still fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...data_classes import dataclass
from ...formats import PlanError

CORE = 48  # units that dynamic programming decides again
BINS = 1 << 16  # resolution of the budget in dynamic programming


@dataclass(frozen=True)
class TypeOption:
    """What an option costs (bytes) and what it loses (in any unit that is additive over units)."""

    nbytes: int
    loss: float


Units = Sequence[Sequence[TypeOption]]  # the options of each unit


def allocate(units: Units, budget: int) -> list[int]:
    """The index of the option chosen for each unit: at most `budget` bytes in all, at the least total loss.

    Deterministic. The budget is never exceeded; the loss is optimal or nearly so. Raises PlanError if the smallest options
    together exceed the budget.
    """
    fronts = [_pareto_front(options) for options in units]
    least = sum(options[front[0]].nbytes for options, front in zip(units, fronts, strict=True))
    if least > budget:
        raise PlanError(f"the smallest types allowed take {least:,} bytes, more than the {budget:,} there are")
    chosen, price = _greedy(units, fronts, budget)
    return _fill(units, fronts, _solve_core(units, fronts, chosen, price, budget), budget)


def total(units: Units, chosen: Sequence[int]) -> TypeOption:
    """Bytes and loss of a choice, summed over the units."""
    picked = [options[i] for options, i in zip(units, chosen, strict=True)]
    return TypeOption(sum(o.nbytes for o in picked), float(sum(o.loss for o in picked)))


def minimise_bytes(units: Units, max_loss: float) -> list[int]:
    """The choice of fewest bytes with at most this total loss, by bisecting the budget. Raises PlanError if there is none."""
    low = total(units, [_pareto_front(options)[0] for options in units]).nbytes
    high = total(units, [_pareto_front(options)[-1] for options in units]).nbytes
    best = allocate(units, high)
    if total(units, best).loss > max_loss:
        raise PlanError(
            f"the largest types allowed have a predicted loss of {total(units, best).loss:.3g}, more than {max_loss:.3g}: "
            "allow larger"
        )
    while high - low > max(1, high // 20000):
        middle = (low + high) // 2
        chosen = allocate(units, middle)
        if total(units, chosen).loss <= max_loss:
            best, high = chosen, middle
        else:
            low = middle
    return best


def _pareto_front(options: Sequence[TypeOption]) -> list[int]:
    """Indices of the options that no other one beats in both bytes and loss, by rising bytes and falling loss."""
    order = sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].loss))
    front: list[int] = []
    for i in order:
        if not front or options[i].loss < options[front[-1]].loss:
            front.append(i)
    return front


def _lower_hull(options: Sequence[TypeOption], front: Sequence[int]) -> list[int]:
    """The part of a Pareto front on its lower convex hull: each step saves less loss per byte than the one before."""
    hull: list[int] = []
    for i in front:
        while len(hull) > 1 and _saved_per_byte(options, hull[-2], hull[-1]) <= _saved_per_byte(options, hull[-2], i):
            hull.pop()
        hull.append(i)
    return hull


def _saved_per_byte(options: Sequence[TypeOption], small: int, large: int) -> float:
    return (options[small].loss - options[large].loss) / (options[large].nbytes - options[small].nbytes)


def _greedy(units: Units, fronts: Sequence[list[int]], budget: int) -> tuple[list[int], float]:
    """Steps along the hulls, those that save most per byte first, until one does not fit; and the price of a byte there."""
    chosen = [front[0] for front in fronts]
    left = budget - total(units, chosen).nbytes
    steps = []
    for u, (options, front) in enumerate(zip(units, fronts, strict=True)):
        steps += [(-_saved_per_byte(options, a, b), u, b) for a, b in pairwise(_lower_hull(options, front))]
    for slope, u, option in sorted(steps):
        cost = units[u][option].nbytes - units[u][chosen[u]].nbytes
        if cost > left:
            return chosen, -slope
        chosen[u] = option
        left -= cost
    return chosen, 0.0


def _solve_core(units: Units, fronts: Sequence[list[int]], chosen: list[int], price: float, budget: int) -> list[int]:
    """The choice with the core decided again by dynamic programming.

    The core are the CORE units with the least regret: by how much their second-best option is worse at this price per byte.
    """

    def regret(u: int) -> float:
        others = [units[u][i].loss + price * units[u][i].nbytes for i in fronts[u] if i != chosen[u]]
        current = units[u][chosen[u]]
        return min(others) - (current.loss + price * current.nbytes)

    core = sorted((u for u, front in enumerate(fronts) if len(front) > 1), key=lambda u: (regret(u), u))[:CORE]
    if not core:
        return chosen
    minimum = sum(units[u][fronts[u][0]].nbytes for u in core)
    outside = sum(options[i].nbytes for u, (options, i) in enumerate(zip(units, chosen, strict=True)) if u not in set(core))
    available = budget - outside - minimum
    bin_bytes = max(1, -(-available // BINS))
    bins = available // bin_bytes
    best = np.zeros(bins + 1)  # least loss of the units so far that fits each number of bins
    picked = np.zeros((len(core), bins + 1), np.uint8)  # index into the unit's front
    for row, u in enumerate(core):
        extended = np.full(bins + 1, np.inf)
        for k, i in enumerate(fronts[u]):
            weight = -(-(units[u][i].nbytes - units[u][fronts[u][0]].nbytes) // bin_bytes)
            if weight > bins:
                break
            loss = best[: bins + 1 - weight] + units[u][i].loss
            better = loss < extended[weight:]
            extended[weight:][better] = loss[better]
            picked[row, weight:][better] = k
        best = extended
    result, at = list(chosen), int(np.argmin(best))
    for row in range(len(core) - 1, -1, -1):
        u = core[row]
        result[u] = fronts[u][picked[row, at]]
        at -= -(-(units[u][result[u]].nbytes - units[u][fronts[u][0]].nbytes) // bin_bytes)
    return result if total(units, result).loss < total(units, chosen).loss else chosen


def _fill(units: Units, fronts: Sequence[list[int]], chosen: list[int], budget: int) -> list[int]:
    """The choice after upgrading single units, each time the upgrade that saves most, while one fits the remaining bytes."""
    chosen = list(chosen)
    left = budget - total(units, chosen).nbytes
    while True:
        upgrades = [
            (units[u][i].loss - units[u][chosen[u]].loss, u, i)
            for u, front in enumerate(fronts)
            for i in front
            if 0 < units[u][i].nbytes - units[u][chosen[u]].nbytes <= left
        ]
        if not upgrades:
            return chosen
        _, u, i = min(upgrades)
        left -= units[u][i].nbytes - units[u][chosen[u]].nbytes
        chosen[u] = i
