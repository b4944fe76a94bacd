"""One file of a run: its types are searched for or given, it is quantised, repacked and verified."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...convert.outtype import recipe_types
from ...formats import MillError, PlanError, TensorType, open_gguf
from ...jobs.atomic_write import write_text
from ...jobs.code_digest import code_digest
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ...jobs.preflight import preflight
from ...quantize.covariance.source import Covariances
from ...quantize.gguf_source import gguf_source
from ...quantize.importance import Importance, PendingImportance
from ...quantize.planning import check_loads, plan_quantize
from ...quantize.recipes.recipe import Recipe, load_recipe
from ...quantize.verify import TensorCheck, Verification
from ...repack.job import plan_repack
from ...version import __version__
from ..cluster.measuring import SearchWorkers
from ..common.arguments import refuse_inputs
from ..common.covariance import covariance_of_recipe, effort_of_recipe, load_covariances
from ..common.programs import program_of
from ..recipe_search.options import search_options_of, target_of
from ..recipe_search.result import name_recipe_in_warnings
from ..recipe_search.search_job import SearchJob
from ..writing.checks import problem_line, verify_written
from ..writing.write_model import count_replaced
from .cache import key_of
from .files import measuring_on, quantize_call, write_files
from .repack import check_repack

if TYPE_CHECKING:
    from .run import Run


class Quant:
    """What a run makes by one of its recipe's [quantize] tables, in a folder with names of its own."""

    def __init__(self, run: Run, recipe: Recipe):
        self.run, self.recipe, self.source = run, recipe, run.source
        self.folder = replace(run.folder, stem=f"{run.folder.stem}-{recipe.label}") if recipe.label else run.folder
        self.with_imatrix = "imatrix" in recipe.stages
        self.collected = run.collected if self.with_imatrix else None
        self.covariance = self.collected or covariance_of_recipe(recipe, run.path.parent)
        self.target = target_of(recipe)
        self.program = program_of(recipe, run.program)
        self.search_options = search_options_of(recipe, run.path.parent, threads=run.threads, program=self.program)
        # At most, known after `check`: bytes of the quantised model, of the one with interleaved rows beside it, of all files
        # of this quant, and those still to be written.
        self.file_bytes, self.repacked_bytes, self.disk_bytes, self.disk_needed = 0, 0, 0, 0

    def stage_name(self, stage: str) -> str:
        """What a stage is called in the cache: with the quant's name where there are several."""
        return f"{stage} {self.recipe.label}".rstrip()

    def _importance(self) -> Importance | None:
        return self.run.importance() if self.with_imatrix else None

    @property
    def _imatrix_key(self) -> str:
        return self.run.imatrix_key if self.with_imatrix else ""

    # -- search

    def _search_job(self, importance: Importance | None, state: Path | None, workers: SearchWorkers | None = None) -> SearchJob:
        planning = {"split_max_size": self.recipe.split_max_size, "allow_requantize": False, "ignore_imatrix_rules": False}
        return SearchJob(
            self.source,
            importance,
            self.search_options,
            covariances=self._covariances(importance),
            fixed=self.recipe.rules,
            fixed_text=self.recipe.rules_text,
            state=state,
            planning=planning,
            workers=workers,
            report=self.run.report,
        )

    @property
    def _search_key(self) -> str:
        options, text = self.search_options, self.run.texts.get("search")
        types = ",".join(type.name for type in options.types)
        measuring = (options.rows, options.seed, options.measurements, options.refine, text and text.digest, options.n_ctx)
        made_from = (code_digest(), self.source.identity, self.run.reading_text, self._imatrix_key, self.recipe.split_max_size)
        made_from += (*self._covariance_key, self.program)
        return key_of(*made_from, self.target, self.recipe.rules_text, types, options.repacked, options.chunks, *measuring)

    @cached_property
    def _covariance_key(self) -> tuple[object, ...]:
        """What of the covariances decides a search: their effort, and the data of a file that is given."""
        if self.covariance is None or self.collected is not None:  # what is collected is part of the imatrix' key
            return (effort_of_recipe(self.recipe),) if self.covariance is not None else ()
        covariances = load_covariances(self.covariance, self.source, effort_of_recipe(self.recipe))
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
            with measuring_on(self, self.run.cluster, importance) as workers:
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

    def _covariances(self, importance: Importance | None) -> Covariances | None:
        path, effort = self.covariance, effort_of_recipe(self.recipe)
        if path is None:
            return None
        if self.collected is not None and isinstance(importance, PendingImportance):
            return self.run.expected_covariances(path, effort)
        return load_covariances(path, self.source, effort)

    def _plan(self, importance: Importance | None, replaced: list[tuple[str, int]] | None, split_max_size: int | None) -> Plan:
        recipe = self.final_recipe
        default, rules = recipe_types(self.source, recipe)
        plan = plan_quantize(
            self.source,
            self.folder.gguf,
            type=default,
            rules=rules,
            recipe_text=recipe.text,
            allow_requantize="outtype" in recipe.stages.get("convert", {}),
            importance=importance,
            program=self.program,
            covariances=self._covariances(importance),
            split_max_size=split_max_size,
            nonfinite_counts=replaced,
            version=__version__,
        )
        if self.target is not None:
            name_recipe_in_warnings(plan)
        return plan

    def check(self) -> tuple[Plan, set[TensorType]]:
        """What can be checked before any work. Returns the plan, exact but for the importance data, and the types that tensors
        may get; of a recipe with a target whose search is not finished, the plan with the smallest types allowed."""
        run, importance = self.run, self.run.expected_importance() if self.with_imatrix else None
        if self.target is not None:
            refuse_inputs([self.folder.recipe, self.measurements], run.inputs)
        # Else a file that is there belongs to somebody who never ran this recipe here.
        ours = run.fresh or run.cache.was_begun(self.stage_name("quantize"))
        if self.has_rules:
            plan = self._plan(importance, None, self.recipe.split_max_size)
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
        if "repack" in self.recipe.stages:  # which makes one file of a split
            whole = len(plan.files) == 1 or not self.has_rules
            self.repacked_bytes = disk if whole else self._plan(importance, None, None).file_bytes
        self.disk_bytes = self.file_bytes + self.repacked_bytes
        self.disk_needed = self.disk_bytes - self._bytes_there(plan)
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=run.inputs, needed=0)
        if "repack" in self.recipe.stages:
            refuse_inputs([self.folder.repacked], run.inputs)
            check_repack(self.recipe, types, self.program)
        return plan, {tensor_type for several in types.values() for tensor_type in several}

    def _bytes_there(self, plan: Plan) -> int:
        """Bytes of finished files of this size, which as a rule stay."""
        if self.run.fresh or not self.has_rules:
            return 0
        sizes = [(f.path, f.nbytes) for f in plan.files]
        sizes += [(self.folder.repacked, self.repacked_bytes)] * ("repack" in self.recipe.stages)
        return sum(nbytes for path, nbytes in sizes if path.is_file() and path.stat().st_size == nbytes)

    def quantize(self) -> Plan:
        """Writes the quantised model, and returns its plan."""
        run = self.run
        replaced: list[tuple[str, int]] | None = [] if run.allow_nonfinite else None
        plan = self._plan(self._importance(), replaced, self.recipe.split_max_size)

        def work() -> dict[str, Any]:
            call = quantize_call(self, run.cluster, run.cluster_output) if run.cluster is not None else None
            result, elsewhere = write_files(self, plan, "quantize", run.inputs, call)
            count_replaced([*(replaced or ()), *elsewhere])
            return {"resumed": result.resumed}

        run.cache.stage(self.stage_name("quantize"), plan.fingerprint, [f.path for f in plan.files], work)
        return plan

    # -- repack

    def repack(self, quantized: Plan) -> Plan:
        """The plan of the file with interleaved rows beside the quantised one; without [repack] the one that is given."""
        if "repack" not in self.recipe.stages:
            return quantized
        pattern = self.recipe.stages["repack"].get("pattern")
        opened = open_gguf(quantized.files[0].path)
        plan = plan_repack(opened, self.folder.repacked, pattern=pattern)
        check_loads(plan, self.program)
        key = key_of(code_digest(), quantized.fingerprint, pattern)
        self.run.cache.stage(
            self.stage_name("repack"),
            key,
            [f.path for f in plan.files],
            lambda: {"resumed": write_files(self, plan, "repack", opened.paths)[0].resumed},
        )
        return plan

    # -- verify

    def verify(self, quantized: Plan, final: Plan) -> Verification:
        """Samples of what was written against what it was made from (quantize/verify.py). Raises MillError for a difference."""
        report = self.run.report

        def work() -> dict[str, Any]:
            checks = verify_written(quantized, self.source, report).tensors
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
