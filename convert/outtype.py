"""--outtype: the type of the weights when a checkpoint is converted without a recipe."""

from __future__ import annotations

import re

from ..formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from ..quantize.recipes.recipe import Recipe
from ..quantize.recipes.rules import Rule, RuleMatcher, TensorNames, parse_rules
from ..quantize.recipes.type_selection import INTEGER_TYPES

EXPERTS = r"_exps\.weight$"


def outtype_rules(source: TensorSource, name: str, symmetric_q40: bool = False) -> tuple[TensorType, list[Rule]]:
    """An outtype (quantize.recipes.recipe.OUTTYPES) -> the type of the weights, and rules for exceptions.

    auto: f16 for a checkpoint in f16, else bf16; what a quantised type holds without a loss is written in it (gpt-oss's and
    DeepSeek-V4's experts in mxfp4; NVFP4 in nvfp4; symmetric int4 in groups of 32, as in Kimi-K2-Thinking, in q4_0).
    mxfp4: as auto, but all experts in mxfp4; those stored in it are copied bit by bit. Others: all weights in that type.
    symmetric_q40: the weights that are stored in symmetric int4 become q4_0 whatever the outtype.
    Raises PlanError for mxfp4 and a model without experts, and for symmetric_q40 where int4 weights are missing or of another
    form, which q4_0 cannot hold exactly.
    """
    weights = [t for t in source.tensors.values() if len(t.shape) > 1 and t.source_type not in INTEGER_TYPES]
    first = _symmetric_rules(source, weights) if symmetric_q40 else []
    if name not in ("auto", "mxfp4"):
        return TYPES[name], first
    quantised = [t for t in weights if t.raw is not None and t.stored is not None and not t.stored.is_float]
    floats = {t.source_type for t in weights if t not in quantised}
    rules = [f"^{re.escape(t.name)}$={t.stored.name}" for t in quantised if t.stored is not None]
    if name == "mxfp4":
        if not any(re.search(EXPERTS, t.name) for t in weights):
            raise PlanError(f"{source.path} has no experts, which are what outtype mxfp4 writes in mxfp4; choose another")
        rules = [f"{EXPERTS}={name}"]
    return TYPES["f16" if floats == {"f16"} else "bf16"], [*first, *parse_rules("\n".join(rules), f"--outtype {name}")]


def _symmetric_rules(source: TensorSource, weights: list[SourceTensor]) -> list[Rule]:
    """Rules that write each weight stored in int4 as q4_0. Raises PlanError if there is none, or one that q4_0 cannot hold."""
    q4_0, flag = TYPES["q4_0"], "--symmetric-q40"
    packed = [t for t in weights if t.stored is q4_0 and t.source_type != q4_0.name]
    others = [t.name for t in weights if t.stored is not q4_0 and re.fullmatch(r"int4|gptq_4bit|awq_4bit", t.source_type)]
    if others:
        raise PlanError(
            f"{flag}: {len(others)} weights in int4 are not symmetric in groups of 32 (the first is {others[0]}), so that q4_0"
            " cannot hold them exactly; leave it out"
        )
    if not packed:
        raise PlanError(f"{flag}: {source.path} has no weights in symmetric int4 with groups of 32; leave it out")
    return parse_rules("\n".join(f"^{re.escape(t.name)}$={q4_0.name}" for t in packed), flag)


def adapter_types(source: TensorSource, name: str) -> dict[str, TensorType]:
    """An outtype -> the type of each factor of an adapter; auto: as stored. Raises PlanError for mxfp4."""
    if name == "mxfp4":
        raise PlanError(f"{source.path} is an adapter; write it in auto, f32, f16, bf16 or q8_0")
    chosen = {n: t.source_type if t.source_type in TYPES else "f32" for n, t in source.tensors.items()}
    return {n: TYPES[own if name == "auto" else name] for n, own in chosen.items()}


def recipe_types(source: TensorSource, recipe: Recipe) -> tuple[TensorType | str | None, list[Rule]]:
    """A recipe's (default type, rules) for a source; [convert] outtype decides where no rule of [quantize] matches."""
    if recipe.outtype is None:
        return recipe.type, recipe.rules
    default, more_rules = outtype_rules(source, recipe.outtype)
    matcher = RuleMatcher(recipe.rules)
    unmatched = TensorNames(n for n in source.tensors if matcher.first(n) is None)
    return default, [*recipe.rules, *(rule for rule in more_rules if rule.first_match(unmatched) is not None)]
