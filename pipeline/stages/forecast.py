"""What the stages of a run take that are not finished yet, said without doing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

from ...formats import TensorSource
from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...quantize.covariance.timing import predict_seconds_with
from ...quantize.gguf_source import planned_source
from ...quantize.importance import AssumedImportance
from ...quantize.search.row_sample import RUN_ROWS
from ...quantize.timing import COPY_SPEED, predict_seconds
from ...runtime import Model, load_model
from ...runtime.timing import generation_seconds
from ..collecting.collection import collection_of
from ..collecting.forecast import forecast_collection
from ..common.forecast import Forecast
from ..common.progress import OnProgress
from ..common.reading import most_together, reading_forecast, reading_memory, reading_seconds
from ..recipe_search.forecast import search_forecast
from ..recipe_search.result import SearchResult
from ..recipe_search.search_job import SearchJob
from ..writing.forecast import forecast, hashing_seconds, verifying_seconds
from .imatrix import windows_of
from .quant import Quant
from .run import Run
from .validation import FLOOR_WINDOWS, Validation


class StageForecasts:
    """What a run takes, on this machine alone; its plans are those of `Run.check`.

    A recipe with a size as target is searched for by errors of a few rows of each tensor: what is found has the types of the
    file, or others that take as long. One with a divergence, which errors do not tell, keeps its plan with the smallest types.
    """

    def __init__(self, run: Run, plans: Sequence[Plan], report: OnProgress = lambda progress: None):
        self.run, self._report = run, report
        self.threads = run.request.threads or available_cpus()
        self.checked = plans

    @cached_property
    def tried(self) -> list[tuple[SearchJob, SearchResult] | None]:
        """Of each file, the search by errors of a few rows, and what it finds; None: none is made."""
        return [self._search_of(quant) for quant in self.run.quants]

    def _search_of(self, quant: Quant) -> tuple[SearchJob, SearchResult] | None:
        if quant.has_rules or quant.target is None or quant.target.divergence is not None:
            return None
        job = quant.with_data(quant.job, AssumedImportance({}) if quant.with_imatrix else None)
        job.covariances = None
        options = replace(quant.search_options, rows=RUN_ROWS, text=None, refine=0)
        search = SearchJob(job, options, report=self._report)
        return search, search.find(quant.target)

    @cached_property
    def plans(self) -> list[Plan]:
        """Of each file, with the types that it has or is likely to get."""
        found = zip(self.checked, self.tried, strict=True)
        return [plan if tried is None else tried[1].plan for plan, tried in found]

    @cached_property
    def running(self) -> Model:
        """What runs in place of the source."""
        return load_model(self._running_source, threads=self.threads)

    @cached_property
    def _running_source(self) -> TensorSource:
        copy = self.run.working
        return self.run.source if copy is None else planned_source(self.run.source, copy.plan)

    @cached_property
    def stages(self) -> dict[str, Forecast]:
        """Of each stage with something to do, without disk space."""
        run, stages = self.run, dict[str, Forecast]()
        if run.working is not None and run.working.disk_needed:
            stages["working copy"] = forecast(run.working.plan, run.source, timing=predict_seconds, threads=self.threads)
        if "imatrix" in run.texts and not run.has_imatrix:
            asked = collection_of(run.collecting, self.running, windows_of(self.running, run.texts["imatrix"]))
            parts = asked.windows, asked.path, asked.options, asked.moments
            stages["imatrix"] = forecast_collection(self.running, *parts).forecast
        for quant, plan in zip(run.quants, self.plans, strict=True):
            stages |= self._of_file(quant, plan)
        if run.validation is not None:
            stages["validate"] = self._validation(run.validation)
        checksums = sum(plan.file_bytes for plan in self.plans) * hashing_seconds()
        stages["checksums"] = Forecast.of_one_thread("sha256", checksums, self.threads)
        return stages

    def _of_file(self, quant: Quant, plan: Plan) -> dict[str, Forecast]:
        stages, timing, threads = dict[str, Forecast](), predict_seconds, self.threads
        job = quant.with_data(quant.job, AssumedImportance({}) if quant.with_imatrix else None)
        if job.covariances is not None:
            timing = partial(predict_seconds_with, job.covariances, self.run.source)
        if not quant.has_rules:
            search = SearchJob(job, quant.search_options, state=quant.measurements, running=lambda: self._running_source)
            stages["search"] = search_forecast(search, quant.folder.path).forecast
        if quant.disk_needed or not quant.has_rules:
            stages["quantize"] = forecast(plan, self.run.source, timing=timing, threads=threads)
            parts = stages["quantize"].seconds or {}
            if (sequential := quant.sequential(job)) is not None:
                stages["quantize"] = sequential.added_to(stages["quantize"], plan)
            if quant.repacking is not None:
                stages["repack"] = Forecast(0, None, {"repack": plan.file_bytes / COPY_SPEED}, threads=threads)
            verifying = verifying_seconds(plan, parts, threads)
            if quant.repacking is not None:  # what is interleaved is compared, too
                verifying += verifying_seconds(plan, {}, threads)
            stages["verify"] = Forecast.of_one_thread("verify", verifying, threads)
        return {quant.stage_name(stage): each for stage, each in stages.items()}

    def _validation(self, validation: Validation) -> Forecast:
        """The baseline reads the text once for all files, and its first windows twice more for the noise floor; layers of each
        are compared with its own on a window, and each answers the prompts."""
        windows, n_ctx = validation.windows, validation.text.n_ctx
        against = self._running_source if self.run.working is not None else validation.baseline_source()
        baseline = load_model(against, threads=self.threads)
        results = [load_model(planned_source(self.run.source, plan), threads=self.threads) for plan in self.plans]
        tokens, first = windows * n_ctx, min(windows, FLOOR_WINDOWS) * n_ctx
        every = [baseline, *results]
        reading = reading_seconds(baseline, tokens, n_ctx, is_scored=False)
        reading += sum(reading_seconds(result, tokens, n_ctx, baseline) for result in results)
        floor = reading_seconds(baseline, first, n_ctx, is_scored=False) + reading_seconds(baseline, first, n_ctx, baseline)
        layers = sum(
            reading_seconds(model, n_ctx, n_ctx, is_scored=False) for result in results for model in (baseline, result)
        )
        texts = len(validation.prompts) * sum(generation_seconds(model, validation.asked.n_predict) for model in every)
        seconds = {"reading": reading, "noise floor": floor, "layers": layers, "texts": texts / self.threads}
        if validation.stock:
            seconds["stock mixes"] = reading * (1 + len(validation.stock)) / len(every)
        together = most_together([baseline, *results], n_ctx, windows, baseline)
        memory = reading_memory([baseline, *results], n_ctx, together, baseline)
        return reading_forecast(seconds, memory, every, self.run.folder.path)
