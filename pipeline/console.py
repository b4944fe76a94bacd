"""What people see: progress bars on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

if TYPE_CHECKING:
    from ..runtime.evaluate.perplexity import Perplexity
    from ..runtime.generation.generate import Timings


SECONDS = 0.2, 10.0  # between two states of a bar: in a terminal, and in a log


def progress_bar(**options: Any) -> tqdm:
    """A bar on stderr with rate and ETA, as wide as the terminal. options: of tqdm."""
    return tqdm(file=sys.stderr, mininterval=SECONDS[not sys.stderr.isatty()], dynamic_ncols=True, **options)


@contextmanager
def byte_progress(total: int, label: str, *, quiet: bool = False) -> Iterator[Callable[[int, str], None]]:
    """A bar of bytes with rate and ETA; the context's value is called with (bytes, name of the tensor)."""
    with progress_bar(total=total, unit="B", unit_scale=True, desc=label, disable=quiet) as bar:

        def advance(count: int, name: str) -> None:
            bar.update(count)
            if name:
                bar.set_postfix_str(name, refresh=False)

        yield advance


@contextmanager
def chunk_progress(label: str) -> Iterator[Callable[[Perplexity, int], None]]:
    """A bar of windows with the running perplexity; called with (result so far, windows in all)."""
    with progress_bar(unit="chunk", desc=label) as bar:

        def advance(so_far: Perplexity, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(f"perplexity {so_far.perplexity:.4f}", refresh=False)
            bar.update(so_far.chunks - bar.n)

        try:
            yield advance
        finally:
            bar.leave = bar.n > 0  # nothing is left of a bar that never moved: an error message follows it


def speeds(t: Timings) -> str:
    """Tokens read and generated, and how fast; no rate of what took no pass through the model."""
    parts = [f"{t.prompt_tokens} prompt tokens" + (f" ({t.cached_tokens} known)" if t.cached_tokens else "")]
    parts += [f"{t.generated_tokens} generated"]
    rates = t.prompt_per_second, t.generated_per_second
    return "; ".join(part + (f", {rate:.1f} per second" if rate else "") for part, rate in zip(parts, rates, strict=True))


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned: numbers (and headings over them) to the right, text to the left."""
    cells = [[_text(c) for c in row] for row in rows]
    widths = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(headings)]
    right = [all(isinstance(row[i], int | float) or row[i] is None for row in rows) for i in range(len(headings))]

    def line(values: Sequence[str]) -> str:
        return "  ".join(v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)).rstrip()

    return "\n".join([line(headings), line(["-" * w for w in widths]), *(line(r) for r in cells)])


def _text(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def gib(nbytes: int) -> str:
    """'386.183 GiB', or MiB below one."""
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.3f} MiB"


def emit(value: dict[str, Any], as_json: bool, text: Callable[[], str]) -> None:
    """One JSON object on stdout, with null for what is not finite, or the text for eyes."""
    if as_json:
        click.echo(json_text(value))
    else:
        encoding = sys.stdout.encoding or "utf-8"
        click.echo(text().encode(encoding, "backslashreplace").decode(encoding))


def json_text(value: dict[str, Any], indent: int | None = None) -> str:
    """With null for what is not finite."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    """The same with None in place of every NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warn(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"warning: {line}", err=True)
