"""The verbs under `imatrix` that need no model: show, merge, convert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.console import emit, table, warn
from ..pipeline.write_model import check_new, protect
from .options import flags

if TYPE_CHECKING:
    from ..imatrix import Imatrix
    from ..imatrix.statistics import Comparison, Similarity, TensorStatistics

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LISTED = 6  # names in a line of text


@click.command(short_help="Statistics of a matrix, or how two differ")
@click.argument("file", type=_FILE)
@click.argument("other", type=_FILE, required=False)
@click.option("--top", type=click.IntRange(1), default=5, show_default=True, help="Columns named of each tensor.")
@click.option("--layer-similarity", "-lsim", is_flag=True, help="Cosine of each tensor with the same one of the layer before.")
@flags.plot("a heat map, layers by tensors,")
@flags.as_json
def show(file: Path, other: Path | None, top: int, layer_similarity: bool, plot: Path | None, as_json: bool) -> None:
    """Statistics of an imatrix FILE; with OTHER, how the two differ.

    sum is that of the columns' mean squares, active the share of columns above 1e-5, even the entropy of the distribution over
    the columns as a share of its maximum.

    \b
    Examples:
      ggufmill imatrix show model.imatrix --plot model.png
      ggufmill imatrix show mine.imatrix theirs.dat
    """
    from ..imatrix import load
    from ..imatrix.statistics import compare, statistics
    from ..imatrix.statistics import layer_similarity as similarity

    if plot is not None:
        protect([plot], [file, *([other] if other else [])])
    imatrix, second = load(file), load(other) if other is not None else None
    found, alike = statistics(imatrix, top), similarity(imatrix) if layer_similarity else []
    difference = compare(imatrix, second) if second is not None else None
    if plot is not None:
        from ..pipeline.reports.imatrix_plots import plot_comparison, plot_statistics

        if difference is not None:
            plot_comparison(difference, f"{file.name} and {other.name if other else ''}", plot)
        else:
            plot_statistics(found, alike, file.name, plot)
    value: dict[str, Any] = {"datasets": imatrix.datasets, "chunks": imatrix.chunk_count, "chunk_size": imatrix.chunk_size}
    value["entries"] = [asdict(entry) for entry in found]
    if layer_similarity:
        value["layer_similarity"] = [asdict(entry) for entry in alike]
    if difference is not None:
        value["comparison"] = {"file": str(other), **asdict(difference)}
    emit(value, as_json, lambda: _text(imatrix, found, alike, difference, file, other))


def _text(
    imatrix: Imatrix,
    found: list[TensorStatistics],
    alike: list[Similarity],
    difference: Comparison | None,
    file: Path,
    other: Path | None,
) -> str:
    if difference is not None and other is not None:
        return _comparison_text(difference, file, other)
    rows = [
        (e.name, e.columns, e.matrices, e.fewest, e.most, _short(e.sum), f"{e.active:.1%}", e.entropy, f"{e.evenness:.1%}",
         f"{e.top_share:.1%}", " ".join(f"{column}:{share:.1%}" for column, share in e.top))
        for e in found
    ]  # fmt: skip
    headings = ("name", "columns", "matrices", "fewest", "most", "sum", "active", "entropy", "even", "top ten", "top columns")
    parts = [table(headings, rows)]
    if alike:
        ordered = sorted(alike, key=lambda s: -1.0 if s.cosine is None else s.cosine)
        parts.append(table(("tensor", "layer", "cosine with the layer before"), [(s.kind, s.layer, s.cosine) for s in ordered]))
    texts = ", ".join(imatrix.datasets) or "not recorded"
    parts.append(f"{len(found)} entries, {imatrix.chunk_count} chunks of {imatrix.chunk_size} tokens, text: {texts}")
    return "\n\n".join(parts)


def _short(value: float) -> str:
    return f"{value:.4g}"


def _comparison_text(found: Comparison, file: Path, other: Path) -> str:
    rows = [
        (d.name, _or_dash(d.cosine, ".6f"), _or_dash(d.ratio, ".4g"), _or_dash(d.relative, ".2e")) for d in found.differences
    ]
    parts = [table(("name", "cosine", "second / first", "relative difference"), rows)] if rows else []
    only = {f"only in {file}": found.only_first, f"only in {other}": found.only_second, "of other widths": found.unlike}
    parts += [f"{label}: {_listed(names)}" for label, names in only.items() if names]
    cosines = [d.cosine for d in found.differences if d.cosine is not None]
    least = f"; cosine at least {min(cosines):.6f}, on average {sum(cosines) / len(cosines):.6f}" if cosines else ""
    return "\n\n".join([*parts, f"{len(found.differences)} entries in both{least}"])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more (--json has all)" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


@click.command(short_help="Add several matrices up")
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("-o", "--output", "out", type=flags.OUT_FILE, required=True, help=".dat: legacy format.")
@flags.force
@flags.as_json
def merge(files: tuple[Path, ...], out: Path, force: bool, as_json: bool) -> None:
    """Add up the sums and counts of several imatrix files of one model; formats may be mixed.

    Example: ggufmill imatrix merge part1.imatrix part2.imatrix -o whole.imatrix
    """
    from ..imatrix import load

    write_merged(list(map(load, files)), out, files, force, as_json)


def write_merged(parts: Sequence[Imatrix], out: Path, inputs: Sequence[Path], force: bool, as_json: bool) -> None:
    """The sum of all, written and reported. Raises PlanError when the output exists, or is an input."""
    protect([out], inputs)
    check_new(out, force)
    merged = parts[0].merge(*parts[1:])
    lost = merged.losses(out.suffix)
    merged.save(out)
    warn([f"{out} does not keep {what}" for what in lost])
    value = {"path": str(out), "entries": len(merged.entries), "chunks": merged.chunk_count, "lost": lost}
    emit(value, as_json, lambda: f"{out}: {len(merged.entries)} entries, {merged.chunk_count} chunks")


@click.command(short_help="Write a matrix in the other format")
@click.argument("file", type=_FILE)
@click.argument("out", type=flags.OUT_FILE)
@flags.force
@flags.as_json
def convert(file: Path, out: Path, force: bool, as_json: bool) -> None:
    """Write FILE in the other format, GGUF or legacy (OUT ends in .dat); says what OUT does not keep.

    Example: ggufmill imatrix convert model.dat model.imatrix
    """
    from ..imatrix import load

    write_merged([load(file)], out, [file], force, as_json)
    with file.open("rb") as opened:
        legacy = opened.read(4) != b"GGUF"
    if legacy and out.suffix != ".dat":
        warn([f"{file} did not keep how many tokens each expert saw: in {out} all have its windows x 512"])
