"""`ggufmill imatrix` collects an importance matrix, and groups what is done with such files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.console import chunk_progress, emit, warn
from ..pipeline.write_model import check_folder, protect
from .imatrix_show import convert, merge, show
from .options import flags
from .options.settings import load, run_options
from .unused_options import refuse_idle

if TYPE_CHECKING:
    from ..imatrix import Imatrix

_ROWS = "a .jsonl or .parquet file (-f)"
_TEXT = "a text (-f) to compute from"
_OF_JOINING = {"in_files", "out", "force", "as_json"}  # what `--in-file` alone takes
_NEEDS = {"column": _ROWS, "template": _ROWS}


class _ComputeByDefault(click.Group):
    """`imatrix MODEL -f TEXT -o OUT` computes; `imatrix show FILE` shows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["compute", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ComputeByDefault, short_help="Compute, show, compare, merge and convert importance matrices")
def command() -> None:
    """Importance matrices. `ggufmill imatrix MODEL ...` is short for `ggufmill imatrix compute MODEL ...`.

    \b
    Examples:
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix
      ggufmill imatrix show model.imatrix --layer-similarity
      ggufmill imatrix merge a.imatrix b.dat -o both.imatrix
      ggufmill imatrix convert model.dat model.imatrix
    """


for verb in (show, merge, convert):
    command.add_command(verb)


@command.command(short_help="Run texts through a model")
@click.argument("model", type=click.Path(exists=True, path_type=Path), required=False)
@click.option(
    "-f",
    "--file",
    "texts",
    metavar="PATH[:WEIGHT]",
    multiple=True,
    help="Text, .jsonl or .parquet; may be given several times. A token of a:3 counts three times.",
)
@click.option("-o", "--output", "out", type=flags.OUT_FILE, required=True, help=".dat: legacy format.")
@click.option("--column", help="Column of .jsonl and .parquet files. [default: messages, conversations, text or content]")
@click.option("--template", metavar="NAME|FILE", help="Chat template for conversations. [default: the model's own]")
@click.option(
    "--in-file",
    "in_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Add what this imatrix holds; without -f that is all that is done.",
)
@run_options(n_ctx=512)
@flags.chunks
@click.option("--from-chunk", "--chunk", type=click.IntRange(0), default=0, help="Leave out so many windows at the beginning.")
@click.option("--process-output", is_flag=True, help="Collect data for the output matrix too (the embeddings, if they are it).")
@click.option("--process-embedding", is_flag=True, help="Data for token_embd.weight: its rows, as often as the text uses them.")
@click.option(
    "-ofreq",
    "--output-frequency",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Windows between saves of what --resume needs, to OUT.state; 0: never.",
)
@click.option(
    "--save-frequency",
    type=click.IntRange(0),
    default=0,
    help="Also write OUT.at_N every so many windows, after the pass they end in.",
)
@flags.plot("the coverage")
@flags.resume
@flags.force
@flags.as_json
def compute(
    model: Path | None,
    texts: tuple[str, ...],
    out: Path,
    column: str | None,
    template: str | None,
    in_files: tuple[Path, ...],
    chunks: int | None,
    from_chunk: int,
    process_output: bool,
    process_embedding: bool,
    output_frequency: int,
    save_frequency: int,
    plot: Path | None,
    resume: bool,
    force: bool,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """Run calibration texts through MODEL (a GGUF or a Hugging Face folder) and write what its weights see.

    Killed? The same command with --resume goes on, and ends in the same bytes. Parts that were computed with --from-chunk
    and --chunks, on several machines, become one with `imatrix merge`.

    \b
    Examples:
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix --chunks 200
      ggufmill imatrix model.gguf -f prose.txt -f chats.jsonl:3 --process-output -o model.imatrix --plot coverage.png
      ggufmill imatrix --in-file a.imatrix --in-file b.imatrix -o both.imatrix
    """
    from ..convert import open_source
    from ..formats import PlanError
    from ..imatrix import load as load_imatrix
    from ..imatrix.calibration import cut
    from ..imatrix.checkpoint import load_state
    from ..imatrix.collect import Extent, collect
    from ..imatrix.texts import ROWS, check_texts, parse_text, stretches
    from ..pipeline.reports.imatrix_coverage import coverage_json, coverage_text

    if not texts:
        if not in_files:
            raise click.UsageError("nothing to do: give a MODEL and -f TEXT, or --in-file")
        names = {option.name or "" for option in click.get_current_context().command.params} - _OF_JOINING
        refuse_idle(dict.fromkeys(names, _TEXT), {_TEXT: False})
        _join(list(map(load_imatrix, in_files)), out, in_files, force, as_json)
        return
    if model is None:
        raise click.UsageError("a text (-f) needs a MODEL to run through")
    given = [parse_text(text) for text in texts]
    check_texts(given)
    refuse_idle(_NEEDS, {_ROWS: any(text.path.suffix in ROWS for text in given)})
    state_path = out.with_name(out.name + ".state")
    source = open_source(model)
    protect([out, state_path, *([plot] if plot else [])], [*source.files, *(text.path for text in given), *in_files])
    state = load_state(state_path) if resume and state_path.exists() else None
    if state is None and out.exists() and not force:
        how = "there is nothing to resume; " if resume else ""
        raise PlanError(f"{out} exists; {how}use --force to replace it")
    if state_path.exists() and not (resume or force):
        raise PlanError(f"{state_path} is left from an interrupted run; --resume goes on with it, --force starts afresh")
    check_folder(out)
    before = [load_imatrix(path).fit(source, str(path)) for path in in_files]
    extent = Extent(process_output, process_embedding)
    loaded = load(source, settings)
    extent.check(loaded)
    if not as_json:
        click.echo(f"reading {', '.join(str(text.path) for text in given)}", err=True)
    if template is not None and Path(template).is_file():
        template = Path(template).read_text("utf-8", "replace")
    n_ctx = settings["n_ctx"]
    # Of several weights a whole window each may be left over.
    enough = None if chunks is None else (from_chunk + chunks + len({text.weight for text in given})) * n_ctx
    job = cut(
        loaded,
        stretches(loaded, given, column=column, template=template, enough=enough),
        n_ctx,
        chunks=chunks,
        from_chunk=from_chunk,
    )
    warn([f"nothing of {t.path.name} is in the windows that are read" for t in given if t.path.name not in job.datasets])
    try:
        with chunk_progress("imatrix") as progress:
            imatrix, result = collect(
                loaded,
                job,
                extent=extent,
                save_frequency=save_frequency,
                on_save=lambda partial: partial.save(out.with_name(f"{out.stem}.at_{partial.chunk_count}{out.suffix}")),
                state_frequency=output_frequency,
                on_state=lambda now: now.save(state_path),
                resume=state,
                on_chunk=progress,
            )
    except KeyboardInterrupt:
        if not state_path.exists():
            raise
        done = load_state(state_path).done
        raise KeyboardInterrupt(f"{done} windows are kept in {state_path}; the same command with --resume goes on") from None
    whole = imatrix.merge(*before)
    whole.save(out)
    state_path.unlink(missing_ok=True)
    warn([*result.notes, *(f"{out} does not keep {lost}" for lost in whole.losses(out.suffix))])
    found = coverage_json(whole, source)
    if plot is not None:
        from ..pipeline.reports.imatrix_plots import plot_coverage

        plot_coverage(whole, source, out.name, plot)
    summary = {
        "path": str(out),
        "entries": len(whole.entries),
        "chunks": whole.chunk_count,
        "plot": str(plot) if plot else None,
    }
    summary |= {**found, **result.as_json(), "chunks": whole.chunk_count}
    emit(
        summary,
        as_json,
        lambda: (
            f"{coverage_text(whole, source)}\n\n"
            f"{out}: {len(whole.entries)} entries, {whole.chunk_count} chunks, perplexity {result.perplexity:.4f}"
        ),
    )
    warn(found["remarks"])


def _join(parts: list[Imatrix], out: Path, inputs: tuple[Path, ...], force: bool, as_json: bool) -> None:
    from .imatrix_show import write_merged

    write_merged(parts, out, inputs, force, as_json)
