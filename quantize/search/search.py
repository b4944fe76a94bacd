"""The best recipe of a given size: a type for every tensor, so that the predicted damage is least.

A tensor's damage is the relative error of its rows in a type (damage.py), turned into a divergence of the model's predictions
by what was measured for its group: a curve through a few (error, divergence) points. Small perturbations of different tensors
are nearly independent, so their divergences are taken to add up, and choosing types is a knapsack (allocate.py). Where much is
damaged the sum is too large; which types are best hardly depends on that.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from ..recipes.type_selection import quantisable
from .allocate import Option, allocate, smallest

# Tensors that hold the same matrices as another one, for other ways to compute: a share of its sensitivity, not measured.
TWINS = {"attn_k_b.weight": ("attn_kv_b.weight", 0.5), "attn_v_b.weight": ("attn_kv_b.weight", 0.5)}

Measure = Callable[[Mapping[str, TensorType]], float]


@dataclass
class Curve:
    """Divergence over the summed relative error of a group: points (error, divergence) in order of error.

    Between two points the logarithms are interpolated, beyond them the divergence is proportional to the error. Without any
    point the two are the same number.
    """

    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, error: float, divergence: float) -> None:
        """A measured point; what is lost in the noise counts as a thousandth of the error."""
        if error > 0 and math.isfinite(divergence):
            self.points = sorted([*self.points, (error, max(divergence, 1e-3 * error))])

    def slope(self, error: float) -> float:
        """Divergence per error."""
        if not self.points or error <= 0:
            return 1.0 if not self.points else self.points[0][1] / self.points[0][0]
        i = bisect([e for e, _ in self.points], error)
        if i in (0, len(self.points)):
            e, d = self.points[min(i, len(self.points) - 1)]
            return d / e
        (e0, d0), (e1, d1) = self.points[i - 1], self.points[i]
        if e1 <= e0 * 1.0001:
            return d0 / e0
        share = math.log(error / e0) / math.log(e1 / e0)
        return math.exp((1 - share) * math.log(d0 / e0) + share * math.log(d1 / e1))


@dataclass
class Group:
    """Tensors that are perturbed together when sensitivity is measured, and what came of it."""

    name: str
    tensors: tuple[str, ...]
    curve: Curve = field(default_factory=Curve)


def grouped(names: Sequence[str], most: int) -> list[Group]:
    """At most about `most` groups: every tensor alone if there are so few, else each role in as many bands of layers as allow
    it. Twins are in none."""
    own = [name for name in names if not _twin_of(name, names)]
    if len(own) <= most:
        return [Group(name, (name,)) for name in own]
    roles: dict[str, list[str]] = {}
    for name in own:
        roles.setdefault(_role(name)[1], []).append(name)
    single = [members for members in roles.values() if len(members) == 1]
    bands = max(1, (most - len(single)) // max(1, len(roles) - len(single)))
    found = []
    for role, members in roles.items():
        count = min(bands, len(members))
        cuts = [len(members) * i // count for i in range(count + 1)]
        for low, high in pairwise(cuts):
            layers = [_role(name)[0] for name in members[low:high]]
            label = f"{role}, layers {layers[0]} to {layers[-1]}" if layers[0] is not None else role
            found.append(Group(label, tuple(members[low:high])))
    return found


def _role(name: str) -> tuple[int | None, str]:
    """('blk.3.ffn_up.weight') -> (3, 'ffn_up.weight')."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def _twin_of(name: str, names: Sequence[str] | Mapping[str, object]) -> tuple[str, float] | None:
    layer, role = _role(name)
    if role in TWINS and layer is not None:
        other = f"blk.{layer}.{TWINS[role][0]}"
        if other in names:
            return other, TWINS[role][1]
    return None


@dataclass(frozen=True)
class Budget:
    """Bytes for the tensors whose name a regex finds (None: for all that no other budget takes)."""

    nbytes: int
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Found:
    """A choice of types: name -> type, the bytes of these tensors, and the divergence predicted for them."""

    types: dict[str, TensorType]
    nbytes: int
    predicted: float


class Search:
    """Types for the tensors of one model.

    options   tensor -> types that it may get (damage.fitting)
    errors    tensor -> type name -> relative error (damage.errors)
    groups    what sensitivity is measured of
    """

    def __init__(
        self,
        tensors: Mapping[str, SourceTensor],
        options: Mapping[str, Sequence[TensorType]],
        errors: Mapping[str, Mapping[str, float]],
        groups: Sequence[Group],
    ):
        self.tensors, self.options, self.errors, self.groups = tensors, options, errors, groups
        self._group = {name: group for group in groups for name in group.tensors}
        for name in tensors:
            twin = _twin_of(name, tensors)
            if twin is not None:
                self._group[name] = self._group[twin[0]]

    def damage(self, name: str, kind: TensorType) -> float:
        """The divergence that this tensor as that type adds, in nats."""
        error, group = self.errors[name][kind.name], self._group[name]
        twin = _twin_of(name, self.tensors)
        # The curve is over the group's summed error: as if all of the group had this tensor's.
        return error * group.curve.slope(error * len(group.tensors)) * (twin[1] if twin is not None else 1.0)

    def within(self, budgets: Sequence[Budget]) -> Found:
        """The types of least damage whose bytes are within each budget. Raises PlanError when the smallest types are not."""
        left, types = list(self.tensors), {}
        for budget in sorted(budgets, key=lambda b: b.pattern is None):
            names = [name for name in left if budget.pattern is None or budget.pattern.search(name)]
            left = [name for name in left if name not in set(names)]
            if budget.pattern is not None and not names:
                raise PlanError(f"{budget.pattern.pattern!r} finds no tensor that could be quantised")
            units = [self._options(name) for name in names]
            chosen = allocate(units, budget.nbytes)
            types |= {name: self.options[name][i] for name, i in zip(names, chosen, strict=True)}
        return self.found({name: types[name] for name in self.tensors if name in types})

    def below(self, divergence: float) -> Found:
        """The fewest bytes with at most that divergence predicted. Raises PlanError when no types reach it."""
        units = [self._options(name) for name in self.tensors]
        chosen = smallest(units, divergence)
        return self.found({name: self.options[name][i] for name, i in zip(self.tensors, chosen, strict=True)})

    def found(self, types: dict[str, TensorType]) -> Found:
        """What a choice of types amounts to. Twins do not count in the prediction: prompts are not computed with them."""
        nbytes = sum(kind.nbytes(self.tensors[name].shape) for name, kind in types.items())
        predicted = sum(self.damage(name, kind) for name, kind in types.items() if not _twin_of(name, self.tensors))
        return Found(types, nbytes, predicted)

    def _options(self, name: str) -> list[Option]:
        shape = self.tensors[name].shape
        return [Option(kind.nbytes(shape), self.damage(name, kind)) for kind in self.options[name]]

    def span(self) -> tuple[int, int]:
        """Bytes with the smallest types and with the largest."""
        sizes = [[kind.nbytes(self.tensors[name].shape) for kind in kinds] for name, kinds in self.options.items()]
        return sum(map(min, sizes)), sum(map(max, sizes))

    def probes(self, bits: Sequence[float]) -> list[tuple[Group, dict[str, TensorType]]]:
        """What to measure: each group with the types nearest to so many bits per weight, and all else as it is."""
        found = []
        for group in self.groups:
            for wanted in bits:
                types = {name: self._nearest(name, wanted) for name in group.tensors}
                if not any(group is g and types == t for g, t in found):
                    found.append((group, types))
        return found

    def _nearest(self, name: str, bits: float) -> TensorType:
        tensor = self.tensors[name]
        return min(
            self.options[name],
            key=lambda kind: (abs(8 * kind.nbytes(tensor.shape) / tensor.n_elements - bits), kind.name),
        )

    def learn(self, group: Group, types: Mapping[str, TensorType], divergence: float) -> None:
        """A measured divergence of the model with this group alone quantised to these types."""
        group.curve.add(sum(self.errors[name][kind.name] for name, kind in types.items()), divergence)

    def neighbours(self, found: Found, group: Group) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        """The group's tensors a step smaller and a step larger than found: about double and half the error, if any."""
        return self._step(found, group, 2.2), self._step(found, group, 1 / 2.2)

    def _step(self, found: Found, group: Group, factor: float) -> dict[str, TensorType]:
        types = {}
        for name in group.tensors:
            of = self.errors[name]
            wanted = math.log(of[found.types[name].name] * factor + 1e-12)
            types[name] = min(self.options[name], key=lambda kind: abs(math.log(of[kind.name] + 1e-12) - wanted))
        return types

    def correct(self, group: Group, found: Found, slope: float, trust: float) -> None:
        """Bends a group's curve so that it goes through a slope measured around what was found, by so much of the difference of
        the logarithms (trust 0 to 1)."""
        error = sum(self.errors[name][found.types[name].name] for name in group.tensors)
        before = group.curve.slope(error)
        factor = (max(slope, before / 8) / before) ** trust
        group.curve.points = [(e, d * factor) for e, d in group.curve.points] or [(error, error * before * factor)]


def choosable(source: TensorSource) -> dict[str, SourceTensor]:
    """The tensors of a model that types are chosen for."""
    return {name: tensor for name, tensor in source.tensors.items() if quantisable(tensor)}


def packed(
    types: Mapping[str, TensorType], tensors: Mapping[str, SourceTensor], keep: re.Pattern[str] | None
) -> dict[str, TensorType]:
    """The same types with their rows interleaved wherever there is such a twin that fits, but for names that `keep` finds
    (tensors for a GPU, whose kernels want plain rows) and embeddings, which are looked up by row."""
    found = {}
    for name, kind in types.items():
        twin = TYPES[kind.packed] if kind.packed and not name.startswith(("token_embd", "per_layer_token_embd")) else None
        fits = twin is not None and tensors[name].shape[1] % twin.rows == 0 and (keep is None or not keep.search(name))
        found[name] = twin if twin is not None and fits else kind
    return found
