"""`ggufmill run`: every stage that a recipe names, ending in a report."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckFailed
from ..jobs.atomic_write import write_text
from ..jobs.plan import Plan
from ..quantize.recipes.recipe import load_recipe
from ..recipes import find
from .common.arguments import refuse_unused
from .common.messages import json_text, note, warn
from .common.progress import OnProgress, reporting
from .reports.html_page import page_text
from .reports.markdown import report_text
from .reports.model_card import card_text
from .reports.report_data import report_json
from .stages.folder import RunFolder
from .stages.run import Run
from .writing.forecast import Forecast, forecast


@dataclass
class RunResult:
    """What a run made, or with dry_run would make.

    folder    where the results are
    plan      of the final model; of a recipe with a target that is not searched for yet, with the smallest types allowed
    forecast  disk space that the run takes; only with dry_run
    report    all figures, as in report.json; {} with dry_run
    reports   report.json, report.md, report.html and the draft of a model card, README.md
    target    what types are searched for, in words; None for a recipe without a target
    found     whether the search for the target is finished
    """

    folder: Path
    plan: Plan
    forecast: Forecast | None
    report: dict[str, Any]
    reports: tuple[Path, ...]
    target: str | None = None
    found: bool = True

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the report; with dry_run the plan and what it takes, and of a recipe with a target `search`."""
        if self.forecast is None:
            return self.report
        search = {"search": {"target": self.target, "found": self.found}} if self.target is not None else {}
        return self.plan.as_json() | self.forecast.as_json() | search


def run_recipe(
    recipe: str | Path,
    out: str | Path | None = None,
    *,
    force: bool = False,
    allow_nonfinite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    cluster: str | None = None,
    cluster_output: str | None = None,
    progress: OnProgress | bool | None = None,
) -> RunResult:
    """Runs every stage that a TOML recipe names: imatrix, search, quantize, repack, validate; ends in a report.

    Files, types, exact sizes and disk space are checked first. An interrupted run is continued by the same call; a stage whose
    inputs have not changed is not repeated. One run at a time works in a folder.

    recipe           a file, or the name of a shipped recipe; paths in it are relative to its folder
    out              folder of results; None: out/RECIPE
    force            every stage is done again, and what is in the folder is replaced
    allow_nonfinite  weights that are NaN or infinite are written as 0
    dry_run          nothing is written; the result has the plan and what it takes
    threads          workers; None: one per processor
    cluster          workers of a cluster compute the imatrix (without covariances) and quantise; cluster_output: as of
                     `quantize_model`
    progress         stages 'imatrix' and 'validate' in windows, 'quantize', 'repack', 'verify' and 'checksum' in bytes, and
                     those of `search_recipe`

    Returns a `RunResult`. Raises PlanError for what stands in the way before any work, MillError for what fails on the way,
    CheckFailed when the result exceeds limits that the recipe sets.

    Example:
        >>> from ggufmill import run_recipe
        >>> result = run_recipe("demo", "demo-out", dry_run=True)
        >>> result.plan.histogram()["q8_0"][0] > 0, result.folder.exists()
        (True, False)
    """
    if cluster is None:
        refuse_unused({"--cluster-output": cluster_output}, "--cluster")
    path = find(recipe)
    loaded = load_recipe(path)
    folder = RunFolder(Path(out) if out is not None else Path("out") / path.stem, path.stem)
    with nullcontext() if dry_run else folder.locked(), reporting(progress) as report:
        settings: dict[str, Any] = {"threads": threads, "cluster": cluster, "cluster_output": cluster_output}
        run = Run(loaded, path, folder, fresh=force, allow_nonfinite=allow_nonfinite, report=report, **settings)
        for text in run.source.notes:
            note(f"note: {text}", detail=True)
        plan = run.check()
        return _forecast(run, plan) if dry_run else _carry_out(run, plan)


def _forecast(run: Run, plan: Plan) -> RunResult:
    takes = forecast(plan, run.disk_needed)
    if run.target is None:
        warn(plan.warnings, detail=True)
        return RunResult(run.folder.path, plan, takes, {}, ())
    found = run.has_rules
    if not found:
        note(f"note: types for {run.target.text} have to be searched for; these are the smallest allowed")
    warn(plan.warnings, detail=True)
    return RunResult(run.folder.path, plan, takes, {}, (), run.target.text, found)


def _carry_out(run: Run, plan: Plan) -> RunResult:
    """All stages and the reports. Raises CheckFailed when the result exceeds the recipe's limits."""
    if run.target is None:
        warn(plan.warnings)
    try:
        imatrix = run.imatrix
        search = run.search()
        quantized = run.quantize()
        if run.target is not None:
            warn(quantized.warnings)
        plan = run.repack(quantized)
        verification = run.verify(quantized, plan)
        validation = run.validate(plan)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(run.how_to_continue) from None
    data = report_json(run, plan, imatrix, validation, verification, quantized, search)
    texts = (json_text(data, 1) + "\n", report_text(data), page_text(data), card_text(data))
    for path, text in zip(run.folder.reports, texts, strict=True):
        write_text(path, text)
    target = run.target.text if run.target is not None else None
    result = RunResult(run.folder.path, plan, None, data, run.folder.reports, target)
    if data["failures"]:
        raise CheckFailed("; ".join(data["failures"]), result)
    return result
