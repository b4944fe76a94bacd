"""`ggufmill recipes`: the shipped recipes, and checks of any recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert import open_source
from ..convert.hub.fetch import is_repository
from ..convert.outtype import recipe_types
from ..errors import CheckFailed, UsageError
from ..jobs.plan import Plan
from ..quantize.importance import AssumedImportance
from ..quantize.planning import plan_quantize
from ..quantize.recipes.lint import (
    RuleShare,
    rule_shares,
    rules_needing_imatrix,
    suspicious_rules,
    tensors_needing_imatrix,
    unportable_rules,
    unreachable_rules,
)
from ..quantize.recipes.recipe import Recipe, load_recipe
from ..recipes import find, names
from .common.adapters import adapters_of_recipe
from .common.arguments import FileType, as_file_type
from .common.importance import load_importance
from .common.losses import warn_of_losses
from .common.messages import note
from .recipe_search.options import target_of


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


def lint_recipe(
    recipe: str | Path,
    model: str | Path | None = None,
    *,
    type: FileType | None = None,
    imatrix: str | Path | None = None,
    architecture: str | None = None,
    allow_lossy_config: bool = False,
    strict: bool = False,
) -> LintResult:
    """Checks a recipe by itself, and against a model if one is given.

    recipe   a file, or the name of a shipped recipe
    model    a GGUF file, a checkpoint folder or hf:OWNER/NAME, of which the headers are read
    type     file type for what no rule takes; None: the recipe's
    imatrix  importance matrix; without one it is assumed that there is data for every tensor
    architecture, allow_lossy_config  how a checkpoint is read, as for `convert_model`
    strict   warnings are an error

    Returns a `LintResult`. Raises RecipeError for what cannot be read, CheckFailed for warnings if strict.

    Example:
        >>> from ggufmill import lint_recipe
        >>> from ggufmill.recipes import FOLDER
        >>> lint_recipe("demo", FOLDER / "demo").warnings
        []
    """
    loaded = load_recipe(find(recipe), several=model is None)
    rules = [rule for one in loaded.each for rule in one.rules]
    notes = unportable_rules(rules)
    if model is not None:
        warnings = _plan(model, recipe, type, imatrix, architecture, allow_lossy_config).warnings
    else:
        warnings = [text for one in loaded.each for text in (*suspicious_rules(one.rules), *unreachable_rules(one.rules))]
        if imatrix is None and "imatrix" not in loaded.stages:
            notes += rules_needing_imatrix(rules)
    result = LintResult(str(recipe), len(rules), warnings, notes)
    if strict and warnings:
        raise CheckFailed(f"--strict: {recipe} has {len(warnings)} warnings", result)
    return result


@dataclass(frozen=True)
class Explanation:
    """shares: what each rule, flag or default decided, in the order of its first tensor; plan: of all tensors."""

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


def explain_recipe(
    model: str | Path,
    *,
    recipe: str | Path | None = None,
    type: FileType | None = None,
    imatrix: str | Path | None = None,
    architecture: str | None = None,
    allow_lossy_config: bool = False,
) -> Explanation:
    """Which rule takes which of a model's tensors, how many bytes come of each, and which rules do nothing.

    Arguments as for `lint_recipe`; without a recipe `type` alone counts. Returns an `Explanation`. Raises UsageError without
    either.

    Example:
        >>> from ggufmill import explain_recipe
        >>> from ggufmill.recipes import FOLDER
        >>> explanation = explain_recipe(FOLDER / "demo", recipe="demo")
        >>> sum(share.tensors for share in explanation.shares) == len(explanation.plan.outputs)
        True
    """
    if recipe is None and type is None:
        raise UsageError("give --recipe FILE, --type TYPE or both")
    plan = _plan(model, recipe, type, imatrix, architecture, allow_lossy_config)
    return Explanation(rule_shares(plan), plan)


def _plan(
    model: str | Path,
    recipe: str | Path | None,
    type: FileType | None,
    imatrix: str | Path | None,
    architecture: str | None,
    allow_lossy_config: bool,
) -> Plan:
    """The plan of quantising, with importance data for every tensor assumed where none is given."""
    path, given = find(recipe) if recipe is not None else None, as_file_type(type, "--type")
    loaded, folder = (load_recipe(path), path.parent) if path is not None else (Recipe("", [], ""), Path())
    how, lora = loaded.stages.get("convert", {}), adapters_of_recipe(loaded, folder)
    source = open_source(
        model,
        mla_layout=how.get("mla_layout"),
        mtp=how.get("mtp"),
        vocab=how.get("vocab"),
        remote=is_repository(model),
        architecture=architecture or how.get("architecture"),
        allow_lossy_config=allow_lossy_config or how.get("allow_lossy_config", False),
        lora=lora,
    )
    warn_of_losses(source)
    importance = load_importance(Path(imatrix), source, quiet=True) if imatrix is not None else AssumedImportance({})
    default, rules = recipe_types(source, loaded)
    plan = plan_quantize(
        source,
        "out.gguf",
        type=given or default,
        rules=rules if given is None else loaded.rules,
        recipe_text=loaded.text,
        importance=importance,
        ignore_imatrix_rules=True,
        allow_requantize=True,
    )
    if target_of(loaded) is not None:
        note(f"note: {loaded.name} has a target: types for what no rule takes are found by `run`, `quantize`")
        plan.warnings[:] = [w for w in plan.warnings if not w.startswith("no rule takes")]
    if imatrix is None:
        plan.warnings.extend(tensors_needing_imatrix(plan))
    return plan
