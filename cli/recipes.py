"""`ggufmill recipes` lists, shows, checks and explains recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import BITS, bits_text, share_text, size_text
from ..pipeline.requests.recipes import ExplainRequest, LintRequest
from .command import Verbs
from .display.console import call, table
from .display.plans import weights_text
from .options import flags
from .options.fields import options_of

if TYPE_CHECKING:
    from ..pipeline.recipes import Explanation, LintResult, ShippedRecipes


@click.group(cls=Verbs)
def command() -> None:
    """List and show the recipes bundled with ggufmill (`--recipe NAME` takes them by name); check and explain any recipe.

    Example: ggufmill recipes show deepseek-v3-iq4_k_r4.txt
    """


@command.command("list", short_help="List the bundled recipes")
@flags.as_json
def list_(as_json: bool) -> None:
    """List the bundled recipes, one line each: the name and the first comment.

    Example: ggufmill recipes list
    """
    from ..pipeline.recipes import list_recipes

    def text(result: ShippedRecipes) -> str:
        return table(("recipe", "what it is"), list(result.recipes.items()))

    call(list_recipes, show=text, as_json=as_json, bars=False)


@command.command(short_help="Print a recipe")
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe.

    Example: ggufmill recipes show demo
    """
    from ..pipeline.recipes import read_recipe

    click.echo(read_recipe(name), nl=False)


@command.command(short_help="Check a recipe, by itself or against a model")
@options_of(LintRequest)
def lint(**options: Any) -> None:
    """Check RECIPE by itself, and against MODEL (a GGUF or a Hugging Face folder) if one is given.

    \b
    Examples:
      ggufmill recipes lint mine.txt
      ggufmill recipes lint mine.txt DeepSeek-V3/ --imatrix v3.imatrix --strict
    """
    from ..pipeline.recipes import lint_recipe

    call(lint_recipe, show=_lint_text, bars=False, **options)


def _lint_text(result: LintResult) -> str:
    lines = [f"warning: {warning}" for warning in result.warnings] + [f"note: {note}" for note in result.notes]
    numbers = {"rule": result.rules, "warning": len(result.warnings), "note": len(result.notes)}
    counts = ", ".join(f"{number} {word}{'s' * (number != 1)}" for word, number in numbers.items())
    return "\n".join([*lines, f"{result.recipe}: {counts}"])


@command.command(short_help="Explain which rule takes which tensors")
@options_of(ExplainRequest)
def explain(**options: Any) -> None:
    """Explain which rule takes which of MODEL's tensors, how many bytes each gives, and which rules do nothing.

    The size of the file itself depends on the imatrix and metadata it names too: `ggufmill quantize --dry-run` says it.

    \b
    Examples:
      ggufmill recipes explain DeepSeek-V3/ --recipe deepseek-v3-iq4_k_r4.txt
      ggufmill recipes explain model-bf16.gguf --type Q4_K_M
    """
    from ..pipeline.recipes import explain_recipe

    call(explain_recipe, show=_explanation_text, bars=False, **options)


def _explanation_text(result: Explanation) -> str:
    total = result.plan.total_bytes
    rows = [
        (
            (f"line {s.line}: " if s.line else "") + (f"{s.rule} ({s.note})" if s.note else s.rule),
            " ".join(s.types),
            s.tensors,
            size_text(s.nbytes),
            share_text(s.nbytes / total),
            bits_text(s.bits_per_weight),
            s.first,
        )
        for s in result.shares
    ]
    shares = table(("decided by", "types", "tensors", "size", "share", BITS, "first"), rows)
    warnings = "\n".join(f"warning: {warning}" for warning in result.plan.warnings)
    return "\n\n".join(filter(None, [shares, warnings, weights_text(result.plan)]))
