"""`ggufmill run` goes through all the stages of a recipe."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import flags

if TYPE_CHECKING:
    from ..jobs.plan import Plan
    from ..pipeline.stages import Run


@click.command(short_help="Every stage a recipe names, ending in a report")
@click.argument("recipe")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of results. [default: out/RECIPE]")
@click.option("--force", is_flag=True, help="Do every stage again.")
@flags.allow_nonfinite
@flags.dry_run
@flags.threads
@flags.as_json
def command(
    recipe: str, out: Path | None, force: bool, allow_nonfinite: bool, dry_run: bool, threads: int | None, as_json: bool
) -> None:
    """Run every stage that the TOML file RECIPE names: imatrix, search, quantise, repack, validate; ends in a report.

    The folder then holds, beside the model: report.html (one page with plots, nothing outside of it is loaded), report.md,
    report.json, and README.md, the draft of a model card.

    Checked first: files, types, exact sizes, disk space. An interrupted run goes on where it was when the same
    command is given again; a stage whose inputs have not changed is not repeated. With [repack] the file it begins with stays
    too, so that room for both is needed. One run at a time works in a folder.

    With target_size = "180G", target_bpw or max_kld under [quantize], types for the tensors that no rule takes are searched for
    as `ggufmill search` does it; [search] has its options: text, ctx, chunks, types, repacked, gpu, gpu_size, rows, seed,
    measurements, refine. The recipe that is found lies beside the model, as RECIPE.recipe.txt.

    \b
    Examples:
      ggufmill run demo
      ggufmill run my-model.toml -o results --dry-run
    """
    from ..pipeline.run_folder import Folder
    from ..pipeline.stages import Run
    from ..quantize.recipes.recipe import load_recipe
    from ..recipes import find

    path = find(recipe)
    loaded, folder = load_recipe(path), Folder(out or Path("out") / path.stem, path.stem)
    with nullcontext() if dry_run else folder.alone():
        job = Run(loaded, path, folder, threads=threads, fresh=force, allow_nonfinite=allow_nonfinite)
        if not as_json:
            for note in job.source.notes:
                click.echo(f"note: {note}", err=True)
        plan = job.check()
        if dry_run:
            _show(job, plan, as_json)
        else:
            _carry_out(job, plan, as_json)


def _show(job: Run, plan: Plan, as_json: bool) -> None:
    """The plan; of a recipe whose rules are still to be found, what is known of it."""
    from ..pipeline.write_model import show_plan

    if job.target is None:
        show_plan(plan, as_json, room=job.room)
        return
    found = job.is_found
    if not found:
        click.echo(f"note: types for {job.target.text} are still to be found; these are the smallest allowed", err=True)
    show_plan(plan, as_json, more={"search": {"target": job.target.text, "found": found}}, room=job.room)


def _carry_out(job: Run, plan: Plan, as_json: bool) -> None:
    """All stages; what they leave in the folder is reported. Raises MillError when the result is beyond the recipe's limits."""
    from ..formats import MillError
    from ..jobs.atomic_write import write_text
    from ..pipeline.console import emit, json_text, warn
    from ..pipeline.reports.html_page import page_text
    from ..pipeline.reports.markdown import report_text, short_text
    from ..pipeline.reports.model_card import card_text
    from ..pipeline.reports.report_data import report_json

    if job.target is None:
        warn(plan.warnings)
    try:
        imatrix = job.imatrix
        search = job.search()
        quantized = job.quantize()
        if job.target is not None:
            warn(quantized.warnings)
        plan = job.repack(quantized)
        verification = job.verify(quantized, plan)
        validation = job.validate(plan)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(job.to_go_on) from None
    found = report_json(job, plan, imatrix, validation, verification, quantized, search)
    texts = (json_text(found, 1) + "\n", report_text(found), page_text(found), card_text(found))
    for path, text in zip(job.folder.reports, texts, strict=True):
        write_text(path, text)
    emit(found, as_json, lambda: short_text(found))
    if found["failures"]:
        raise MillError("; ".join(found["failures"]))
