"""Linting recipes: doubtful rules by themselves, and against a plan what each rule decided and what needs an imatrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...formats import TYPES
from ...jobs.plan import Plan
from .rules import Rule

# Types for models trained with weights -1, 0 and 1; weights of other models are rounded away.
TERNARY_TYPES = ("iq1_bn", "iq2_bn", "iq2_bn_r4", "tq1_0", "tq2_0", "q2_0")
TERNARY_WARNING = "is for models trained with ternary weights; others are lost in it"
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_MATCH_ALL_PATTERNS = (".*", ".", ".+", "^.*$", "^.+$", "weight", "^")


def suspicious_rules(rules: Sequence[Rule]) -> list[str]:
    """One line for each character set that looks like a range of numbers, and for each type for ternary models."""
    warnings: list[str] = []
    for rule in rules:
        where = f"line {rule.line}: "
        for low, high in _RANGE.findall(rule.pattern):
            if len(low) > 1 or len(high) > 1:
                warnings.append(
                    f"{where}[{low}-{high}] in {rule.pattern!r} is a set of single digits, not the numbers {low} to {high}"
                )
        if rule.type.name in TERNARY_TYPES:
            warnings.append(f"{where}{rule.type.name} {TERNARY_WARNING}")
    return warnings


def unreachable_rules(rules: Sequence[Rule]) -> list[str]:
    """One line for each rule that never applies, whatever the model: an earlier one has its pattern or matches everything."""
    warnings: list[str] = []
    by_pattern: dict[str, Rule] = {}
    match_all: Rule | None = None
    for rule in rules:
        if rule.pattern in by_pattern:
            earlier = by_pattern[rule.pattern]
            what = "says the same" if earlier.type is rule.type else f"says {earlier.type.name} and comes first"
            warnings.append(f"line {rule.line}: {rule} never applies; line {earlier.line} has the same pattern and {what}")
        elif match_all is not None:
            warnings.append(
                f"line {rule.line}: {rule} never applies; line {match_all.line}, {match_all}, takes every weight before"
            )
        by_pattern.setdefault(rule.pattern, rule)
        if match_all is None and rule.pattern in _MATCH_ALL_PATTERNS:
            match_all = rule
    return warnings


def unportable_rules(rules: Sequence[Rule]) -> list[str]:
    """One line for each rule that llama-quantize --custom-q would read differently: it splits at every comma and first '='."""
    warnings = []
    for rule in rules:
        for character, what in ((",", "a comma"), ("=", "an equals sign")):
            if character in rule.pattern:
                warnings.append(
                    f"line {rule.line}: {rule.pattern!r} holds {what}, where llama-quantize --custom-q would cut it"
                )
    return warnings


def rules_needing_imatrix(rules: Sequence[Rule]) -> list[str]:
    """One line for each type in the rules that needs an imatrix, whatever the model."""
    lines_of: dict[str, list[int]] = {}
    for rule in rules:
        if TYPES.imatrix_need(rule.type):
            lines_of.setdefault(rule.type.name, []).append(rule.line)
    return [
        f"{name} needs an imatrix: {len(lines)} rule{'s' * (len(lines) > 1)}, first line {lines[0]}"
        for name, lines in lines_of.items()
    ]


def tensors_needing_imatrix(plan: Plan) -> list[str]:
    """One line for each type in the plan that needs an imatrix, for a plan that was made without one."""
    tensors_of: dict[str, list[str]] = {}
    for name, kind in plan.outputs.of_kinds(lambda kind: TYPES.imatrix_need(kind.type) and kind.source_type != kind.type.name):
        tensors_of.setdefault(kind.type.name, []).append(name)
    return [f"{name} needs an imatrix: {len(names)} tensors, first {names[0]}" for name, names in tensors_of.items()]


@dataclass
class RuleShare:
    """What one rule, flag or default decided: types, number of tensors, weights and bytes, and the first tensor's name.

    note: why these tensors have another type than the rule asks for; '' if they have that.
    """

    rule: str
    types: list[str]
    tensors: int
    weights: int
    nbytes: int
    first: str
    note: str = ""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0

    def as_json(self) -> dict[str, Any]:
        return self.__dict__ | {"bits_per_weight": self.bits_per_weight}


def rule_shares(plan: Plan) -> list[RuleShare]:
    """The plan's tensors grouped by what decided their type and why it is another one than asked for, in the order of each
    group's first tensor."""
    shares: dict[tuple[str, str], RuleShare] = {}
    for (kind, n), first in zip(plan.outputs.counts(), plan.outputs.first_of_kinds(), strict=True):
        share = shares.setdefault((kind.rule, kind.note), RuleShare(kind.rule, [], 0, 0, 0, first, kind.note))
        if kind.type.name not in share.types:
            share.types.append(kind.type.name)
        share.tensors += n
        share.weights += kind.n_elements * n
        share.nbytes += kind.nbytes * n
    return list(shares.values())
