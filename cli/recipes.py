"""`ggufmill recipes` lists, shows, checks and explains recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..formats import PlanError, TensorType
from ..jobs.plan import Plan
from ..pipeline.console import emit, gib, table
from ..recipes import find, names
from .options import flags


@click.group(short_help="List, show, check and explain recipes")
def command() -> None:
    """The recipes that come along with ggufmill (`--recipe NAME` takes them by name), and checks of any recipe.

    Example: ggufmill recipes show deepseek-v3-iq4_k_r4.txt
    """


@command.command("list", short_help="The recipes that come along")
@flags.as_json
def list_(as_json: bool) -> None:
    """One line per recipe: its name and its first comment.

    Example: ggufmill recipes list
    """
    rows = []
    for name in names():
        first = find(name).read_text("utf-8").splitlines()[0]
        rows.append((name, first.lstrip("# ") if first.startswith("#") else ""))
    found = {"recipes": [{"name": name, "about": about} for name, about in rows]}
    emit(found, as_json, lambda: table(("recipe", "what it is"), rows))


@command.command(short_help="Print a recipe")
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe.

    Example: ggufmill recipes show demo
    """
    path = find(name)
    if not path.exists():
        raise click.BadParameter(f"there is no recipe {name!r}; `ggufmill recipes list` shows them")
    click.echo(path.read_text("utf-8"), nl=False)


_default = click.option(
    "--type", "type", type=flags.FILE_TYPE, help="File type for what no rule takes. [default: the recipe's]"
)


@command.command(short_help="Check a recipe, by itself or against a model")
@click.argument("recipe")
@click.argument("model", type=flags.SourceName(), required=False)
@_default
@flags.imatrix
@click.option("--strict", is_flag=True, help="Exit with 1 if there is anything to warn of.")
@flags.as_json
def lint(recipe: str, model: str | Path | None, as_json: bool, strict: bool, **options: Any) -> None:
    """Check RECIPE by itself, and against MODEL (a GGUF or a Hugging Face folder) if one is given.

    \b
    Examples:
      ggufmill recipes lint mine.txt
      ggufmill recipes lint mine.txt DeepSeek-V3/ --imatrix v3.imatrix --strict
    """
    from ..quantize.recipes.lint import rules_needing_imatrix, suspicious_rules, unportable_rules, unreachable_rules
    from ..quantize.recipes.recipe import load_recipe

    loaded = load_recipe(find(recipe))
    notes = unportable_rules(loaded.rules)
    if model is not None:
        warnings = _plan(model, recipe, **options).warnings
    else:
        warnings = [*suspicious_rules(loaded.rules), *unreachable_rules(loaded.rules)]
        if options["imatrix"] is None and "imatrix" not in loaded.stages:
            notes += rules_needing_imatrix(loaded.rules)

    def text() -> str:
        lines = [f"warning: {warning}" for warning in warnings] + [f"note: {note}" for note in notes]
        what = f"{len(loaded.rules)} rules, {len(warnings)} warnings, {len(notes)} notes"
        return "\n".join([*lines, f"{recipe}: {what}"])

    emit({"recipe": recipe, "rules": len(loaded.rules), "warnings": warnings, "notes": notes}, as_json, text)
    if strict and warnings:
        raise PlanError(f"--strict: {recipe} has {len(warnings)} warnings")


@command.command(short_help="Which rule takes which tensors, in bytes")
@click.argument("model", type=flags.SourceName())
@click.option("--recipe", metavar="FILE", help="The recipe; left out, --type alone counts.")
@_default
@flags.imatrix
@flags.as_json
def explain(model: str | Path, recipe: str | None, as_json: bool, **options: Any) -> None:
    """Which rule takes which of MODEL's tensors, how many bytes come of each, and which rules do nothing.

    The size of the file itself depends on the imatrix and metadata it names too: `ggufmill quantize --dry-run` says it.

    \b
    Examples:
      ggufmill recipes explain DeepSeek-V3/ --recipe deepseek-v3-iq4_k_r4.txt
      ggufmill recipes explain model-bf16.gguf --type Q4_K_M
    """
    from ..pipeline.write_model import weights_text
    from ..quantize.recipes.lint import rule_shares

    if recipe is None and options["type"] is None:
        raise click.UsageError("give --recipe FILE, --type TYPE or both")
    plan = _plan(model, recipe, **options)
    found = rule_shares(plan)

    def text() -> str:
        columns = ("decided by", "types", "tensors", "size", "share", "bits", "first")
        total = plan.total_bytes
        rows = [
            (
                s.rule,
                " ".join(s.types),
                s.tensors,
                gib(s.nbytes),
                f"{s.nbytes / total:.1%}",
                f"{s.bits_per_weight:.3f}",
                s.first,
            )
            for s in found
        ]
        warnings = [f"warning: {warning}" for warning in plan.warnings]
        return "\n\n".join(filter(None, [table(columns, rows), "\n".join(warnings), weights_text(plan)]))

    summary = {"rules": [s.as_json() for s in found], "warnings": plan.warnings, "total_bytes": plan.total_bytes}
    emit(summary | {"bits_per_weight": plan.bits_per_weight}, as_json, text)


def _plan(model: str | Path, recipe: str | None, type: TensorType | str | None, imatrix: Path | None) -> Plan:
    """What `quantize --dry-run` would plan, with importance data taken for granted where none is given."""
    from ..convert import open_source
    from ..convert.outtype import recipe_types
    from ..pipeline.importance import load_importance
    from ..pipeline.search_options import recipe_target
    from ..quantize.planning import AssumedImportance, plan_quantize
    from ..quantize.recipes.lint import tensors_needing_imatrix
    from ..quantize.recipes.recipe import Recipe, load_recipe

    loaded = load_recipe(find(recipe)) if recipe is not None else Recipe("", [], "")
    source = open_source(model, mla_layout=loaded.stages.get("convert", {}).get("mla_layout"), remote=isinstance(model, str))
    importance = load_importance(imatrix, source, quiet=True) if imatrix is not None else AssumedImportance({})
    default, rules = recipe_types(source, loaded)
    plan = plan_quantize(
        source,
        "out.gguf",
        type=type or default,
        rules=rules if type is None else loaded.rules,
        recipe_text=loaded.text,
        importance=importance,
        ignore_imatrix_rules=True,
        allow_requantize=True,
    )
    if recipe_target(loaded) is not None:
        click.echo(f"note: {loaded.name} has a target: types for what no rule takes are found by `run`, `quantize`", err=True)
        plan.warnings[:] = [w for w in plan.warnings if not w.startswith("no rule takes")]
    if imatrix is None:
        plan.warnings.extend(tensors_needing_imatrix(plan))
    return plan
