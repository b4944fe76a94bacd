"""The stages of `run`: each leaves a file and a key of all that decided it, and is not done again while both hold."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import __version__
from ...convert import open_source
from ...convert.outtype import recipe_types
from ...formats import MillError, PlanError, TensorType, open_gguf
from ...imatrix.entries import Imatrix, load
from ...jobs.atomic_write import write_text
from ...jobs.code_digest import code_digest
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ...jobs.preflight import preflight
from ...quantize.covariance.source import Covariances
from ...quantize.gguf_source import gguf_source
from ...quantize.importance import Importance, PendingImportance
from ...quantize.planning import plan_quantize
from ...quantize.recipes.recipe import Recipe, load_recipe
from ...quantize.verify import TensorCheck, Verification
from ...repack.job import plan_repack
from ...runtime import Model, load_model
from ..common.adapters import adapters_of_recipe
from ..common.arguments import refuse_inputs
from ..common.covariance import covariance_of_recipe, effort_of_recipe, load_covariances
from ..common.messages import gib
from ..common.progress import OnProgress
from ..recipe_search.options import search_options_of, target_of
from ..recipe_search.result import name_recipe_in_warnings
from ..recipe_search.search_job import SearchJob
from ..writing.checks import problem_line, verify_written
from ..writing.write_model import count_replaced
from . import imatrix as imatrix_stage
from .cache import StageCache, key_of
from .files import quantize_call, write_files
from .folder import RunFolder
from .repack import check_repack
from .text import StageText, read_stage_text
from .validation import Validation

_STAGES_WITH_TEXT = ("imatrix", "search", "validate")


class Run:
    """One run of the TOML recipe at `path`. Paths in the recipe are relative to its own folder.

    fresh: every stage is done again, and what the folder holds is replaced. allow_nonfinite: weights that are NaN or infinite
    are written as 0. cluster: its workers compute the imatrix and quantise. Raises MillError when the recipe's files are
    missing or not readable; `check` finds what else stands in the way.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: Path,
        folder: RunFolder,
        *,
        threads: int | None = None,
        fresh: bool = False,
        allow_nonfinite: bool = False,
        cluster: str | None = None,
        cluster_output: str | None = None,
        report: OnProgress = lambda progress: None,
    ):
        self.recipe, self.path, self.folder, self.threads, self.fresh = recipe, path.resolve(), folder, threads, fresh
        self.allow_nonfinite, self.report = allow_nonfinite, report
        self.cluster, self.cluster_output = cluster, cluster_output
        stages = recipe.stages
        if "model" not in stages.get("source", {}):
            raise PlanError(f"{recipe.name}: a recipe to run needs [source] model = ...")
        self.mla_layout = stages.get("convert", {}).get("mla_layout")
        self.model, mtp = self._model_name(stages["source"]), stages.get("convert", {}).get("mtp")
        architecture, lora = stages.get("convert", {}).get("architecture"), adapters_of_recipe(recipe, self.path.parent)
        self.reading = {"mla_layout": self.mla_layout, "mtp": mtp, "architecture": architecture, "lora": lora}
        self.source = open_source(self.model, **self.reading)
        # what decides the model beside its files
        self._reading = self.mla_layout if mtp is None else f"{self.mla_layout}, draft layers: {mtp}"
        self.nextn: bool = stages.get("imatrix", {}).get("nextn", False)
        self.texts = {stage: self._read_text(stage) for stage in _STAGES_WITH_TEXT if "text" in stages.get(stage, {})}
        self.target, self.collected = target_of(recipe), imatrix_stage.covariance_to_write(recipe, self.path.parent, folder)
        self.covariance = self.collected or covariance_of_recipe(recipe, self.path.parent)
        self.search_options = search_options_of(recipe, self.path.parent, threads=threads)
        self.cache = StageCache(folder.state, fresh, report)
        self._planned_types: set[TensorType] = set()  # of all tensors, known after `check`
        self.disk_needed: int | None = None  # bytes for all files of a model, known after `check`; None: as the plan says

    def _model_name(self, source: dict[str, Any]) -> str | Path:
        """A path, or hf:OWNER/NAME of the hub, whose revision may stand beside it."""
        name, revision = source["model"], source.get("revision")
        if name.startswith("hf:"):
            return f"{name}@{revision}" if revision else name
        if revision:
            raise PlanError(f"{self.recipe.name}: [source] revision is for a model = 'hf:OWNER/NAME'; {name} is a path")
        return self._existing(name)

    def _existing(self, name: str) -> Path:
        path = self.path.parent / name
        if not path.exists():
            raise PlanError(f"{self.recipe.name}: {path} does not exist")
        return path

    def _read_text(self, stage: str) -> StageText:
        table, where = self.recipe.stages[stage], f"{self.recipe.name}, [{stage}] text"
        path = self._existing(table["text"])
        return read_stage_text(where, path, table.get("ctx", 512), table.get("chunks"), self._source_model.tokenizer)

    @cached_property
    def _source_model(self) -> Model:
        return load_model(self.source)

    @property
    def inputs(self) -> list[Path]:
        """All that is read, and so must not be written to."""
        given = [self.imatrix_path] if self.imatrix_path is not None and "imatrix" not in self.texts else []
        given += [self.covariance] if self.covariance is not None and self.collected is None else []
        return [*self.source.files, self.path, *(text.path for text in self.texts.values()), *given]

    @property
    def how_to_continue(self) -> str:
        """What to do after an interruption, as a half sentence."""
        again = "the same command without --force" if self.fresh else "the same command"
        return f"what was finished is kept, {again} goes on with it"

    # -- imatrix

    @cached_property
    def imatrix_path(self) -> Path | None:
        """The file that is given, or the one that is computed; None for a run without."""
        table = self.recipe.stages.get("imatrix", {})
        if "file" in table:
            return self._existing(table["file"])
        return self.folder.imatrix if "imatrix" in self.texts else None

    @cached_property
    def imatrix(self) -> Imatrix | None:
        """Computed from the recipe's text through the source itself, or read from its file; None without [imatrix]."""
        if self.imatrix_path is None:
            return None
        text = self.texts.get("imatrix")
        if text is not None:
            self.cache.stage("imatrix", self._imatrix_key, self._collected_files, lambda: self._compute_imatrix(text))
        return load(self.imatrix_path).fit(self.source, str(self.imatrix_path))

    @property
    def _collected_files(self) -> list[Path]:
        """What the imatrix stage writes."""
        return [self.folder.imatrix, *([self.collected] if self.collected else [])] if "imatrix" in self.texts else []

    @cached_property
    def _imatrix_key(self) -> str:
        """A digest of all that decides what is in the imatrix."""
        text = self.texts.get("imatrix")
        if text is not None:
            options = ["covariance"] * (self.collected is not None) + ["nextn"] * self.nextn
            return key_of(code_digest(), self.source.identity, self._reading, text.digest, text.n_ctx, text.chunks, *options)
        return hashlib.sha256(self.imatrix_path.read_bytes()).hexdigest() if self.imatrix_path is not None else ""

    def _compute_imatrix(self, text: StageText) -> dict[str, Any]:
        return imatrix_stage.compute(
            self._source_model,
            text,
            self.folder.imatrix,
            self.collected,
            self._planned_types,
            self.report,
            nextn=self.nextn,
            # workers open the model by its path alone
            cluster=self.cluster if not any(self.reading[key] for key in ("mtp", "architecture", "lora")) else None,
            mla_layout=self.mla_layout,
        )

    def _importance(self) -> Importance | None:
        imatrix, path = self.imatrix, self.imatrix_path
        return Importance(imatrix.means(), imatrix.metadata(path.name)) if imatrix is not None and path is not None else None

    def _expected_importance(self) -> Importance | None:
        """What is known before any work: a given file's data, or that there will be data with metadata of this size."""
        text = self.texts.get("imatrix")
        if text is None:
            return self._importance()
        return PendingImportance({}, Imatrix({}, [text.path.name], 1, text.n_ctx).metadata(self.folder.imatrix.name))

    # -- search

    def _search_job(self, importance: Importance | None, state: Path | None) -> SearchJob:
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
            report=self.report,
        )

    @property
    def _search_key(self) -> str:
        options, text = self.search_options, self.texts.get("search")
        types = ",".join(type.name for type in options.types)
        measuring = (options.rows, options.seed, options.measurements, options.refine, text and text.digest, options.n_ctx)
        made_from = (code_digest(), self.source.identity, self._reading, self._imatrix_key, self.recipe.split_max_size)
        made_from += self._covariance_key
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
        return self.target is None or self.cache.has("search", self._search_key, [self.folder.recipe])

    def search(self) -> dict[str, Any] | None:
        """Finds the rules of a recipe with a target, and writes them to a file; None for a recipe without one."""
        if self.target is None:
            return None
        target, importance = self.target, self._importance()

        def work() -> dict[str, Any]:
            if self.fresh:
                self.folder.measurements.unlink(missing_ok=True)
            result = self._search_job(importance, self.folder.measurements).find(target)
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

        return self.cache.stage("search", self._search_key, [self.folder.recipe], work)

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
            return imatrix_stage.expected_covariances(self._source_model, self.texts["imatrix"], path, effort)
        return load_covariances(path, self.source, effort)

    def _plan(self, importance: Importance | None, replaced: list[tuple[str, int]] | None) -> Plan:
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
            covariances=self._covariances(importance),
            split_max_size=self.recipe.split_max_size,
            nonfinite_counts=replaced,
            version=__version__,
        )
        if self.target is not None:
            name_recipe_in_warnings(plan)
        return plan

    def check(self) -> Plan:
        """Everything that can be checked before any work. Returns the plan, exact but for the importance data; of a recipe with
        a target whose search is not finished, the plan with the smallest types allowed."""
        for stage, key in (("imatrix", "nextn"), ("validate", "mtp")):
            if self.recipe.stages.get(stage, {}).get(key) and not self._source_model.draft_heads:
                raise PlanError(
                    f"{self.recipe.name}: [{stage}] {key} is for draft layers, of which {self.source.path} has none"
                )
        importance, disk = self._expected_importance(), None
        written = self._collected_files
        written += [self.folder.recipe, self.folder.measurements] if self.target is not None else []
        refuse_inputs([*self.folder.reports, self.folder.state, *written], self.inputs)
        # Else a file that is there belongs to somebody who never ran this recipe here.
        ours = self.fresh or self.cache.was_begun("quantize")
        if self.collected not in (None, self.folder.covariance) and not self.fresh:
            self.cache.check_own("imatrix", self._imatrix_key, self.collected)
        if self.target is None or self.has_rules:
            plan = self._plan(importance, None)
            types = {o.name: [o.type] for o in plan.outputs}
        else:
            if self.folder.recipe.exists() and not (ours or self.cache.was_begun("search")):
                raise PlanError(f"{self.folder.recipe} exists; use --force to replace it")
            search = self._search_job(importance, None)
            plan, disk = search.smallest_plan(self.target, self.folder.gguf), search.largest_file(self.target)
            types = {o.name: [o.type] for o in plan.outputs} | search.candidates
        self._planned_types = {tensor_type for several in types.values() for tensor_type in several}
        if "repack" in self.recipe.stages:
            disk = 2 * (disk or plan.file_bytes)
        self.disk_needed = disk
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=self.inputs, needed=disk)
        if "repack" in self.recipe.stages:
            refuse_inputs([self.folder.repacked], self.inputs)
            check_repack(self.recipe, types)
        if self._validation is not None:
            self._validation.check(self._source_model)
        return plan

    def quantize(self) -> Plan:
        """Writes the quantised model, and returns its plan."""
        replaced: list[tuple[str, int]] | None = [] if self.allow_nonfinite else None
        plan = self._plan(self._importance(), replaced)

        def work() -> dict[str, Any]:
            call = quantize_call(self, self.cluster, self.cluster_output) if self.cluster is not None else None
            result, elsewhere = write_files(self, plan, "quantize", self.inputs, call)
            count_replaced([*(replaced or ()), *elsewhere])
            return {"resumed": result.resumed}

        self.cache.stage("quantize", plan.fingerprint, [f.path for f in plan.files], work)
        return plan

    # -- repack

    def repack(self, quantized: Plan) -> Plan:
        """The plan of the file with interleaved rows beside the quantised one; without [repack] the one that is given."""
        if "repack" not in self.recipe.stages:
            return quantized
        pattern = self.recipe.stages["repack"].get("pattern")
        opened = open_gguf(quantized.files[0].path)
        plan = plan_repack(opened, self.folder.repacked, pattern=pattern)
        key = key_of(code_digest(), quantized.fingerprint, pattern)
        self.cache.stage(
            "repack",
            key,
            [f.path for f in plan.files],
            lambda: {"resumed": write_files(self, plan, "repack", opened.paths)[0].resumed},
        )
        return plan

    # -- verify

    def verify(self, quantized: Plan, final: Plan) -> Verification:
        """Samples of what was written against what it was made from (quantize/verify.py). Raises MillError for a difference."""

        def work() -> dict[str, Any]:
            checks = verify_written(quantized, self.source, self.report).tensors
            if final is not quantized:
                repacked_from = gguf_source(quantized.files[0].path)
                checks = [*checks, *verify_written(final, repacked_from, self.report).tensors]
            problem = problem_line(Verification(checks), quantized.files[0].path)
            if problem:
                raise MillError(problem)
            return {"tensors": [asdict(t) for t in checks[: len(quantized.outputs)]]}

        key = key_of(code_digest(), quantized.fingerprint, final.fingerprint)
        result = self.cache.stage("verify", key, [], work)
        return Verification([TensorCheck(**t) for t in result["tensors"]])

    # -- validate

    @cached_property
    def _validation(self) -> Validation | None:
        text, table = self.texts.get("validate"), self.recipe.stages.get("validate", {})
        if text is None:
            return None
        return Validation(self.recipe.name, table, text, self.source, self.allow_nonfinite)

    def validate(self, plan: Plan) -> dict[str, Any] | None:
        """What `Validation.measure` finds of the plan's file; None without [validate]."""
        validation = self._validation
        if validation is None:
            return None
        key = key_of(code_digest(), plan.fingerprint, *validation.settings)
        return self.cache.stage("validate", key, [], lambda: validation.measure(plan, self.report))

    def failures(self, figures: dict[str, Any] | None) -> list[str]:
        """The figures of `validate` that exceed the recipe's limits, in words."""
        return self._validation.failures(figures) if self._validation is not None and figures is not None else []

    @property
    def source_line(self) -> str:
        """The source's name, number of tensors and size, for the reports."""
        nbytes = sum(p.stat().st_size for p in self.source.files if p.suffix in (".safetensors", ".gguf"))
        return f"source {Path(self.source.path).resolve().name} ({len(self.source.tensors)} tensors, {gib(nbytes)} of weights)"
