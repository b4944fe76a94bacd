"""What is worth a warning in the plan of a quantise or convert job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ..data_classes import dataclass
from ..formats import SourceTensor, TensorType
from ..jobs.outputs import Outputs
from .recipes.lint import TERNARY_TYPES, TERNARY_WARNING, suspicious_rules
from .recipes.rules import Rule, RuleMatcher, TensorNames
from .recipes.type_selection import EMBEDDINGS, NOT_QUANTIZED, OUTPUT, ROUTER, UNCHANGED, TypeSelector
from .tensor_scale import missing_scales

if TYPE_CHECKING:
    from .covariance.source import Covariances


@dataclass
class PlanWarnings:
    """What planning noticed. `messages` are errors under --strict."""

    messages: list[str] = field(default_factory=list)
    without_importance: dict[str, int] = field(default_factory=dict)  # name of a tensor -> how many are like it
    without_covariance: dict[str, list[str]] = field(default_factory=dict)  # reason -> names of tensors
    with_covariance: int = 0
    without_curvature: dict[str, list[str]] = field(
        default_factory=dict
    )  # likewise, of those that are encoded with a covariance
    draft_layers: tuple[str, ...] = ()  # prefixes of their tensors' names
    covariance_bytes: int = 0  # of memory: the largest of two covariances that follow each other, one being let go
    largest_covariance: int = 0
    last_covariance: tuple[object, int] = (None, 0)

    def note_covariance(self, tensor: SourceTensor, target: TensorType, covariances: Covariances | None) -> None:
        """Counts a tensor to those that are encoded with a covariance, or notes why it is not."""
        if covariances is None:
            return
        reason = covariances.reason_for_diagonal(tensor, target)
        before, (key, nbytes) = self.last_covariance, covariances.memory_of(tensor, target)
        if key is not None:
            self.covariance_bytes = max(self.covariance_bytes, nbytes + (before[1] if before[0] != key else 0))
            self.largest_covariance = max(self.largest_covariance, nbytes)
            self.last_covariance = key, nbytes
        if not reason:
            self.with_covariance += 1
            alone = covariances.reason_alone(tensor)
            if alone:
                self.without_curvature.setdefault(alone, []).append(tensor.name)
        elif tensor.name not in (*EMBEDDINGS, OUTPUT):
            self.without_covariance.setdefault(reason, []).append(tensor.name)


def warnings_of(noticed: PlanWarnings, selector: TypeSelector, rules: Sequence[Rule], outputs: Outputs) -> list[str]:
    """All warnings of a plan, one line each."""
    warnings = [*noticed.messages, *suspicious_rules(rules), *missing_scales(outputs)]
    if isinstance(selector.default, TensorType) and selector.default.name in TERNARY_TYPES:
        warnings.append(f"{selector.default.name} {TERNARY_WARNING}")
    if selector.pure and rules:
        warnings.append("--pure leaves the rules aside: every weight gets the same type")
    if not selector.pure:
        warnings += _warnings_of_unused_rules(selector, rules, outputs)
    unused_roles = [role for role in selector.overrides.roles if not selector.hits[role]]
    warnings += [f"--{role.replace('_', '-')}-type applies to no tensor" for role in unused_roles]
    if selector.unselected:
        kept = sum(kind.nbytes * n for kind, n in outputs.counts() if kind.rule == UNCHANGED)
        share = kept / max(1, outputs.total_bytes)
        first, count = next(iter(selector.unselected)), sum(selector.unselected.values())
        warnings.append(
            f"no rule takes {abridged_count(first, count)}, and no default type was given: they are not quantised "
            f"({100 * share:.0f} % of the bytes)"
        )
    if noticed.without_importance:
        missing = noticed.without_importance
        hint = " (imatrix --nextn collects those of draft layers)" * any(n.startswith(noticed.draft_layers) for n in missing)
        named = abridged_count(next(iter(missing)), sum(missing.values()))
        warnings.append(f"the imatrix has no data for {named}: quantised without{hint}")
    for reason, names in noticed.without_covariance.items():
        warnings.append(f"the covariance is not used for {abridged(names)}: {reason}")
    for reason, names in noticed.without_curvature.items():
        warnings.append(f"rows of {abridged(names)} are encoded by themselves, without curvature: {reason}")
    return warnings + _warnings_of_fallbacks(outputs)


def _warnings_of_fallbacks(outputs: Outputs) -> list[str]:
    """A line for each reason for which tensors have another type than asked for."""
    reasons: dict[str, int] = {}
    for kind, n in outputs.counts():
        if kind.note:
            reasons[kind.note] = reasons.get(kind.note, 0) + n
    found = []
    for reason, count in reasons.items():
        name, kind = next(outputs.of_kinds(lambda kind, reason=reason: kind.note == reason))
        found.append(f"another type than asked for: {abridged_count(f'{name} ({kind.type.name})', count)}: {reason}")
    return found


def _warnings_of_unused_rules(selector: TypeSelector, rules: Sequence[Rule], outputs: Outputs) -> list[str]:
    """A line for each rule that decided no tensor's type: it is overridden, comes after another rule, or matches nothing."""
    warnings = []
    unused = [rule for rule in rules if not selector.hits[rule]]
    names, matcher = TensorNames(outputs.names if unused else ()), RuleMatcher(rules)
    for rule in unused:
        if rule in selector.overridden:
            name, reason = selector.overridden[rule]
            unquantized = reason in (UNCHANGED, NOT_QUANTIZED)
            what = "stays as it is, norms, routers and the like do" if unquantized else f"follows {reason}"
            flag = "; --ffn-gate-inp-type gives routers a type" if name.endswith(ROUTER) else ""
            warnings.append(f"line {rule.line}: {rule} decides nothing; {name} {what}{flag}")
            continue
        matched = rule.first_match(names)
        if matched is not None:
            earlier = matcher.first(matched)
            warnings.append(f"line {rule.line}: {rule} never applies; {earlier} comes first and takes {matched}")
        else:
            warnings.append(f"line {rule.line}: {rule} matches no tensor")
    return warnings


def abridged(names: Sequence[str]) -> str:
    return abridged_count(names[0], len(names))


def abridged_count(first: str, count: int) -> str:
    return f"{first} and {count - 1} more" if count > 1 else first
