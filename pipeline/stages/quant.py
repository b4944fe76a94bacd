"""One file of a run: its types are searched for or given, it is quantised, repacked and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...formats import TYPES, MillError, PlanError, TensorSource, TensorType, open_gguf
from ...jobs.atomic_write import write_text
from ...jobs.code_digest import code_digest
from ...jobs.journal import journal_path
from ...jobs.patterns import NamePattern
from ...jobs.plan import Plan
from ...jobs.preflight import preflight
from ...quantize.covariance.source import Covariances
from ...quantize.gguf_source import gguf_source
from ...quantize.importance import Importance, PendingImportance
from ...quantize.planning import check_loads
from ...quantize.recipes.loader_types import LoaderTypes
from ...quantize.recipes.recipe import Recipe, load_recipe
from ...quantize.verify import TensorCheck, Verification
from ...repack.job import plan_repack
from ..cluster.call import ClusterCall, cluster_call
from ..cluster.measuring import SearchWorkers, search_workers
from ..collecting.collection import moments_path
from ..common.arguments import refuse_inputs
from ..common.covariance import load_covariances
from ..common.progress import OnProgress
from ..planning import Quantization, plan_of
from ..recipe_search.result import name_recipe_in_warnings
from ..recipe_search.search_job import SearchJob
from ..requests.groups import moments_of
from ..requests.imatrix import ImatrixRequest
from ..requests.quantize import QuantizeRequest
from ..requests.recipe import GivenRecipe, merged
from ..requests.rewriting import RepackRequest, repack_patterns
from ..requests.run import RunRequest
from ..writing.checks import problem_line, verify_written
from .cache import StageCache, key_of
from .folder import RunFolder
from .text import StageText
from .write import write_plan

if TYPE_CHECKING:
    from ..writing.sequential import SequentialEncoding


def check_repack(
    where: str, request: RepackRequest, types: Mapping[str, Sequence[TensorType]], program: str | None = None
) -> None:
    """Raises PlanError when no tensor, as one of the types that it may get, could be repacked, or when the program that is to
    load the file does not know interleaved types. types: by tensor name."""
    [pattern] = repack_patterns(request, f"{where} pattern") or [""]  # a recipe has one at most
    search = NamePattern(pattern).search
    if program is not None and not LoaderTypes(program).reads(TYPES["q8_0_r8"]):
        raise PlanError(f"{where} makes types with interleaved rows, which {program} does not know")
    if not any(search(name) and any(type.packed is not None for type in several) for name, several in types.items()):
        raise PlanError(f"{where}: no tensor of a type with an interleaved form has {pattern!r} in its name")


class QuantRun(Protocol):
    """What a quant uses of its run: `run.Run`."""

    request: RunRequest
    model: str | Path
    source: TensorSource
    path: Path
    folder: RunFolder
    cache: StageCache
    report: OnProgress
    reading_text: str | None
    working_kind: str | None
    texts: dict[str, StageText]
    collecting: ImatrixRequest

    @property
    def inputs(self) -> list[Path]: ...
    @property
    def how_to_continue(self) -> str: ...
    @cached_property
    def imatrix_path(self) -> Path | None: ...
    @cached_property
    def imatrix_key(self) -> str: ...
    def importance(self) -> Importance | None: ...
    def expected_importance(self) -> Importance | None: ...
    def expected_covariances(self, effort: int) -> Covariances: ...
    def forget_measurements(self, path: Path) -> None: ...
    def working_source(self) -> TensorSource: ...
    def compile_for_validation(self) -> None: ...


class Quant:
    """What a run makes by one of its recipe's [quantize] tables, with file names of its own: a request, and its stages."""

    def __init__(self, run: QuantRun, recipe: Recipe):
        self.run, self.recipe = run, recipe
        self.folder = replace(run.folder, stem=f"{run.folder.stem}-{recipe.label}") if recipe.label else run.folder
        self.with_imatrix = "imatrix" in recipe.stages
        self.collects = self.with_imatrix and moments_path(run.collecting) is not None
        asked = QuantizeRequest(
            run.model,
            self.folder.gguf,
            imatrix=run.imatrix_path if self.with_imatrix else None,
            covariance=run.collecting.covariance if self.collects else None,
            curvature=run.collecting.curvature if self.collects else None,
            program=run.request.program,
            allow_nonfinite=run.request.allow_nonfinite,
            cluster=run.request.cluster,
            cluster_output=run.request.cluster_output,
        )
        given = GivenRecipe(run.path, recipe, text=recipe.text, rules_text=recipe.rules_text)
        self.job = Quantization(asked, given=given)
        # Of the file with interleaved rows beside the quantised one, without [repack] none.
        self.repacking = merged(RepackRequest("", ""), given) if "repack" in recipe.stages else None
        self.program, self.target = self.job.request.program, self.job.target
        self.search_options = self.job.search_options(run.request.threads)
        # At most, known after `check`: bytes of the quantised model, of the one with interleaved rows beside it, of all files
        # of this quant, and those still to be written.
        self.file_bytes, self.repacked_bytes, self.disk_bytes, self.disk_needed = 0, 0, 0, 0
        self._planned: Plan | None = None  # by `check`, if it is final

    def stage_name(self, stage: str) -> str:
        """What a stage is called in the cache: with the quant's name where there are several."""
        return f"{stage} {self.recipe.label}".rstrip()

    def _importance(self) -> Importance | None:
        return self.run.importance() if self.with_imatrix else None

    @property
    def _imatrix_key(self) -> str:
        return self.run.imatrix_key if self.with_imatrix else ""

    def with_data(self, job: Quantization, importance: Importance | None) -> Quantization:
        """The job with these importance data, and with what is known of covariances where both have yet to be collected."""
        job.source, job.importance = self.run.source, importance
        job.__dict__.pop("covariances", None)
        if self.collects and isinstance(importance, PendingImportance):
            job.covariances = self.run.expected_covariances(job.effort)
        return job

    def _final(self, importance: Importance | None) -> Quantization:
        """The job by the recipe, or by the result of its search."""
        if self.target is None:
            return self.with_data(self.job, importance)
        asked = replace(self.job.request, recipe=self.folder.recipe, target_size=None, target_bpw=None, max_kld=None)
        return self.with_data(Quantization(asked), importance)

    # -- search

    def _search_job(self, importance: Importance | None, state: Path | None, workers: SearchWorkers | None = None) -> SearchJob:
        job = self.with_data(self.job, importance)
        running = self.run.working_source
        return SearchJob(job, self.search_options, state=state, workers=workers, report=self.run.report, running=running)

    @property
    def _search_key(self) -> str:
        options, text = self.search_options, self.run.texts.get("search")
        types = ",".join(type.name for type in options.types)
        measuring = (options.rows, options.seed, options.measurements, options.refine, text and text.digest, options.n_ctx)
        source, split = self.run.source, self.recipe.split_max_size
        made_from = (code_digest(), source.identity, self.run.reading_text, self._imatrix_key, split)
        made_from += (*self._covariance_key, self.program, self.run.working_kind)
        return key_of(*made_from, self.target, self.recipe.rules_text, types, options.repacked, options.chunks, *measuring)

    @cached_property
    def _covariance_key(self) -> tuple[object, ...]:
        """What of the covariances decides a search: their effort, and the data of a file that is given."""
        path, effort, curvature = moments_of(self.job.request), self.job.effort, self.job.request.curvature is not None
        if path is None or self.collects:  # what is collected is part of the imatrix' key
            return (effort,) if path is not None else ()
        covariances = load_covariances(Path(path), self.run.source, effort, curvature=curvature)
        return covariances.identity, covariances.effort

    @property
    def has_rules(self) -> bool:
        """Whether the rules are known: they are in the recipe, or the search is finished."""
        done = self.run.cache.has
        return self.target is None or done(self.stage_name("search"), self._search_key, [self.folder.recipe])

    @property
    def measurements(self) -> Path:
        """What searches have measured: one file for all that weigh errors alike."""
        return self.run.folder.measurements if self.with_imatrix else self.folder.measurements

    def search(self) -> dict[str, Any] | None:
        """Finds the rules of a recipe with a target, and writes them to a file; None for a recipe without one."""
        if self.target is None:
            return None
        target, importance = self.target, self._importance()

        def work() -> dict[str, Any]:
            self.run.forget_measurements(self.measurements)
            job = self.with_data(self.job, importance)
            with search_workers(self.run.request.cluster, job, self.search_options) as workers:
                result = self._search_job(importance, self.measurements, workers).find(target)
            write_text(self.folder.recipe, result.text)
            text = self.search_options.text.name if self.search_options.text is not None else None
            asked = {"size": target.size, "bits": target.bits, "divergence": target.divergence}
            about = {
                "target": target.text,
                "asked": asked,
                "tensors": len(result.types),
                "text": text,
                "imatrix": importance is not None,
                "errors_weighted_by": result.weighting.as_json(),
            }
            return about | result.figures()

        return self.run.cache.stage(self.stage_name("search"), self._search_key, [self.folder.recipe], work)

    @property
    def final_recipe(self) -> Recipe:
        """What the file is quantised by: the recipe, or the result of its search."""
        return load_recipe(self.folder.recipe) if self.target is not None else self.recipe

    # -- quantize

    def _plan(self, importance: Importance | None, **changed: Any) -> Plan:
        plan = self._final(importance).plan(**changed)
        if self.target is not None:
            name_recipe_in_warnings(plan)
        return plan

    def check(self) -> tuple[Plan, set[TensorType]]:
        """What can be checked before any work. Returns the plan, exact but for the importance data, and the types that tensors
        may get; of a recipe with a target whose search is not finished, the plan with the smallest types allowed."""
        run, importance = self.run, self.run.expected_importance() if self.with_imatrix else None
        self.sequential(self.job)  # raises for what it lacks: torch, text for a window, windows to tune on
        if self.target is not None:
            refuse_inputs([self.folder.recipe, self.measurements], run.inputs)
        # Else a file that is there belongs to somebody who never ran this recipe here.
        ours = run.request.force or run.cache.was_begun(self.stage_name("quantize"))
        if self.has_rules:
            plan = self._plan(importance)
            self._planned = None if isinstance(importance, PendingImportance) else plan
            types = {o.name: [o.type] for o in plan.outputs}
            disk = plan.file_bytes
        else:
            assert self.target is not None
            if self.folder.recipe.exists() and not (ours or run.cache.was_begun(self.stage_name("search"))):
                raise PlanError(f"{self.folder.recipe} exists; use --force to replace it")
            search = self._search_job(importance, None)
            plan, disk = search.smallest_plan(self.target, self.folder.gguf), search.largest_file(self.target)
            types = {o.name: [o.type] for o in plan.outputs} | search.candidates
        self.file_bytes = disk
        if self.repacking is not None:  # which makes one file of a split
            whole = len(plan.files) == 1 or not self.has_rules
            self.repacked_bytes = disk if whole else self._plan(importance, split_max_size=None).file_bytes
        self.disk_bytes = self.file_bytes + self.repacked_bytes
        self.disk_needed = self.disk_bytes - self._bytes_there(plan)
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=run.inputs, needed=0)
        if self.repacking is not None:
            refuse_inputs([self.folder.repacked], run.inputs)
            check_repack(f"{self.recipe.name}, [repack]", self.repacking, types, self.program)
        return plan, {tensor_type for several in types.values() for tensor_type in several}

    def _bytes_there(self, plan: Plan) -> int:
        """Bytes of finished files of this size, which as a rule stay."""
        if self.run.request.force or not self.has_rules:
            return 0
        sizes = [(f.path, f.nbytes) for f in plan.files]
        sizes += [(self.folder.repacked, self.repacked_bytes)] * (self.repacking is not None)
        return sum(nbytes for path, nbytes in sizes if path.is_file() and path.stat().st_size == nbytes)

    def quantize(self) -> Plan:
        """Writes the quantised model, and returns its plan."""
        run, plan = self.run, self._planned or self._plan(self._importance())

        def work() -> dict[str, Any]:
            call = self._cluster_call() if run.request.cluster is not None else None
            sequential = self.sequential(self._final(self._importance()))
            run.compile_for_validation()
            return {"resumed": self._write(plan, "quantize", run.source, run.inputs, call, sequential)}

        run.cache.stage(self.stage_name("quantize"), plan.fingerprint, [f.path for f in plan.files], work)
        return plan

    def sequential(self, job: Quantization) -> SequentialEncoding | None:
        """What encodes the matrices of a job in the order of the model, if it asks for that."""
        if job.request.sequential is None:
            return None
        from ..writing.sequential import sequential_encoding

        return sequential_encoding(replace(job.request, threads=self.run.request.threads), self.run.source, job.device)

    def _cluster_call(self) -> ClusterCall | None:
        """The call by which workers make the plan: with a file of the recipe of this quant alone."""
        path = self.folder.recipe if self.target is not None else self.run.path
        if self.recipe.label and self.target is None:
            path = self.folder.path / f"{self.folder.stem}.toml"
            write_text(path, self.recipe.text)
        request = replace(
            self._final(None).request, recipe=path, effort=self.job.effort if moments_of(self.job.request) else None
        )
        return cluster_call(plan_of, request)

    def _write(
        self,
        plan: Plan,
        label: str,
        source: TensorSource,
        inputs: Sequence[Path],
        call: ClusterCall | None = None,
        sequential: SequentialEncoding | None = None,
    ) -> int:
        """As `write_plan`. What was measured of the file before counts no more."""
        for stage in ("verify", "checksums"):
            self.run.cache.forget(self.stage_name(stage))
        run = self.run
        return write_plan(plan, label, source, inputs, run.request, run.report, run.how_to_continue, call, sequential)

    # -- repack

    def repack(self, quantized: Plan) -> Plan:
        """The plan of the file with interleaved rows beside the quantised one; without [repack] the one that is given."""
        if self.repacking is None:
            return quantized
        pattern = repack_patterns(self.repacking, "[repack] pattern") or None
        opened = open_gguf(quantized.files[0].path)
        plan = plan_repack(opened, self.folder.repacked, pattern=pattern)
        check_loads(plan, self.program)
        key = key_of(code_digest(), quantized.fingerprint, pattern)
        self.run.cache.stage(
            self.stage_name("repack"),
            key,
            [f.path for f in plan.files],
            lambda: {"resumed": self._write(plan, "repack", gguf_source(opened), opened.paths)},
        )
        return plan

    # -- verify

    def verify(self, quantized: Plan, final: Plan) -> Verification:
        """Samples of what was written against what it was made from (quantize/verify.py). Raises MillError for a difference."""
        report = self.run.report

        def work() -> dict[str, Any]:
            checks = verify_written(quantized, self.run.source, report).tensors
            if final is not quantized:
                repacked_from = gguf_source(quantized.files[0].path)
                checks = [*checks, *verify_written(final, repacked_from, report).tensors]
            problem = problem_line(Verification(checks), quantized.files[0].path)
            if problem:
                raise MillError(problem)
            return {"tensors": [asdict(t) for t in checks[: len(quantized.outputs)]]}

        key = key_of(code_digest(), quantized.fingerprint, final.fingerprint)
        result = self.run.cache.stage(self.stage_name("verify"), key, [], work)
        return Verification([TensorCheck(**t) for t in result["tensors"]])
