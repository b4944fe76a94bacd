"""Linting recipes: doubtful rules by themselves, and against a plan what each rule decided and what needs an imatrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...data_classes import dataclass
from ...formats import TYPES
from ...jobs.plan import Plan
from .rules import Rule

# Types for models trained with weights -1, 0 and 1; weights of other models are rounded away.
TERNARY_TYPES = ("iq1_bn", "iq2_bn", "iq2_bn_r4", "tq1_0", "tq2_0", "q2_0")
TERNARY_WARNING = "is for models trained with ternary weights; others are lost in it"
_RANGE = r"\[(\d+)-(\d+)\]"
# parts of the names in checkpoints of Hugging Face -> of a GGUF's
_NAMES_OF_CHECKPOINTS = {
    "gate_up_proj": "ffn_gate_exps and ffn_up_exps",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "qkv_proj": "attn_qkv",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_b_proj": "attn_kv_b",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "model.layers": "blk",
}
_NAME_OF_CHECKPOINT = r"(?<![a-z])(" + "|".join(n.replace(".", r"\\?\.") for n in _NAMES_OF_CHECKPOINTS) + ")"
_OUTPUTS = ("output.weight", "blk.0.attn_output.weight")
_MATCH_ALL_PATTERNS = (".*", ".", ".+", "^.*$", "^.+$", "weight", "^")


def suspicious_rules(rules: Sequence[Rule]) -> list[str]:
    """One line for each character set that looks like a range of numbers, each pattern for the output matrix that takes
    attention's too, each name that only checkpoints have, and each type for ternary models."""
    warnings: list[str] = []
    of_attention = [rule for rule in rules if rule.regex.search(_OUTPUTS[1])]  # the first one decides
    wrong_output = of_attention[:1] if len({rule.type.name for rule in of_attention[:2]}) > 1 or len(of_attention) == 1 else []
    for rule in rules:
        where = f"line {rule.line}: "
        for low, high in re.findall(_RANGE, rule.pattern):
            if len(low) > 1 or len(high) > 1:
                warnings.append(
                    f"{where}[{low}-{high}] in '{rule.pattern}' is a set of single digits, not the numbers {low} to {high}"
                )
        if rule in wrong_output and "attn" not in rule.pattern and "output" in rule.pattern and rule.regex.search(_OUTPUTS[0]):
            warnings.append(
                f"{where}{rule} takes attn_output.weight of every layer too; ^output\\.weight is the output matrix alone"
            )
        if (name := re.search(_NAME_OF_CHECKPOINT, rule.pattern)) is not None:
            known = _NAMES_OF_CHECKPOINTS[name[1].replace("\\", "")]
            warnings.append(f"{where}{name[1]} in '{rule.pattern}' is a name in checkpoints, which GGUF calls {known}")
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
                    f"line {rule.line}: '{rule.pattern}' holds {what}, where llama-quantize --custom-q would cut it"
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

    note: why these tensors have another type than the rule asks for; '' if they have that. line: the rule's in the recipe.
    """

    rule: str
    types: list[str]
    tensors: int
    weights: int
    nbytes: int
    first: str
    note: str = ""
    line: int | None = None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0

    def as_json(self) -> dict[str, Any]:
        return self.__dict__ | {"bits_per_weight": self.bits_per_weight}


def rule_shares(plan: Plan, rules: Sequence[Rule] = ()) -> list[RuleShare]:
    """The plan's tensors grouped by what decided their type and why it is another one than asked for: in the order of the
    rules, and without rules of each group's first tensor."""
    shares: dict[tuple[str, str], RuleShare] = {}
    for (kind, n), number in zip(plan.outputs.counts(), plan.outputs.first_of_kinds(), strict=True):
        first = plan.outputs.names[number]
        share = shares.setdefault((kind.rule, kind.note), RuleShare(kind.rule, [], 0, 0, 0, first, kind.note))
        if kind.type.name not in share.types:
            share.types.append(kind.type.name)
        share.tensors += n
        share.weights += kind.n_elements * n
        share.nbytes += kind.nbytes * n
    lines = {str(rule): (place, rule.line) for place, rule in reversed(list(enumerate(rules)))}
    for share in shares.values():
        share.line = lines[share.rule][1] if share.rule in lines else None
    return sorted(shares.values(), key=lambda share: lines.get(share.rule, (len(rules), 0))[0])
