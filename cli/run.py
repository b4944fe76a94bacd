from __future__ import annotations

from pathlib import Path

import click

from . import flags


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
    """Run every stage that the TOML file RECIPE names: imatrix, quantise, repack, validate; ends in a report.

    The folder then holds, beside the model: report.html (one page with plots, nothing outside of it is loaded), report.md,
    report.json, and README.md, the draft of a model card.

    Checked first: files, types, exact sizes, disk space. An interrupted run goes on where it was when the same
    command is given again; a stage whose inputs have not changed is not repeated.

    \b
    Examples:
      ggufmill run demo
      ggufmill run my-model.toml -o results --dry-run
    """
    import json

    from ..formats import MillError, PlanError
    from ..quantize.recipe import load_recipe
    from ..recipes import find
    from .card import card_text
    from .findings import report_json
    from .page import page_text
    from .pipeline import Folder, Run
    from .report import report_text, short_text
    from .writing import show_plan

    path = find(recipe)
    loaded = load_recipe(path)
    if {"target_size", "target_bpw"} & set(loaded.stages.get("quantize", {})):
        raise PlanError(f"{recipe}: a run needs rules: find them with `ggufmill search`, or use `ggufmill quantize --recipe`")
    stem = path.stem
    folder = Folder(out or Path("out") / stem, stem)
    job = Run(loaded, path, folder, threads=threads, fresh=force, allow_nonfinite=allow_nonfinite)
    for note in job.source.notes:
        click.echo(f"note: {note}", err=True)
    plan = job.check()
    if dry_run:
        show_plan(plan, as_json)
        return
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    try:
        imatrix = job.imatrix
        quantized = job.quantize()
        plan = job.repack(quantized)
        verification = job.verify(quantized, plan)
        validation = job.validate(plan)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(job.to_go_on) from None
    found = report_json(job, plan, imatrix, validation, verification, quantized)
    texts = (json.dumps(found, indent=1) + "\n", report_text(found), page_text(found), card_text(found))
    for path, text in zip(folder.reports, texts, strict=True):
        path.write_text(text, "utf-8")
    click.echo(json.dumps(found) if as_json else short_text(found))
    failures = job.judge(validation)
    if failures:
        raise MillError("; ".join(failures))
