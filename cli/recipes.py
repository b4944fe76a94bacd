from __future__ import annotations

import click

from ..recipes import find, names
from .console import table


@click.group(short_help="List and show the recipes that come along")
def command() -> None:
    """The recipes that come along with ggufmill; `--recipe NAME` takes them by name.

    Example: ggufmill recipes show deepseek-v3-iq4_k_r4.txt
    """


@command.command("list")
def list_() -> None:
    """One line per recipe: its name and its first comment.

    Example: ggufmill recipes list
    """
    rows = []
    for name in names():
        first = find(name).read_text("utf-8").splitlines()[0]
        rows.append((name, first.lstrip("# ") if first.startswith("#") else ""))
    click.echo(table(("recipe", "what it is"), rows))


@command.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe.

    Example: ggufmill recipes show demo
    """
    path = find(name)
    if not path.exists():
        raise click.BadParameter(f"there is no recipe {name!r}; `ggufmill recipes list` shows them")
    click.echo(path.read_text("utf-8"), nl=False)
