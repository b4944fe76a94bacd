"""`ggufmill recipes`: the shipped recipes, and checks of any recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..errors import CheckFailed, UsageError
from ..jobs.plan import Plan
from ..quantize.importance import AssumedImportance
from ..quantize.recipes.lint import (
    RuleShare,
    rule_shares,
    rules_needing_imatrix,
    suspicious_rules,
    tensors_needing_imatrix,
    unportable_rules,
    unreachable_rules,
)
from ..quantize.recipes.recipe import load_recipe
from ..recipes import find, names
from ..request_fields import shared
from .common.arguments import as_file_type
from .common.dropped_config import warn_on_dropped_config
from .common.messages import note
from .common.shown import shown
from .requests.quantize import QuantizeRequest
from .requests.recipes import ExplainRequest, LintRequest
from .requests.verb import verb


@shown
@dataclass(frozen=True)
class ShippedRecipes:
    """Name and first comment of each recipe that comes with the program."""

    recipes: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: recipes, each with name and about."""
        return {"recipes": [{"name": name, "about": about} for name, about in self.recipes.items()]}


def list_recipes() -> ShippedRecipes:
    """The recipes that come with the program; `quantize_model` and others take them by name.

    Example:
        >>> from ggufmill import list_recipes
        >>> "demo.toml" in list_recipes().recipes
        True
    """
    first = {name: find(name).read_text("utf-8").splitlines()[0] for name in names()}
    return ShippedRecipes({name: line.lstrip("# ") if line.startswith("#") else "" for name, line in first.items()})


def read_recipe(name: str | Path) -> str:
    """The text of a recipe: a file, or a shipped one by name. Raises UsageError if there is none.

    Example:
        >>> from ggufmill import read_recipe
        >>> "[quantize]" in read_recipe("demo")
        True
    """
    path = find(name)
    if not path.exists():
        raise UsageError(f"there is no recipe {str(name)!r}; `ggufmill recipes list` shows them")
    return path.read_text("utf-8")


@shown
@dataclass(frozen=True)
class LintResult:
    """warnings: what may be wrong with a recipe; notes: what it depends on, such as types that need an imatrix."""

    recipe: str
    rules: int
    warnings: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {"recipe": self.recipe, "rules": self.rules, "warnings": self.warnings, "notes": self.notes}


@verb(LintRequest)
def lint_recipe(request: LintRequest) -> LintResult:
    """Checks a recipe by itself, and against a model if one is given.

    Without an imatrix it is assumed that there is data for every tensor.

    Returns a `LintResult`. Raises RecipeError for what cannot be read, CheckFailed for warnings if strict.

    Example:
        >>> from ggufmill import lint_recipe
        >>> from ggufmill.recipes import FOLDER
        >>> lint_recipe("demo", FOLDER / "demo").warnings
        []
    """
    recipe, model = request.recipe, request.model
    loaded = load_recipe(find(recipe), several=model is None)
    rules = [rule for one in loaded.each for rule in one.rules]
    notes = unportable_rules(rules)
    if model is not None:
        warnings = _plan(model, request).warnings
    else:
        warnings = [text for one in loaded.each for text in (*suspicious_rules(one.rules), *unreachable_rules(one.rules))]
        if request.imatrix is None and "imatrix" not in loaded.stages:
            notes += rules_needing_imatrix(rules)
    result = LintResult(str(recipe), len(rules), warnings, notes)
    if request.strict and warnings:
        raise CheckFailed(f"--strict: {recipe} has {len(warnings)} warnings", result)
    return result


@shown
@dataclass(frozen=True)
class Explanation:
    """shares: what each rule, flag or default decided, in the order of the recipe; plan: of all tensors."""

    shares: list[RuleShare]
    plan: Plan

    def as_json(self) -> dict[str, Any]:
        """What --json prints: rules (the shares), warnings, total_bytes, bits_per_weight."""
        return {
            "rules": [share.as_json() for share in self.shares],
            "warnings": self.plan.warnings,
            "total_bytes": self.plan.total_bytes,
            "bits_per_weight": self.plan.bits_per_weight,
        }


@verb(ExplainRequest)
def explain_recipe(request: ExplainRequest) -> Explanation:
    """Which rule takes which of a model's tensors, how many bytes come of each, and which rules do nothing.

    Without an imatrix it is assumed that there is data for every tensor.

    Returns an `Explanation`. Raises UsageError without a recipe and a type.

    Example:
        >>> from ggufmill import explain_recipe
        >>> from ggufmill.recipes import FOLDER
        >>> explanation = explain_recipe(FOLDER / "demo", recipe="demo")
        >>> sum(share.tensors for share in explanation.shares) == len(explanation.plan.outputs)
        True
    """
    if request.recipe is None and request.type is None:
        raise UsageError("give --recipe FILE, --type TYPE or both")
    plan = _plan(request.model, request)
    rules = load_recipe(find(request.recipe)).rules if request.recipe is not None else []
    return Explanation(rule_shares(plan, rules), plan)


def _plan(model: str | Path, request: LintRequest | ExplainRequest) -> Plan:
    """The plan of quantising, with importance data for every tensor assumed where none is given."""
    as_file_type(request.type, "--type")
    fixed: dict[str, Any] = {"dry_run": True, "strict": False, "ignore_imatrix_rules": True, "allow_requantize": True}
    from .planning import Quantization

    job = Quantization(shared(request, QuantizeRequest, source=model, out="out.gguf", **fixed), is_written=False)
    warn_on_dropped_config(job.source)
    if request.imatrix is None:
        job.importance = AssumedImportance({})
    plan = job.plan()
    if job.target is not None:
        note(f"note: {job.given.recipe.name} has a target: types for what no rule takes are found by `run`, `quantize`")
        plan.warnings[:] = [w for w in plan.warnings if not w.startswith("no rule takes")]
    if request.imatrix is None:
        plan.warnings.extend(tensors_needing_imatrix(plan))
    return plan
