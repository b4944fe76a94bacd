"""Options of verbs that generate text; they become the fields of `Sampling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from . import flags

# option, keyword, type, default, help: llama.cpp's names and defaults
_OPTIONS: tuple[tuple[str, str, Any, Any, str], ...] = (
    ("--temp", "temp", click.FloatRange(0), 0.8, "0: always the most probable token."),
    ("--top-k", "top_k", click.IntRange(0), 40, "Keep the most probable tokens; 0: off."),
    ("--top-p", "top_p", click.FloatRange(0, 1, min_open=True), 0.95, "Keep tokens that have this share together; 1: off."),
    ("--min-p", "min_p", click.FloatRange(0, 1), 0.05, "Keep tokens this probable against the first; 0: off."),
    ("--repeat-penalty", "repeat_penalty", click.FloatRange(0, min_open=True), 1.0, "Against recent tokens; 1: off."),
    ("--repeat-last-n", "repeat_last_n", click.IntRange(-1), 64, "Tokens that count as recent; -1: all."),
    ("--presence-penalty", "presence_penalty", float, 0.0, "Subtracted from recent tokens' logits."),
    ("--frequency-penalty", "frequency_penalty", float, 0.0, "The same for each time a token occurred."),
)


def sampling_options(command: Callable) -> Callable:
    """Adds the options and --seed to a command, which gets them as one keyword argument, `sampling`: fields of `Sampling`."""

    options = [
        click.option(option, name, type=kind, default=default, show_default=True, help=text)
        for option, name, kind, default, text in _OPTIONS
    ]
    options.append(click.option("-s", "--seed", type=click.IntRange(0), help="The same seed gives the same text."))
    names = [*(name for _, name, *_ in _OPTIONS), "seed"]
    return flags.gathered(options, names, "sampling", dict)(command)


def template_option(command: Callable) -> Callable:
    """Adds --template, whose value a command gets as text: None, a template's name, or the content of a file."""
    return click.option(
        "--template",
        metavar="FILE|NAME",
        callback=lambda ctx, param, value: _read(value),
        help="Chat template: a Jinja file, or a name such as chatml, llama3, gemma. [default: the model's own]",
    )(command)


def _read(value: str | None) -> str | None:
    from pathlib import Path

    if value is None or not Path(value).is_file():
        return value
    try:
        return Path(value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value} cannot be read as a text: {error}") from None
