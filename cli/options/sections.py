"""Sections of a verb's help: its own options first, then those of each group; rare ones in --help-all alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

HELP_ALL = "--help-all"
GENERAL = "General"
_SHOWS_ALL = "ggufmill.help_all"  # in a context's meta


class SectionedOption(click.Option):
    """An option that stands under a heading of the help ('': among the verb's own), or in --help-all alone."""

    def __init__(self, *arguments: Any, section: str = "", is_rare: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self.section, self.is_rare = section, is_rare


def show_all(context: click.Context) -> None:
    """From here on the help of this context has the rare options."""
    context.meta[_SHOWS_ALL] = True


def shows_all(context: click.Context) -> bool:
    """Whether the help of this context has the rare options."""
    return bool(context.meta.get(_SHOWS_ALL))


def help_all_option() -> click.Option:
    """--help-all, which prints the help with all options."""

    def show(context: click.Context, option: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            show_all(context)
            click.echo(context.get_help())
            context.exit()

    text = "Show this message with all options, and exit."
    return SectionedOption(
        [HELP_ALL], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text, section=GENERAL
    )


def sections_of(parameters: Sequence[click.Parameter], context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """heading -> (names, help) of each option; those of the verb itself first, and --json, --quiet and --help last."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for parameter in parameters:
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and (shows_all(context) or not getattr(parameter, "is_rare", False)):
            found.setdefault(getattr(parameter, "section", ""), []).append(record)
    general = found.pop(GENERAL, [])
    return {heading: rows for heading, rows in {**found, GENERAL: general}.items() if rows}


def write_sections(parameters: Sequence[click.Parameter], context: click.Context, formatter: click.HelpFormatter) -> None:
    """Writes the options under their headings, and how many --help-all has beside them."""
    for heading, rows in sections_of(parameters, context).items():
        with formatter.section(heading or "Options"):
            formatter.write_dl(rows)
    left_out = sum(getattr(parameter, "is_rare", False) for parameter in parameters)
    if left_out and not shows_all(context):
        formatter.write_paragraph()
        options = "One more option is" if left_out == 1 else f"{left_out} more options are"
        formatter.write_text(f"{options} needed less often: `{context.command_path} {HELP_ALL}` shows all.")
