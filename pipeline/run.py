"""`ggufmill run`: every stage that a recipe names, ending in a report."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import field
from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..errors import CheckFailed
from ..jobs.atomic_write import write_text
from ..jobs.plan import Plan
from ..quantize.recipes.recipe import load_recipe
from ..quantize.verify import Verification
from ..recipes import find
from .common.arguments import refuse_unused
from .common.dropped_config import warn_on_dropped_config
from .common.forecast import Forecast, free_space
from .common.messages import json_text, note, warn
from .common.progress import OnProgress, reporting
from .common.shown import shown
from .common.vocabulary_check import vocabulary_differences
from .reports.html_page import page_text
from .reports.markdown import report_text
from .reports.model_card import card_text, multi_card
from .reports.multi_output import multi_json, multi_page, multi_text
from .reports.report_data import report_json
from .requests.run import RunRequest
from .requests.verb import verb
from .stages.folder import RunFolder
from .stages.forecast import StageForecasts
from .stages.quant import Quant
from .stages.run import Run


@dataclass
class QuantForecast:
    """What a dry run knows of one file.

    label       what its name ends in, where there are several; else ''
    plan        of the quantised model; of a recipe with a target that is not searched for yet, with the smallest types allowed
    target      what types are searched for, in words; None without a target
    found       whether the search for the target is finished
    most_bytes  that the file takes: what the plan says, or before the search what the target allows at most
    repacked    name and bytes of the file with interleaved rows that is made of it; None: none is
    """

    label: str
    plan: Plan
    target: str | None
    found: bool
    most_bytes: int
    repacked: tuple[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """The plan, `label` where there are several, `repacked` with [repack], and with a target `search`."""
        search: dict[str, Any] = {"target": self.target, "found": self.found, "most_bytes": self.most_bytes}
        named: dict[str, Any] = {"label": self.label} if self.label else {}
        if self.repacked is not None:
            named["repacked"] = {"name": self.repacked[0], "nbytes": self.repacked[1]}
        return named | self.plan.as_json() | ({"search": search} if self.target is not None else {})


@shown
@dataclass
class RunResult:
    """What a run made, or with dry_run would make.

    folder    where the results are
    quants    with dry_run: what is known of each file; else []
    forecast  disk space, memory and time that the run takes; stages: memory and time of each; only with dry_run
    report    all figures, as in report.json; {} with dry_run
    reports   report.json, report.md, report.html and the draft of a model card, README.md
    """

    folder: Path
    quants: list[QuantForecast] = field(default_factory=list)
    forecast: Forecast | None = None
    stages: dict[str, Forecast] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    reports: tuple[Path, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the report; with dry_run the plan and what it takes, of several files a list `quants` of plans,
        and of a recipe with a target `search`."""
        if self.forecast is None:
            return self.report
        plans = [quant.as_json() for quant in self.quants]
        return (plans[0] if not self.quants[0].label else {"quants": plans}) | self.forecast.as_json()


@verb(RunRequest)
def run_recipe(request: RunRequest) -> RunResult:
    """Runs every stage that a TOML recipe names: imatrix, search, quantize, repack, validate; ends in a report.

    A recipe of several types or tables [[quantize]] makes a file of each, with one imatrix and one report, and a model card for
    all. SHA256SUMS has the checksums of the files.

    Files, types, exact sizes and disk space are checked first. An interrupted run is continued by the same call; a stage whose
    inputs have not changed is not repeated. One run at a time works in a folder.

    Returns a `RunResult`. Raises PlanError before any work if something prevents it, MillError for what fails on the way,
    CheckFailed when the result exceeds limits that the recipe sets.

    Example:
        >>> from ggufmill import run_recipe
        >>> result = run_recipe("demo", "demo-out", dry_run=True)
        >>> result.quants[0].plan.histogram()["q8_0"][0] > 0, result.folder.exists()
        (True, False)
    """
    if request.cluster is None:
        refuse_unused(request, "--cluster", "cluster_output")
    folder = _folder_of(request)
    with nullcontext() if request.dry_run else folder.locked(), reporting(request.progress) as report:
        run, plans = _checked(request, folder, report)
        return planned(run, StageForecasts(run, plans, report)) if request.dry_run else _carry_out(run, plans)


def forecasts_of(request: RunRequest, report: OnProgress) -> tuple[Run, StageForecasts]:
    """The run that a request asks for, of which nothing is done, and what it takes."""
    run, plans = _checked(request, _folder_of(request), report)
    return run, StageForecasts(run, plans, report)


def _folder_of(request: RunRequest) -> RunFolder:
    path = find(request.recipe)
    return RunFolder(Path(request.out) if request.out is not None else Path("out") / path.stem, path.stem)


def _checked(request: RunRequest, folder: RunFolder, report: OnProgress) -> tuple[Run, list[Plan]]:
    """The run, and its plans, after all checks that need no work."""
    path = find(request.recipe)
    run = Run(load_recipe(path, several=True), path, folder, request, report)
    warn_on_dropped_config(run.source)
    for text in [*run.source.notes, *vocabulary_differences(run.source)]:
        note(f"note: {text}", detail=True)
    return run, run.check()


def planned(run: Run, forecasts: StageForecasts) -> RunResult:
    """The result of a dry run."""
    quants = []
    for quant, plan in zip(run.quants, forecasts.checked, strict=True):
        target = quant.target.text if quant.target is not None else None
        repacked = (quant.folder.repacked.name, quant.repacked_bytes) if quant.repacked_bytes else None
        quants.append(QuantForecast(quant.recipe.label, plan, target, quant.has_rules, quant.file_bytes, repacked))
        if not quant.has_rules:
            note(f"note: types for {target} have to be searched for; the plan has the smallest allowed")
        warn(_labelled(quant, plan.warnings), detail=True)
    free = free_space(forecasts.checked[0].files[0].path.parent)
    takes = Forecast(run.disk_needed, free, disk_peak=run.disk_peak, threads=forecasts.threads)
    for stage, each in forecasts.stages.items():
        takes = takes.with_stage(stage, each)
    return RunResult(run.folder.path, quants, takes, forecasts.stages)


def _labelled(quant: Quant, texts: list[str]) -> list[str]:
    return [f"{quant.recipe.label}: {text}" if quant.recipe.label else text for text in texts]


def _carry_out(run: Run, plans: list[Plan]) -> RunResult:
    """All stages and the reports. Raises CheckFailed when a result exceeds the recipe's limits."""
    made: list[tuple[Quant, dict[str, Any] | None, Plan, Plan, Verification]] = []
    try:
        imatrix = run.imatrix if any(quant.with_imatrix for quant in run.quants) else None
        for quant, expected in zip(run.quants, plans, strict=True):
            if quant.target is None:
                warn(_labelled(quant, expected.warnings))
            search = quant.search()
            quantized = quant.quantize()
            if quant.target is not None:
                warn(_labelled(quant, quantized.warnings))
            plan = quant.repack(quantized)
            made.append((quant, search, quantized, plan, quant.verify(quantized, plan)))
        validations = run.validate([plan for _, _, _, plan, _ in made])
        stock = run.stock()
        checksums = run.checksums([plan for _, _, _, plan, _ in made])
    except KeyboardInterrupt:
        raise KeyboardInterrupt(run.how_to_continue) from None
    reports = [
        report_json(run, quant, plan, imatrix, validation, verification, quantized, search, stock)
        for (quant, search, quantized, plan, verification), validation in zip(made, validations, strict=True)
    ]
    write_text(run.folder.checksums, "".join(f"{digest}  {name}\n" for name, digest in checksums.items()))
    if run.recipe.several:
        data = multi_json(run, reports)
        texts = (multi_text(data), multi_page(data), multi_card(data))
    else:
        data = reports[0]
        texts = (report_text(data), page_text(data), card_text(data))
    for path, text in zip(run.folder.reports, (json_text(data, 1) + "\n", *texts), strict=True):
        write_text(path, text)
    run.cache.drop_unfinished()
    result = RunResult(run.folder.path, report=data, reports=run.folder.reports)
    if data["failures"]:
        raise CheckFailed("; ".join(data["failures"]), result)
    return result
