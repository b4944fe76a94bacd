"""The stages of `run` that all its files share: each leaves a file and a key of all that decided it, and is not done again
while both hold. What is done for each file is in quant.py."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ...convert import open_source
from ...formats import PlanError, TensorSource, TensorType
from ...imatrix.entries import Imatrix, load
from ...imatrix.texts import parse_text
from ...jobs.code_digest import code_digest
from ...jobs.plan import Plan
from ...jobs.preflight import check_space
from ...quantize.covariance.source import Covariances
from ...quantize.importance import Importance, PendingImportance
from ...quantize.recipes.recipe import Recipe
from ...runtime import Model, load_model
from ..collecting.collection import N_CTX, moments_path
from ..common.arguments import refuse_inputs
from ..common.checksums import sha256_of
from ..common.figures import size_text
from ..common.models import file_stem
from ..common.progress import OnProgress
from ..requests.groups import Measuring, moments_of, reading_of
from ..requests.imatrix import ImatrixRequest
from ..requests.recipe import GivenRecipe, merged
from ..requests.run import RunRequest
from ..requests.stages import GivenImatrixRequest, SourceRequest, ValidateRequest
from . import imatrix as imatrix_stage
from .cache import StageCache, key_of
from .folder import RunFolder
from .quant import Quant
from .text import StageText, read_stage_text
from .validation import Validation
from .working import WorkingCopy


class Run:
    """One run of the TOML recipe at `path`. Paths in the recipe are relative to its own folder.

    Raises MillError when the recipe's files are missing or not readable; `check` finds what else stands in the way.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: Path,
        folder: RunFolder,
        request: RunRequest,
        report: OnProgress = lambda progress: None,
    ):
        self.recipe, self.path, self.folder, self.request, self.report = recipe, path.resolve(), folder, request, report
        given = GivenRecipe(self.path, recipe)
        reading = merged(SourceRequest(), given)
        if not reading.model:
            raise PlanError(f"{recipe.name}: a recipe to run needs [source] model = ...")
        self.model = self._model_name(reading)
        if recipe.several:
            folder = self.folder = replace(folder, stem=file_stem(self.model))
        self.collecting = imatrix_stage.imatrix_request(self.model, folder, request, given)
        self.given_imatrix = merged(GivenImatrixRequest(), given).file
        self.validating = merged(ValidateRequest(), given)
        self.quants = [Quant(self, one) for one in recipe.each]
        first = self.quants[0].job.request
        self.mla_layout = self._mla_layout()
        self.reading = {**reading_of(first), "remote": first.remote}
        self.source = open_source(self.model, **self.reading)
        # what decides the model beside its files
        mtp = self.reading["mtp"]
        self.reading_text = self.mla_layout if mtp is None else f"{self.mla_layout}, draft layers: {mtp}"
        asked = {"imatrix": self.collecting, "search": merged(Measuring(), given), "validate": self.validating}
        self.texts = {stage: self._read_text(stage, one) for stage, one in asked.items() if one.text is not None}
        begun = [quant.stage_name("quantize") for quant in self.quants]
        self.cache = StageCache(folder.state, begun if request.force else None, report)
        self.working_kind = reading.working
        self.working = WorkingCopy(self, self.quants[0].job.request, self.working_kind) if self.working_kind else None
        self._planned_types: set[TensorType] = set()  # of all tensors, known after `check`
        self._forgotten: set[Path] = set()

    def _model_name(self, asked: SourceRequest) -> str | Path:
        """A path, or hf:OWNER/NAME of the hub, whose revision may stand beside it."""
        name, revision = asked.model, asked.revision
        if name.startswith("hf:"):
            return f"{name}@{revision}" if revision else name
        if revision:
            raise PlanError(f"{self.recipe.name}: [source] revision is for a model = 'hf:OWNER/NAME'; {name} is a path")
        return self._existing(name)

    def _mla_layout(self) -> str | None:
        """That of [convert], else what the programs read that [quantize] names."""
        layouts = {quant.job.request.mla_layout for quant in self.quants}
        if len(layouts) > 1:
            raise PlanError(
                f"{self.recipe.name}: the tables [[quantize]] are for programs with different layouts of latent attention; "
                "give all a program (for = ...) with the same, or write two recipes"
            )
        return layouts.pop()

    def _existing(self, name: str | Path) -> Path:
        path = self.path.parent / name
        if not path.exists():
            raise PlanError(f"{self.recipe.name}: {path} does not exist")
        return path

    def _read_text(self, stage: str, asked: ImatrixRequest | Measuring | ValidateRequest) -> StageText:
        names = asked.text if isinstance(asked.text, tuple) else [asked.text]
        texts, first = [parse_text(str(name)) for name in names], getattr(asked, "from_chunk", None) or 0
        where = f"{self.recipe.name}, [{stage}] text"
        return read_stage_text(where, texts, asked.n_ctx or N_CTX, asked.chunks, self._source_model, first)

    @cached_property
    def _source_model(self) -> Model:
        return load_model(self.source)

    def working_source(self) -> TensorSource:
        """What runs: the working copy, made if need be, or the source."""
        return self.source if self.working is None else self.working.source()

    @cached_property
    def _running_model(self) -> Model:
        return self._source_model if self.working is None else load_model(self.working_source())

    @property
    def inputs(self) -> list[Path]:
        """All that is read, and so must not be written to."""
        given = [self.imatrix_path] if self.imatrix_path is not None and "imatrix" not in self.texts else []
        given += [Path(path) for q in self.quants if (path := moments_of(q.job.request)) is not None and not q.collects]
        return [*self.source.files, self.path, *(path for text in self.texts.values() for path in text.paths), *given]

    @property
    def how_to_continue(self) -> str:
        """What to do after an interruption, as a half sentence."""
        again = "the same command without --force" if self.request.force else "the same command"
        return f"what was finished is kept, {again} continues it"

    # -- imatrix

    @cached_property
    def imatrix_path(self) -> Path | None:
        """The file that is given, or the one that is computed; None for a run without."""
        file = self.given_imatrix
        return Path(file) if file is not None else self.folder.imatrix if self.collecting.text is not None else None

    @cached_property
    def imatrix(self) -> Imatrix | None:
        """Computed from the recipe's text through the source itself, or read from its file; None without [imatrix]."""
        if self.imatrix_path is None:
            return None
        text = self.texts.get("imatrix")
        if text is not None:
            self.cache.stage("imatrix", self.imatrix_key, self._collected_files, lambda: self._compute_imatrix(text))
        return load(self.imatrix_path).fit(self.source, str(self.imatrix_path))

    @property
    def _collected_files(self) -> list[Path]:
        """What the imatrix stage writes."""
        moments = moments_path(self.collecting)
        return [self.folder.imatrix, *([moments] if moments is not None else [])] if "imatrix" in self.texts else []

    @property
    def has_imatrix(self) -> bool:
        """Whether what the imatrix stage collects is there."""
        return self.cache.has("imatrix", self.imatrix_key, self._collected_files)

    @cached_property
    def imatrix_key(self) -> str:
        """A digest of all that decides what is in the imatrix."""
        text = self.texts.get("imatrix")
        if text is not None:
            asked, cut = self.collecting, (text.digest, text.n_ctx, text.chunks)
            what = asked.covariance is not None, asked.covariance_experts, asked.curvature is not None, asked.nextn
            return key_of(code_digest(), self.source.identity, self.reading_text, *cut, *what, self.working_kind)
        return hashlib.sha256(self.imatrix_path.read_bytes()).hexdigest() if self.imatrix_path is not None else ""

    def _compute_imatrix(self, text: StageText) -> dict[str, Any]:
        types, reading = self._planned_types, self.reading
        return imatrix_stage.compute(self.collecting, self._running_model, text, types, self.report, reading)

    def importance(self) -> Importance | None:
        """The imatrix as the encoders take it."""
        imatrix, path = self.imatrix, self.imatrix_path
        return Importance(imatrix.means(), imatrix.metadata(path.name)) if imatrix is not None and path is not None else None

    def expected_importance(self) -> Importance | None:
        """What is known before any work: a given file's data, or that there will be data with metadata of this size."""
        text = self.texts.get("imatrix")
        if text is None:
            return self.importance()
        return PendingImportance(
            {}, Imatrix({}, [path.name for path in text.paths], 1, text.n_ctx).metadata(self.folder.imatrix.name)
        )

    def expected_covariances(self, effort: int) -> Covariances:
        """What is known of the covariances before they are collected."""
        return imatrix_stage.expected(self._source_model, self.texts["imatrix"], self.collecting, effort)

    # -- the files

    def forget_measurements(self, path: Path) -> None:
        """With --force, what earlier runs have measured for searches is measured again, once."""
        if self.request.force and path not in self._forgotten:
            self._forgotten.add(path)
            path.unlink(missing_ok=True)

    def check(self) -> list[Plan]:
        """Everything that can be checked before any work. Returns the plan of each quant, as `Quant.check` does."""
        for name, is_asked in (("[imatrix] nextn", self.collecting.nextn), ("[validate] mtp", self.validating.mtp)):
            if is_asked and not self._source_model.draft_heads:
                raise PlanError(f"{self.recipe.name}: {name} is for draft layers, of which {self.source.path} has none")
        refuse_inputs([*self.folder.reports, self.folder.state, *self._collected_files], self.inputs)
        moments = moments_path(self.collecting)
        if moments not in (None, self.folder.covariance, self.folder.curvature) and not self.request.force:
            self.cache.check_own("imatrix", self.imatrix_key, moments)
        plans: list[Plan] = []
        for quant in self.quants:
            plan, types = quant.check()
            plans.append(plan)
            self._planned_types |= types
        if self.working is not None:
            self.working.check()
        check_space(self.folder.path, self.disk_needed, [file.part for plan in plans for file in plan.files])
        if self.validation is not None:
            self.validation.check(self._source_model)
        return plans

    @property
    def disk_needed(self) -> int:
        """Bytes that are still to be written for all models, at most; known after `check`."""
        return sum(quant.disk_needed for quant in self.quants) + (self.working.disk_needed if self.working else 0)

    @property
    def disk_peak(self) -> int:
        """Bytes of all models at most, with those that are there already; known after `check`."""
        return sum(quant.disk_bytes for quant in self.quants) + (self.working.plan.file_bytes if self.working else 0)

    # -- validate

    @cached_property
    def validation(self) -> Validation | None:
        """What [validate] asks for; None without."""
        text = self.texts.get("validate")
        if text is None:
            return None
        asked, running = self.validating, None
        if self.working_kind is not None:
            asked, running = replace(asked, baseline=self.working_kind), self.working_source
        return Validation(self.recipe.name, asked, text, self.source, self.request.allow_nonfinite, running)

    def compile_for_validation(self) -> None:
        """Has what runs the quants' files compiled while they are written: encoders leave processors idle, as most of a mix is
        encoded by one."""
        if self.validation is not None:
            from ...runtime.backends.cpu.executable import compile_ahead

            types = sorted(self._planned_types, key=lambda each: each.id, reverse=True)
            compile_ahead(each for each in types if not each.is_float)

    def validate(self, plans: Sequence[Plan]) -> list[dict[str, Any] | None]:
        """What `Validation.measure` finds of each quant's file, the baseline run once for all; None without [validate]."""
        validation = self.validation
        if validation is None:
            return [None] * len(plans)
        names = [quant.stage_name("validate") for quant in self.quants]
        keys = [key_of(code_digest(), plan.fingerprint, *validation.settings) for plan in plans]
        missing = [i for i, (name, key) in enumerate(zip(names, keys, strict=True)) if not self.cache.has(name, key, [])]
        measured: dict[int, dict[str, Any]] = {}

        def work(index: int) -> dict[str, Any]:
            if not measured:
                results = validation.measure([plans[i] for i in missing], self.report)
                measured.update(zip(missing, results, strict=True))
            return measured[index]

        return [
            self.cache.stage(name, key, [], partial(work, i)) for i, (name, key) in enumerate(zip(names, keys, strict=True))
        ]

    def stock(self) -> list[dict[str, Any]]:
        """The figures of the stock mixes that [validate] names, which no file is made of; see `Validation.measure_stock`."""
        validation = self.validation
        if validation is None or not validation.stock:
            return []
        imatrix = self.imatrix_key if self.imatrix_path is not None else ""
        key = key_of(code_digest(), self.source.identity, self.reading_text, imatrix, *validation.measuring, validation.stock)

        def work() -> dict[str, Any]:
            importance = self.importance() if self.imatrix_path is not None else None
            return {"mixes": validation.measure_stock(validation.stock, importance, self.report)}

        return self.cache.stage("stock", key, [], work)["mixes"]

    def checksums(self, plans: Sequence[Plan]) -> dict[str, str]:
        """sha256 in hex of each quant's files, and of the imatrix that is computed, by name."""
        digests: dict[str, str] = {}
        for quant, plan in zip(self.quants, plans, strict=True):
            paths = [file.path for file in plan.files]
            work = partial(sha256_of, paths, self.report)
            digests |= self.cache.stage(quant.stage_name("checksums"), key_of(plan.fingerprint), [], work)
        if "imatrix" in self.texts and self.folder.imatrix.exists():
            digests |= sha256_of([self.folder.imatrix], self.report)
        return digests

    def failures(self, figures: dict[str, Any] | None) -> list[str]:
        """The figures of `validate` that exceed the recipe's limits, in words."""
        return self.validation.failures(figures) if self.validation is not None and figures is not None else []

    @property
    def limits(self) -> dict[str, float]:
        """The limits of figures that the recipe sets."""
        return self.validation.limits if self.validation is not None else {}

    @property
    def source_line(self) -> str:
        """The source's name, number of tensors and size, for the reports."""
        nbytes = sum(p.stat().st_size for p in self.source.files if p.suffix in (".safetensors", ".gguf"))
        what = f"{len(self.source.tensors):,} tensors, {size_text(nbytes)} of weights"
        return f"source {Path(self.source.path).resolve().name} ({what})"
