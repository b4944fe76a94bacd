"""`ggufmill imatrix` computes importance matrices, and shows, compares, merges and converts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..pipeline.requests.imatrix import FilesMemory, ImatrixRequest, ShowRequest
from .command import Verbs
from .display.console import call
from .display.imatrices import computed_text, covariances_text, merged_covariances_text, merged_text, statistics_text
from .options import flags
from .options.fields import options_of
from .options.types import FILE, MODEL, OUT_FILE, WEIGHTED_TEXT

if TYPE_CHECKING:
    from ..pipeline.imatrix import ImatrixStatistics

_OF_MERGING = {"in_file", "out", "force", "as_json"}  # what `--in-file` alone takes


class _ComputeByDefault(Verbs):
    """`imatrix MODEL -f TEXT -o OUT` computes; `imatrix show FILE` shows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["compute", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ComputeByDefault)
def command() -> None:
    """Compute, show, merge and convert importance matrices. `ggufmill imatrix MODEL ...` is short for `ggufmill imatrix compute
    MODEL ...`.

    \b
    Examples:
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix
      ggufmill imatrix show model.imatrix --layer-similarity
      ggufmill imatrix merge a.imatrix b.dat -o both.imatrix
      ggufmill imatrix convert model.dat model.imatrix
    """


@command.command(short_help="Run texts through a model")
@options_of(
    ImatrixRequest,
    model={"type": MODEL, "required": False},
    text={"type": WEIGHTED_TEXT, "multiple": True, "required": False},
    out={"type": OUT_FILE, "required": True},
)
def compute(model: Any, text: Any, out: Any, as_json: bool, **options: Any) -> None:
    """Run calibration texts through MODEL (a GGUF or a Hugging Face folder) and write an importance matrix: how strongly the
    text uses each column of its weights. Without -f the text that comes with ggufmill is read; a text of the kind that the
    model is used for gives a better matrix.

    An interrupted command continues with --resume, and ends in the same bytes. Parts that were computed with --from-chunk and
    --chunks, on several machines, become one with `imatrix merge`.

    \b
    Examples:
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix --chunks 200
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix --covariance model.cov --memory 20G --dry-run
      ggufmill imatrix model-q8_0.gguf -f calibration.txt -o model.imatrix --curvature model.curv
      ggufmill imatrix model.gguf -f prose.txt -f chats.jsonl:3 --process-output -o model.imatrix --plot coverage.png
      ggufmill imatrix --in-file a.imatrix --in-file b.imatrix -o both.imatrix
    """
    from ..pipeline.imatrix import compute_imatrix, merge_imatrix

    if text and model is None:
        raise UsageError("a text (-f) needs a MODEL to run through")
    if model is not None:
        call(compute_imatrix, model, text or None, out, show=computed_text, as_json=as_json, **options)
        return
    _refuse_without_text(bool(options["in_file"]))
    merging = {"force": options["force"], "show": merged_text, "as_json": as_json, "bars": False}
    call(merge_imatrix, options["in_file"], out, **merging)


def _refuse_without_text(has_input: bool) -> None:
    """Raises UsageError for options of computing, and for no input at all."""
    from ..pipeline.common.arguments import refuse_given

    if not has_input:
        raise UsageError("nothing to do: give a MODEL, or --in-file")
    context = click.get_current_context()
    given = {
        option.human_readable_name if isinstance(option, click.Argument) else max(option.opts, key=len): value
        for option in context.command.params
        if option.name not in _OF_MERGING and (value := context.params.get(option.name or "")) is not None
    }
    refuse_given(given, "a MODEL to compute with")


def _is_covariance(file: Any) -> bool:
    from ..imatrix.covariance import is_covariance

    return is_covariance(file)


def _refuse_for_covariances(other: Any, options: dict[str, Any]) -> None:
    """Raises UsageError for what only importance matrices have."""
    from ..pipeline.common.arguments import refuse_given

    given = {"OTHER": other, "--layer-similarity": options["layer_similarity"], "--plot": options["plot"]}
    refuse_given(given, "an importance matrix; this is a file of covariances")


@command.command(short_help="Show statistics of a matrix, or how two differ")
@options_of(ShowRequest)
def show(file: Any, other: Any, as_json: bool, **options: Any) -> None:
    """Show statistics of FILE, an importance matrix or a file of covariances; with OTHER, show how two matrices differ.

    The column `sum` has the sum of the columns' mean squares, `active` the share of columns above 1e-5, `even` the entropy of
    the distribution over the columns, as a share of its maximum. For a covariance H, `rank` is (trace H)^2 / trace H^2 and
    `diagonal` is the share of the diagonal in the sum of the squares of all entries; rows whose `side` is `output` are of
    gradients, and their columns are the rows of a block.

    \b
    Examples:
      ggufmill imatrix show model.imatrix --plot model.png
      ggufmill imatrix show mine.imatrix theirs.dat
      ggufmill imatrix show model.cov --json
    """
    from ..pipeline.imatrix import show_imatrix

    if _is_covariance(file):
        _refuse_for_covariances(other, options)
        from ..pipeline.covariance import show_covariance

        call(show_covariance, file, show=covariances_text, as_json=as_json, memory=options["memory"])
        return

    def text(result: ImatrixStatistics) -> str:
        return statistics_text(result, file)

    call(show_imatrix, file, other, show=text, as_json=as_json, bars=False, **options)


@command.command(short_help="Add up several matrices")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option(
    "-o",
    "--output",
    "out",
    type=OUT_FILE,
    required=True,
    help="Write this file; a name that ends in .dat selects the legacy format.",
)
@options_of(FilesMemory)
@flags.force
def merge(files: Any, out: Any, as_json: bool, **options: Any) -> None:
    """Add up the sums and counts of several imatrix files of one model; formats may be mixed. Files of covariances become one,
    too, each weighed by its tokens.

    \b
    Examples:
      ggufmill imatrix merge part1.imatrix part2.imatrix -o all.imatrix
      ggufmill imatrix merge part1.cov part2.cov -o all.cov
    """
    from ..pipeline.imatrix import merge_imatrix

    if all(map(_is_covariance, files)):
        from ..pipeline.covariance import merge_covariance

        call(merge_covariance, files, out, show=merged_covariances_text, as_json=as_json, **options)
        return

    call(merge_imatrix, files, out, show=merged_text, as_json=as_json, bars=False, **options)


@command.command(short_help="Write a matrix in the other format")
@click.argument("file", type=FILE)
@click.argument("out", type=OUT_FILE)
@flags.force
@flags.as_json
def convert(file: Any, out: Any, force: bool, as_json: bool) -> None:
    """Write FILE in the other format, GGUF or legacy (OUT ends in .dat); says what OUT does not keep.

    Example: ggufmill imatrix convert model.dat model.imatrix
    """
    from ..pipeline.imatrix import convert_imatrix

    call(convert_imatrix, file, out, show=merged_text, as_json=as_json, bars=False, force=force)
