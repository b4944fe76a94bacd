from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import click
import numpy as np

from . import flags
from .console import chunk_progress, emit, table, warn
from .settings import load, run_options
from .writing import protect


class _ComputeByDefault(click.Group):
    """`imatrix MODEL -f TEXT -o OUT` computes; `imatrix show FILE` shows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["compute", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ComputeByDefault, short_help="Compute, show and merge importance matrices")
def command() -> None:
    """Importance matrices. `ggufmill imatrix MODEL ...` is short for `ggufmill imatrix compute MODEL ...`.

    \b
    Examples:
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix
      ggufmill imatrix show model.imatrix
      ggufmill imatrix merge a.imatrix b.dat -o both.imatrix
    """


@command.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-f", "--file", "text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option(
    "-o", "--output", "out", type=click.Path(dir_okay=False, path_type=Path), required=True, help=".dat: legacy format."
)
@run_options(n_ctx=512)
@flags.chunks
@click.option("--process-output", is_flag=True, help="Collect data for output.weight too.")
@click.option("--save-frequency", type=click.IntRange(0), default=0, help="Also save after every N windows.")
@flags.force
@flags.as_json
def compute(
    model: Path,
    text: Path,
    out: Path,
    chunks: int | None,
    process_output: bool,
    save_frequency: int,
    force: bool,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """Run a calibration text through MODEL (a GGUF or a Hugging Face folder) and write what its weights see.

    Example: ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix --chunks 200
    """
    from ..convert import open_source
    from ..formats import PlanError
    from ..imatrix.collect import collect

    source = open_source(model)
    protect([out], [*source.files, text])
    if out.exists() and not force:
        raise PlanError(f"{out} exists; use --force to replace it")
    loaded = load(source, settings)
    tokens = loaded.tokenizer.encode(text.read_text("utf-8", "replace"))
    with chunk_progress("imatrix", quiet=as_json) as progress:
        imatrix, result = collect(
            loaded,
            tokens,
            dataset=text.name,
            n_ctx=settings["n_ctx"],
            chunks=chunks,
            process_output=process_output,
            save_frequency=save_frequency,
            on_save=lambda partial: partial.save(out),
            on_chunk=progress,
        )
    imatrix.save(out)
    warn(result.notes)
    starved = imatrix.starved()
    summary = {
        "path": str(out),
        "entries": len(imatrix.entries),
        "chunks": imatrix.chunk_count,
        "starved_experts": starved,
        **result.as_json(),
    }
    emit(
        summary,
        as_json,
        lambda: f"{out}: {len(imatrix.entries)} entries, {imatrix.chunk_count} chunks, perplexity {result.perplexity:.4f}",
    )
    if starved:
        click.echo(f"warning: experts without a token: {starved}; a longer text helps", err=True)


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@flags.as_json
def show(file: Path, as_json: bool) -> None:
    """Entries of an imatrix file: columns, matrices, tokens seen, mean square and the share of the ten largest columns.

    Example: ggufmill imatrix show model.imatrix
    """
    from ..imatrix import load

    imatrix = load(file)
    entries = [_statistics(name, sums, counts) for name, (sums, counts) in imatrix.entries.items()]
    header = {"datasets": imatrix.datasets, "chunks": imatrix.chunk_count, "chunk_size": imatrix.chunk_size}
    headings = ("name", "columns", "matrices", "fewest", "most", "mean_square", "top10_share")
    emit(
        header | {"entries": entries},
        as_json,
        lambda: (
            table(headings, [[e[h] for h in headings] for e in entries])
            + f"\n\n{len(entries)} entries, {imatrix.chunk_count} chunks of {imatrix.chunk_size} tokens, "
            + f"text: {', '.join(imatrix.datasets) or 'not recorded'}"
        ),
    )


def _statistics(name: str, sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    total = np.sort(sums.sum(axis=0, dtype=np.float64))[::-1]
    return {
        "name": name,
        "columns": sums.shape[1],
        "matrices": sums.shape[0],
        "fewest": int(counts.min()),
        "most": int(counts.max()),
        "mean_square": float(total.sum() / max(int(counts.sum()), 1) / sums.shape[1]),
        "top10_share": float(total[:10].sum() / total.sum()) if total.any() else 0.0,
    }


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", "out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@flags.force
def merge(files: tuple[Path, ...], out: Path, force: bool) -> None:
    """Add up the sums and counts of several imatrix files of one model; formats may be mixed.

    Example: ggufmill imatrix merge part1.imatrix part2.imatrix -o whole.imatrix
    """
    from ..formats import PlanError
    from ..imatrix import load

    if out.exists() and not force:
        raise PlanError(f"{out} exists; use --force to replace it")
    merged = reduce(lambda a, b: a.merge(b), map(load, files))
    merged.save(out)
    click.echo(f"{out}: {len(merged.entries)} entries, {merged.chunk_count} chunks")
