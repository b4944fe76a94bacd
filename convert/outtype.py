"""--outtype: the type of the weights when a checkpoint is converted without a recipe."""

from __future__ import annotations

import re

from ..formats import TYPES, PlanError, TensorSource, TensorType
from ..quantize.recipes.recipe import Recipe
from ..quantize.recipes.rules import Rule, RuleMatcher, parse_rules

EXPERTS = r"_exps\.weight$"


def outtype_rules(source: TensorSource, name: str) -> tuple[TensorType, list[Rule]]:
    """An outtype (quantize.recipes.recipe.OUTTYPES) -> the type of the weights, and rules for exceptions.

    auto: f16 for a checkpoint in f16, else bf16; what a quantised type holds without a loss is written in it (gpt-oss's experts
    in mxfp4; symmetric int4 in groups of 32, as in Kimi-K2-Thinking, in q4_0).
    mxfp4: as auto, but all experts in mxfp4; those stored in it are copied bit by bit. Others: all weights in that type.
    Raises PlanError for mxfp4 and a model without experts.
    """
    if name not in ("auto", "mxfp4"):
        return TYPES[name], []
    weights = [t for t in source.tensors.values() if len(t.shape) > 1]
    quantised = [t for t in weights if t.raw is not None and t.stored is not None and not t.stored.is_float]
    floats = {t.source_type for t in weights if t not in quantised}
    rules = [f"^{re.escape(t.name)}$={t.stored.name}" for t in quantised if t.stored is not None]
    if name == "mxfp4":
        if not any(re.search(EXPERTS, t.name) for t in weights):
            raise PlanError(f"{source.path} has no experts, which are what outtype mxfp4 writes in mxfp4; choose another")
        rules = [f"{EXPERTS}={name}"]
    return TYPES["f16" if floats == {"f16"} else "bf16"], parse_rules("\n".join(rules), f"--outtype {name}")


def adapter_types(source: TensorSource, name: str) -> dict[str, TensorType]:
    """An outtype -> the type of each factor of an adapter; auto: as stored. Raises PlanError for mxfp4."""
    if name == "mxfp4":
        raise PlanError(f"{source.path} is an adapter; write it in auto, f32, f16, bf16 or q8_0")
    chosen = {n: t.source_type if t.source_type in TYPES else "f32" for n, t in source.tensors.items()}
    return {n: TYPES[own if name == "auto" else name] for n, own in chosen.items()}


def recipe_types(source: TensorSource, recipe: Recipe) -> tuple[TensorType | str | None, list[Rule]]:
    """A recipe's (default type, rules) for a source; [convert] outtype decides where no rule of [quantize] matches."""
    name = recipe.stages.get("convert", {}).get("outtype")
    if name is None:
        return recipe.type, recipe.rules
    default, more_rules = outtype_rules(source, name)
    matcher = RuleMatcher(recipe.rules)
    unmatched = {n: None for n in source.tensors if matcher.first(n) is None}
    return default, [*recipe.rules, *(rule for rule in more_rules if rule.first_match(unmatched) is not None)]
