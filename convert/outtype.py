"""What the weights of a checkpoint become when it is converted and no recipe is given."""

from __future__ import annotations

import re

from ..formats import TYPES, PlanError, TensorSource, TensorType
from ..quantize.recipes.recipe import Recipe
from ..quantize.recipes.rules import Rule, RuleMatcher, parse_rules

EXPERTS = r"_exps\.weight$"


def out_type(source: TensorSource, name: str) -> tuple[TensorType, list[Rule]]:
    """A name of quantize.recipes.recipe.OUTTYPES -> the type of all weights, and rules for those that are to have another.

    auto: f16 for a checkpoint in f16, else bf16; what is stored in a quantised type (gpt-oss's experts in mxfp4) stays so.
    mxfp4: as auto, with all experts in that type, those that are stored in it bit by bit. Others: every weight in that type.
    Raises PlanError for mxfp4 and a model without experts.
    """
    if name not in ("auto", "mxfp4"):
        return TYPES[name], []
    weights = [t for t in source.tensors.values() if len(t.shape) > 1]
    quantised = [t for t in weights if t.stored is not None and not t.stored.is_float]
    floats = {t.source_type for t in weights if t not in quantised}
    lines = [f"^{re.escape(t.name)}$={t.stored.name}" for t in quantised if t.stored is not None]
    if name == "mxfp4":
        if not any(re.search(EXPERTS, t.name) for t in weights):
            raise PlanError(f"{source.path} has no experts, which are what outtype mxfp4 writes in mxfp4; choose another")
        lines = [f"{EXPERTS}={name}"]
    return TYPES["f16" if floats == {"f16"} else "bf16"], parse_rules("\n".join(lines), f"--outtype {name}")


def recipe_types(source: TensorSource, recipe: Recipe) -> tuple[TensorType | str | None, list[Rule]]:
    """The default type and the rules of a recipe for this source: [convert] outtype says what [quantize] leaves open."""
    name = recipe.stages.get("convert", {}).get("outtype")
    if name is None:
        return recipe.type, recipe.rules
    default, more = out_type(source, name)
    matcher = RuleMatcher(recipe.rules)
    left = {n: None for n in source.tensors if matcher.first(n) is None}
    return default, [*recipe.rules, *(rule for rule in more if rule.first_match(left) is not None)]
