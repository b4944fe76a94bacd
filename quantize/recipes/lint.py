"""What is wrong or doubtful with a recipe: by itself, and against a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...formats import TYPES, TensorType
from ...jobs.plan import Plan
from .recipe import Rule

# Types for models that were trained with weights of -1, 0 and 1; weights of others they round away.
TERNARY = ("iq1_bn", "iq2_bn", "iq2_bn_r4", "tq1_0", "tq2_0", "i2_s")
FOR_TERNARY = "is for models trained with ternary weights; others are lost in it"
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_TAKES_ALL = (".*", ".", ".+", "^.*$", "^.+$", "weight", "^")


def suspicious(rules: Sequence[Rule]) -> list[str]:
    """Sets that look like ranges, and types for ternary models; one line each."""
    found: list[str] = []
    for rule in rules:
        where = f"line {rule.line}: "
        for low, high in _RANGE.findall(rule.pattern):
            if len(low) > 1 or len(high) > 1:
                found.append(
                    f"{where}[{low}-{high}] in {rule.pattern!r} is a set of single digits, not the numbers {low} to {high}"
                )
        if rule.type.name in TERNARY:
            found.append(f"{where}{rule.type.name} {FOR_TERNARY}")
    return found


def unreachable(rules: Sequence[Rule]) -> list[str]:
    """Rules that an earlier one takes everything from, whatever the model."""
    found: list[str] = []
    first: dict[str, Rule] = {}
    greedy: Rule | None = None
    for rule in rules:
        if rule.pattern in first:
            earlier = first[rule.pattern]
            say = "says the same" if earlier.type is rule.type else f"says {earlier.type.name} and comes first"
            found.append(f"line {rule.line}: {rule} never applies; line {earlier.line} has the same pattern and {say}")
        elif greedy is not None:
            found.append(f"line {rule.line}: {rule} never applies; line {greedy.line}, {greedy}, takes every weight before")
        first.setdefault(rule.pattern, rule)
        if greedy is None and rule.pattern in _TAKES_ALL:
            greedy = rule
    return found


def not_portable(rules: Sequence[Rule]) -> list[str]:
    """What llama-quantize --custom-q would read differently: it cuts at every comma and at the first '='."""
    found = []
    for rule in rules:
        for character, what in ((",", "a comma"), ("=", "an equals sign")):
            if character in rule.pattern:
                found.append(f"line {rule.line}: {rule.pattern!r} holds {what}, where llama-quantize --custom-q would cut it")
    return found


def _needs_imatrix(kind: TensorType) -> bool:
    return bool(kind.imatrix or (kind.base and TYPES[kind.base].imatrix))


def rules_without_imatrix(rules: Sequence[Rule]) -> list[str]:
    """What the rules ask of an imatrix, whatever the model: a line per type that needs it."""
    needing: dict[str, list[int]] = {}
    for rule in rules:
        if _needs_imatrix(rule.type):
            needing.setdefault(rule.type.name, []).append(rule.line)
    return [f"{kind} needs an imatrix: {len(lines)} rules, first line {lines[0]}" for kind, lines in needing.items()]


def without_imatrix(plan: Plan) -> list[str]:
    """What the plan asks of an imatrix, for a run that has none: a line per type that needs it."""
    needing: dict[str, list[str]] = {}
    for o in plan.outputs:
        if _needs_imatrix(o.type) and o.source_type != o.type.name:
            needing.setdefault(o.type.name, []).append(o.name)
    return [f"{kind} needs an imatrix: {len(names)} tensors, first {names[0]}" for kind, names in needing.items()]


@dataclass
class Share:
    """What one rule, flag or default decided: how many tensors, weights and bytes, and the first of the tensors."""

    rule: str
    types: list[str]
    tensors: int
    weights: int
    nbytes: int
    first: str

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0

    def as_json(self) -> dict[str, Any]:
        return self.__dict__ | {"bits_per_weight": self.bits_per_weight}


def shares(plan: Plan) -> list[Share]:
    """The plan by what decided, in the order of the first tensor."""
    found: dict[str, Share] = {}
    for o in plan.outputs:
        share = found.setdefault(o.rule, Share(o.rule, [], 0, 0, 0, o.name))
        if o.type.name not in share.types:
            share.types.append(o.type.name)
        share.tensors += 1
        share.weights += o.n_elements
        share.nbytes += o.nbytes
    return list(found.values())
