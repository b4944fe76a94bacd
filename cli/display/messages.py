"""What is said on stderr beside results: notes, which --quiet leaves out, warnings and errors, in colour in a terminal."""

from __future__ import annotations

import os
import sys

import click

WARNING, ERROR = "yellow", "red"
_QUIET = "ggufmill.quiet"  # in a context's meta


def is_quiet() -> bool:
    """Whether the command that runs was given --quiet; False without one."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def set_quiet(context: click.Context, option: click.Parameter, value: bool) -> None:
    """The callback of --quiet."""
    context.meta[_QUIET] = value


def say(text: str, *, newline: bool = True) -> None:
    """Prints a note or how far something has come to stderr, unless the command is to be quiet."""
    if not is_quiet():
        click.echo(text, nl=newline, err=True)


def label(text: str, colour: str) -> str:
    """The word before a message, in bold and in that colour if stderr is a terminal that has colours; NO_COLOR (no-color.org)
    switches them off."""
    has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return click.style(text, fg=colour, bold=True) if has_colours else text
