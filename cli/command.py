"""The classes of commands: what happens around the call of every verb."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import click

from ..errors import UsageError
from ..simd.compile.compile_time import compilation_lines
from .display.messages import WARNING, is_quiet, label, set_quiet
from .options.llama_compat import translated
from .options.sections import GENERAL, SectionedOption, help_all_option, write_sections

HELP = ("-h", "--help")
_LIKENESS = 0.75  # of a typing error: `--only` is none of `--json`


def _alike(option: str, given: str) -> bool:
    """Whether `given` may be a typing error of `option`, or its beginning."""
    from difflib import SequenceMatcher

    option, given = option.lstrip("-"), given.lstrip("-")
    return option.startswith(given) or SequenceMatcher(None, option, given).ratio() >= _LIKENESS


def _is_rare(parameter: click.Parameter) -> bool:
    return getattr(parameter, "is_rare", False)


class Verb(click.Command):
    """A verb: messages of the library go to stderr while it runs, and its UsageError is one of the command line. It has
    --quiet."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return list(HELP)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        text = "Show no progress and no notes on stderr; warnings and errors stay."
        quiet = SectionedOption(
            ["--quiet"], is_flag=True, is_eager=True, expose_value=False, callback=set_quiet, help=text, section=GENERAL
        )
        *others, help_option = super().get_params(ctx)
        vars(help_option)["section"] = GENERAL
        return [*others, quiet, help_option, *([help_all_option()] if any(map(_is_rare, others)) else [])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_sections(self.get_params(ctx), ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, translated(self, ctx, args))
        except click.NoSuchOption as error:
            near = [option for option in error.possibilities or () if _alike(option, error.option_name)]
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        lines = compilation_lines(lambda line: None) if is_quiet() else nullcontext()
        with _messages_on_stderr(details=not ctx.params.get("as_json")), lines:
            try:
                return super().invoke(ctx)
            except UsageError as error:
                raise click.UsageError(str(error), ctx) from error


class Verbs(click.Group):
    """A verb with verbs of its own."""

    command_class = Verb

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return list(HELP)


class _Handler(logging.Handler):
    """Prints the library's messages, see pipeline/common/messages.py, and a warning only once: a verb may open a model twice.

    details: those of its logger of that name too.
    """

    def __init__(self, details: bool):
        super().__init__()
        self._details, self._warnings = details, set[str]()
        self._quiet = is_quiet()  # which threads of the command do not see

    def emit(self, record: logging.LogRecord) -> None:
        is_warning, text = record.levelno >= logging.WARNING, record.getMessage()
        if text in self._warnings:
            return
        self._warnings |= {text} if is_warning else set()
        if (self._details or record.name != "ggufmill.details") and (is_warning or not self._quiet):
            with _above_bars():
                click.echo(f"{label('warning:', WARNING)} {text}" if is_warning else text, err=True)


def _above_bars() -> AbstractContextManager[None]:
    if "tqdm" not in sys.modules:  # none is drawn
        return nullcontext()
    from .display.console import above_bars

    return above_bars()


@contextmanager
def _messages_on_stderr(details: bool) -> Iterator[None]:
    logger, handler = logging.getLogger("ggufmill"), _Handler(details)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
