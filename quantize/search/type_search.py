"""Searching the best recipe of a given size: a type for every tensor, with the least predicted KL divergence.

The divergence that a tensor's type causes is predicted from the error of its rows in that type (row_sample.py) by the
sensitivity curve of the tensor's group: a line through a few measured points (error, KL divergence). With the curvature of
outputs that error is a prediction of the divergence already, which a curve only corrects. Small perturbations of
different tensors are nearly independent, so their divergences are taken to be additive, and the choice of types is a knapsack
problem (allocate.py). For strongly quantised models the sum is too large, but the ranking of the types hardly changes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from statistics import fmean, median

from ...data_classes import dataclass
from ...formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from ...jobs.patterns import NamePattern
from ..recipes.type_selection import EMBEDDINGS, is_quantizable
from .allocate import TypeOption, allocate, minimise_bytes

# MLA: tensors that repeat matrices of another one for a different way to compute attention. Name of a tensor -> (name of the
# other, share of its sensitivity): theirs is not measured, since prompts are computed without them.
DERIVED_TENSORS = {"attn_k_b.weight": ("attn_kv_b.weight", 0.5), "attn_v_b.weight": ("attn_kv_b.weight", 0.5)}


@dataclass
class SensitivityCurve:
    """KL divergence as a function of the summed error of a group: points (error, divergence), by rising error.

    Interpolated between points in logarithms, proportional to the error beyond them. Without points the divergence is taken to
    equal the error.
    """

    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, error: float, divergence: float) -> None:
        """Adds a measured point. A divergence lost in noise counts as a thousandth of the error."""
        if error > 0 and math.isfinite(divergence):
            self.points = sorted([*self.points, (error, max(divergence, 1e-3 * error))])

    def slope(self, error: float) -> float:
        """Divergence per unit of error at this error."""
        if not self.points or error <= 0:
            return 1.0 if not self.points else self.points[0][1] / self.points[0][0]
        i = bisect([e for e, _ in self.points], error)
        if i in (0, len(self.points)):
            e, d = self.points[min(i, len(self.points) - 1)]
            return d / e
        (e0, d0), (e1, d1) = self.points[i - 1], self.points[i]
        if e1 <= e0 * 1.0001:
            return d0 / e0
        t = math.log(error / e0) / math.log(e1 / e0)
        return math.exp((1 - t) * math.log(d0 / e0) + t * math.log(d1 / e1))


@dataclass
class TensorGroup:
    """Tensors that are quantised together when sensitivity is measured, and the curve measured."""

    name: str
    tensors: tuple[str, ...]
    curve: SensitivityCurve = field(default_factory=SensitivityCurve)


def group_tensors(names: Sequence[str], max_groups: int) -> list[TensorGroup]:
    """About `max_groups` groups at most: each tensor alone if that is enough, else the layers of every role in bands.

    Derived tensors are in no group.
    """
    measured = [name for name in names if not _derived_from(name, names)]
    if len(measured) <= max_groups:
        return [TensorGroup(name, (name,)) for name in measured]
    roles: dict[str, list[str]] = {}
    for name in measured:
        roles.setdefault(_layer_and_role(name)[1], []).append(name)
    singles = sum(len(members) == 1 for members in roles.values())
    bands = max(1, (max_groups - singles) // max(1, len(roles) - singles))
    groups = []
    for role, members in roles.items():
        count = min(bands, len(members))
        cuts = [len(members) * i // count for i in range(count + 1)]
        for low, high in pairwise(cuts):
            layers = [_layer_and_role(name)[0] for name in members[low:high]]
            label = f"{role}, layers {layers[0]} to {layers[-1]}" if layers[0] is not None else role
            groups.append(TensorGroup(label, tuple(members[low:high])))
    return groups


def _layer_and_role(name: str) -> tuple[int | None, str]:
    """'blk.3.ffn_up.weight' -> (3, 'ffn_up.weight'); 'output.weight' -> (None, 'output.weight')."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def _derived_from(name: str, names: Sequence[str] | Mapping[str, object]) -> tuple[str, float] | None:
    """(the tensor that this one repeats matrices of, share of its sensitivity), if it is among the names."""
    layer, role = _layer_and_role(name)
    if role in DERIVED_TENSORS and layer is not None:
        other = f"blk.{layer}.{DERIVED_TENSORS[role][0]}"
        if other in names:
            return other, DERIVED_TENSORS[role][1]
    return None


@dataclass(frozen=True)
class Budget:
    """Bytes for the tensors whose name a regex matches (None: all that no other budget covers)."""

    nbytes: int
    pattern: NamePattern | None = None


@dataclass(frozen=True)
class TypeAssignment:
    """A type for each tensor name, the bytes of these tensors, and the KL divergence predicted for them (nats)."""

    types: dict[str, TensorType]
    nbytes: int
    predicted: float


class TypeSearch:
    """Searches types for the tensors of one model.

    options  tensor name -> types that it may get (quant_error.usable_types)
    errors   tensor name -> type name -> error (quant_error.relative_errors), all relative or all in nats
    groups   of tensors whose sensitivity is measured (group_tensors)
    """

    def __init__(
        self,
        tensors: Mapping[str, SourceTensor],
        options: Mapping[str, Sequence[TensorType]],
        errors: Mapping[str, Mapping[str, float]],
        groups: Sequence[TensorGroup],
    ):
        self.tensors, self.options, self.errors, self.groups = tensors, options, errors, groups
        self._group = {name: group for group in groups for name in group.tensors}
        for name in tensors:
            origin = _derived_from(name, tensors)
            if origin is not None:
                self._group[name] = self._group[origin[0]]

    def divergence(self, name: str, tensor_type: TensorType) -> float:
        """The KL divergence in nats that this tensor adds in that type, predicted."""
        error, group = self.errors[name][tensor_type.name], self._group[name]
        origin = _derived_from(name, self.tensors)
        share = origin[1] if origin is not None else 1.0
        # The curve is over the group's summed error: as if all its tensors had this one's.
        return error * group.curve.slope(error * len(group.tensors)) * share

    def fit_budgets(self, budgets: Sequence[Budget]) -> TypeAssignment:
        """The types of least predicted divergence within each budget. Raises PlanError if the smallest types exceed one."""
        left, types = list(self.tensors), {}
        for budget in sorted(budgets, key=lambda b: b.pattern is None):
            names = [name for name in left if budget.pattern is None or budget.pattern.search(name)]
            left = [name for name in left if name not in set(names)]
            if budget.pattern is not None and not names:
                raise PlanError(f"{budget.pattern.text!r} finds no tensor that could be quantised")
            chosen = allocate([self._options(name) for name in names], budget.nbytes)
            types |= {name: self.options[name][i] for name, i in zip(names, chosen, strict=True)}
        return self.assignment({name: types[name] for name in self.tensors if name in types})

    def fit_divergence(self, max_divergence: float) -> TypeAssignment:
        """The types of fewest bytes with at most that divergence predicted. Raises PlanError if no types reach it."""
        chosen = minimise_bytes([self._options(name) for name in self.tensors], max_divergence)
        return self.assignment({name: self.options[name][i] for name, i in zip(self.tensors, chosen, strict=True)})

    def assignment(self, types: dict[str, TensorType]) -> TypeAssignment:
        """Bytes and predicted divergence of these types. Derived tensors do not count: prompts are computed without them."""
        nbytes = sum(t.nbytes(self.tensors[name].shape) for name, t in types.items())
        predicted = sum(self.divergence(name, t) for name, t in types.items() if not _derived_from(name, self.tensors))
        return TypeAssignment(types, nbytes, predicted)

    def _options(self, name: str) -> list[TypeOption]:
        shape = self.tensors[name].shape
        return [TypeOption(t.nbytes(shape), self.divergence(name, t)) for t in self.options[name]]

    def probes(
        self, bits: Sequence[float], measured: dict[str, dict[str, str]]
    ) -> list[tuple[TensorGroup, dict[str, TensorType]]]:
        """The measurements to make: each group alone quantised, to the types nearest to each of these bits per weight.

        measured: the types (tensor -> name) of such measurements by an earlier search with other types allowed, which serve
        where they are as near; new ones are added.
        """
        probes = []
        for group in self.groups:
            for target in bits:
                types = {name: self._nearest(name, target) for name in group.tensors}
                key = f"{group.name} at {target:g}"
                before = {name: TYPES[kind] for name, kind in measured.get(key, {}).items()}
                known = before.keys() == types.keys() and all(t.name in self.errors[name] for name, t in before.items())
                if known and self._distance(before, target) <= self._distance(types, target):
                    types = before
                measured[key] = {name: kind.name for name, kind in types.items()}
                if not any(group is g and types == t for g, t in probes):
                    probes.append((group, types))
        return probes

    def _distance(self, types: Mapping[str, TensorType], bits: float) -> float:
        """How far the sizes of these tensors are from a number of bits per weight, in bits."""
        shapes = {name: self.tensors[name] for name in types}
        return sum(abs(8 * kind.nbytes(shapes[n].shape) - bits * shapes[n].n_elements) for n, kind in types.items())

    def _nearest(self, name: str, bits: float) -> TensorType:
        tensor = self.tensors[name]
        return min(
            self.options[name],
            key=lambda t: (abs(8 * t.nbytes(tensor.shape) / tensor.n_elements - bits), t.name),
        )

    def add_measurement(self, group: TensorGroup, types: Mapping[str, TensorType], divergence: float) -> None:
        """Adds the measured divergence of the model with only this group quantised, to these types, to the group's curve."""
        group.curve.add(sum(self.errors[name][t.name] for name, t in types.items()), divergence)

    def neighbours(self, assignment: TypeAssignment, group: TensorGroup) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        """The group's types one step smaller and one step larger than assigned: about twice and half the error, if any."""
        return self._step(assignment, group, 2.2), self._step(assignment, group, 1 / 2.2)

    def _step(self, assignment: TypeAssignment, group: TensorGroup, factor: float) -> dict[str, TensorType]:
        types = {}
        for name in group.tensors:
            errors = self.errors[name]
            target = math.log(errors[assignment.types[name].name] * factor + 1e-12)
            types[name] = min(self.options[name], key=lambda t: abs(math.log(errors[t.name] + 1e-12) - target))
        return types

    def correct_curve(self, group: TensorGroup, assignment: TypeAssignment, slope: float, trust: float) -> None:
        """Scales a group's curve towards a slope that was measured around an assignment.

        trust: 0 leaves the curve, 1 gives it that slope; between, the difference of logarithms is scaled.
        """
        error = sum(self.errors[name][assignment.types[name].name] for name in group.tensors)
        before = group.curve.slope(error)
        factor = (max(slope, before / 8) / before) ** trust
        group.curve.points = [(e, d * factor) for e, d in group.curve.points] or [(error, error * before * factor)]


def on_one_scale(errors: Mapping[str, Mapping[str, float]], relative: Collection[str]) -> dict[str, Mapping[str, float]]:
    """Errors of which some are relative, all others being in nats: a tensor of the former, on average over its types, counts as
    the median of the others does in the same type; embeddings, which all layers see, as the largest. Where all are relative
    they stay as they are."""
    nats = [types for name, types in errors.items() if name not in relative]
    scaled = dict(errors)
    for name in relative:
        steps, counts_as = [], max if name in EMBEDDINGS else median
        for kind, error in errors[name].items():
            others = [types[kind] for types in nats if types.get(kind, 0) > 0]
            if others and error > 0:
                steps.append(math.log(counts_as(others) / error))
        factor = math.exp(fmean(steps)) if steps else 1.0
        scaled[name] = {kind: error * factor for kind, error in errors[name].items()}
    return scaled


def quantizable_tensors(source: TensorSource) -> dict[str, SourceTensor]:
    """The tensors of a model that types can be chosen for, by name."""
    return {name: tensor for name, tensor in source.tensors.items() if is_quantizable(tensor)}


def use_packed_types(
    types: Mapping[str, TensorType], tensors: Mapping[str, SourceTensor], plain: NamePattern | None
) -> dict[str, TensorType]:
    """The same types in their repacked form wherever there is one that fits the tensor's rows.

    Tensors whose name matches `plain` stay plain (those for a GPU, whose kernels take no interleaved rows), and so do
    embeddings, which are looked up by row.
    """
    result = {}
    for name, tensor_type in types.items():
        packed = TYPES[tensor_type.packed] if tensor_type.packed and name not in EMBEDDINGS else None
        fits = packed is not None and tensors[name].shape[1] % packed.rows == 0 and not (plain and plain.search(name))
        result[name] = packed if packed is not None and fits else tensor_type
    return result
