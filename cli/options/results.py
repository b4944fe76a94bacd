"""-o of verbs that print measurements: a file for them, or, as llama-bench has it, the name of a format."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import click

from .flags import together
from .sections import GENERAL, SectionedOption
from .types import OUT_FILE


class Results(NamedTuple):
    """The format of results, and the file that takes them; None: they are printed."""

    form: str
    path: Path | None

    @contextmanager
    def printed(self) -> Iterator[None]:
        """While it lasts, what is printed on stdout goes into the file, which has its name at the end. Raises MillError."""
        from ...jobs.atomic_write import atomic_file

        if self.path is None:
            yield
            return
        with atomic_file(self.path) as file, redirect_stdout(io.TextIOWrapper(file, "utf-8", write_through=True)) as text:
            yield
            text.detach()


class ResultsType(click.ParamType):
    """A name of a format, or of a file that ends in one and does not exist."""

    def __init__(self, formats: Sequence[str]):
        self.formats, self.name = formats, "results"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Results:
        if isinstance(value, Results):
            return value
        if value in self.formats:
            return Results(value, None)
        suffix = Path(value).suffix.lower().removeprefix(".")
        if suffix not in self.formats:
            listed = ", ".join(self.formats)
            self.fail(f"{value!r} is neither a format ({listed}) nor a file whose name ends in one", param, ctx)
        path = Path(OUT_FILE.convert(value, param, ctx))
        if path.exists():
            self.fail(f"{path} exists; remove it, or name another file", param, ctx)
        return Results(suffix, path)


def results_options(*formats: str) -> Callable[[Callable], Callable]:
    """-o and --json of a command, which gets them as `results`, to be passed to `chosen`, and `as_json`."""
    return together(
        click.option(
            *("-o", "--output", "--output-format", "results"),
            type=ResultsType(formats),
            metavar=f"FILE|{'|'.join(formats)}",
            default=formats[0],
            show_default=True,
            help="Write the results to this file, in the format that its name ends in; or print them in this format.",
        ),
        click.option(
            *("--json", "as_json"),
            cls=SectionedOption,
            section=GENERAL,
            is_flag=True,
            help="Print one JSON object on stdout, as -o json does.",
        ),
    )


def chosen(results: Results, as_json: bool) -> Results:
    """Raises click.UsageError for --json beside a file."""
    if as_json and results.path is not None:
        raise click.UsageError(f"--json prints the results, -o {results.path} writes them to a file: give one of the two")
    return Results("json", None) if as_json else results
