"""Tables and JSON on stdout, progress bars on stderr, and above the bars lines about the compiling of kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from ...errors import CheckFailed
from ...jobs.streamed_json import StreamedJson
from ...pipeline.common.figures import share_text
from ...pipeline.common.messages import json_pieces
from ...pipeline.common.progress import Bars
from ...simd.compile.compile_time import compilation_lines, compiling_now, line_about
from .messages import is_quiet

if TYPE_CHECKING:
    from ...pipeline.common.forecast import Planned
    from ...runtime.generation.generate import Timings


_EVERY = 1.0  # seconds between two states of a line


@contextmanager
def lines_beside(bars: Bars) -> Iterator[None]:
    """Within this, a line about compiling is written above the bars. In a terminal one below them counts its seconds, and those
    in which there is no bar, and each second the bar shows the time that has passed."""

    def write(line: str) -> None:
        from tqdm import tqdm

        bars.leave_out_compilation()
        tqdm.write(line, file=sys.stderr)

    ended = threading.Event()
    counter = threading.Thread(target=_count_seconds, args=(ended, bars), daemon=True)
    if sys.stderr.isatty():
        counter.start()
    try:
        with compilation_lines(write):
            yield
    finally:
        ended.set()
        if counter.is_alive():
            counter.join()


@contextmanager
def above_bars() -> Iterator[None]:
    """Within this, what is written to the terminal stands above the bars."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):
        yield


def _count_seconds(ended: threading.Event, bars: Bars) -> None:
    line, idle = None, 0.0
    while not ended.wait(_EVERY):
        now, is_drawn = compiling_now(), bars.refresh()
        idle = 0.0 if is_drawn or now is not None else idle + _EVERY
        if now is not None or idle:
            if line is None:
                from tqdm import tqdm

                line = tqdm(bar_format="{desc}", leave=False, file=sys.stderr, dynamic_ncols=True)
            line.set_description_str(line_about(*now) if now is not None else f"working: {idle:.0f} s")
        elif line is not None:
            line.close()
            line = None
    if line is not None:
        line.close()


_SECONDS = 0.2, 10.0  # between two states of a bar: in a terminal, and in a log
_SHORT = 16  # characters that are left of a long text in a table
_LINES = 1000  # that are printed at a time
MOST_ROWS = 100_000  # of a table; the largest checkpoints have as many tensors
# stage -> seconds before which it has no bar
_DELAYS: dict[str, float] = dict.fromkeys(("metadata", "checksums", "checksum", "verify", "compare", "covariances"), 1.0)


class _Result(Protocol):
    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Result)


def call(
    function: Callable[..., R | Planned],
    *arguments: Any,
    show: Callable[[R], str | Iterator[str]],
    as_json: bool,
    bars: bool = True,
    **keywords: Any,
) -> R | Planned:
    """Calls a function of the library, and prints its result: as JSON, or as the text, or the lines, that `show` makes of it.

    bars: its progress is drawn; False for a function without. The result of a check that failed is printed too, before its
    CheckFailed goes on.
    """
    from ...pipeline.common.forecast import Planned

    try:
        with progress_bars() if bars else nullcontext() as progress:
            result = function(*arguments, **keywords, **({"progress": progress} if bars else {}))
    except CheckFailed as error:
        failed = error.result
        emit(_fields_of(failed), as_json, lambda: show(failed))
        raise
    emit(_fields_of(result), as_json, lambda: result.text if isinstance(result, Planned) else show(result))
    return result


def _fields_of(result: _Result) -> Callable[[], dict[str, Any]]:
    return result.json_fields if isinstance(result, StreamedJson) else result.as_json


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """Bars with rate and remaining time, as wide as the terminal."""
    quiet = is_quiet()

    def make(**options: Any) -> Any:
        from tqdm import tqdm  # when there is a bar to draw: it takes as long to import as a short command's work

        interval = _SECONDS[not sys.stderr.isatty()]
        return tqdm(file=sys.stderr, mininterval=interval, dynamic_ncols=True, disable=quiet, **options)

    bars = Bars(make, _DELAYS)
    try:
        with nullcontext() if quiet else lines_beside(bars):
            yield bars
    finally:
        bars.close()


def table(headings: Sequence[str], rows: Sequence[Any], row_of: Callable[[Any], Sequence[object]] = tuple) -> str:
    """Columns aligned: numbers (and headings over them) to the right, text to the left. Rows beyond MOST_ROWS are counted.

    row_of: makes the cells of what `rows` holds
    """
    more, rows = len(rows) - MOST_ROWS, [row_of(row) for row in rows[:MOST_ROWS]]
    cells = [[_text(c) for c in row] for row in rows]
    widths = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(headings)]
    right = [all(isinstance(row[i], int | float) or row[i] is None for row in rows) for i in range(len(headings))]

    def line(values: Sequence[str]) -> str:
        return "  ".join(v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)).rstrip()

    if (columns := _terminal_width()) is not None and sum(widths) + 2 * (len(widths) - 1) > columns:
        widths, cells, wide = _narrowed(headings, cells, widths, right, columns)
        if wide:
            return "\n".join([*_records(headings, cells), *([f"and {more:,} more, which --json has"] if more > 0 else [])])
    lines = [line(headings), line(["-" * w for w in widths]), *(line(r) for r in cells)]
    return "\n".join([*lines, f"and {more:,} more, which --json has"] if more > 0 else lines)


def _terminal_width() -> int | None:
    """Columns of the terminal that stdout is, or COLUMNS; None for a file or a pipe, which get tables as they are."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size

    return get_terminal_size().columns


def _narrowed(
    headings: Sequence[str], cells: list[list[str]], widths: list[int], right: list[bool], columns: int
) -> tuple[list[int], list[list[str]], bool]:
    """Widths and cells of a table that fits, and whether it is still too wide: texts are cut in their middle, down to _SHORT
    characters, and numbers (right) never."""
    widths, excess = list(widths), sum(widths) + 2 * (len(widths) - 1) - columns
    for i in sorted(range(len(widths)), key=lambda i: -widths[i]):
        least = max(_SHORT, len(headings[i]))
        if excess > 0 and widths[i] > least and not right[i]:
            cut = min(excess, widths[i] - least)
            widths[i], excess = widths[i] - cut, excess - cut
    if excess > 0:
        return widths, cells, True
    return widths, [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells], False


def _cut(text: str, width: int) -> str:
    """The text with ... in its middle if it is longer than that."""
    end = (width - 3) // 2
    return text if len(text) <= width else f"{text[: width - 3 - end]}...{text[len(text) - end :]}"


def _records(headings: Sequence[str], cells: list[list[str]]) -> list[str]:
    """A table that is too wide, as a paragraph for each row."""
    width = max(map(len, headings))
    lines: list[str] = []
    for row in cells:
        lines += ["", *(f"{heading:{width}}  {cell}" for heading, cell in zip(headings, row, strict=True))]
    return lines[1:]


def _text(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def emit(value: Callable[[], dict[str, Any]], as_json: bool, text: Callable[[], str | Iterator[str]]) -> None:
    """Prints one JSON object, with null for what is not finite, or the text for people. Only what is printed is made; values
    that are iterators are printed item by item."""
    if as_json:
        for piece in json_pieces(value()):
            click.echo(piece, nl=False)
        click.echo()
    else:
        encoding = sys.stdout.encoding or "utf-8"
        shown = text()
        lines = iter([shown]) if isinstance(shown, str) else shown
        while some := list(islice(lines, _LINES)):
            click.echo("\n".join(some).encode(encoding, "backslashreplace").decode(encoding))


def speeds_text(t: Timings) -> str:
    """Tokens read and generated, and how fast; no rate of what took no pass through the model."""
    parts = [f"{t.prompt_tokens} prompt tokens" + (f" ({t.cached_tokens} cached)" if t.cached_tokens else "")]
    parts += [f"{t.generated_tokens} generated"]
    rates = t.prompt_per_second, t.generated_per_second
    texts = [part + (f", {rate:.1f} per second" if rate else "") for part, rate in zip(parts, rates, strict=True)]
    if t.acceptance_rate is not None:
        texts.append(f"{t.accepted_tokens} of {t.drafted_tokens} drafts accepted ({share_text(t.acceptance_rate)})")
    return "; ".join(texts)
