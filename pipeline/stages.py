"""The stages of `run`: each leaves a file and a key of all that decided it, and is not done again while both hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import __version__
from ..convert import open_source
from ..convert.outtype import recipe_types
from ..formats import MillError, PlanError, TensorType, open_gguf
from ..imatrix.collect import collect
from ..imatrix.entries import Imatrix
from ..imatrix.files import load
from ..jobs.atomic_write import write_text
from ..jobs.execute import JobResult, execute
from ..jobs.journal import journal_path
from ..jobs.plan import Plan
from ..jobs.preflight import preflight
from ..quantize.gguf_source import gguf_source
from ..quantize.planning import Importance, PendingImportance, plan_quantize
from ..quantize.recipes.recipe import Recipe, load_recipe
from ..quantize.verify import TensorCheck, Verification
from ..repack.job import plan_repack
from ..runtime import Model, load_model
from .console import byte_progress, chunk_progress, gib
from .input_checks import refuse_problems, verified, watch
from .run_folder import Folder
from .search_options import recipe_target, recipe_wishes
from .search_result import name_lines
from .searching import SearchJob
from .stage_cache import Memory, key_of
from .stage_text import Words, read_words
from .validation import Validation
from .write_model import protect, warn_replaced


class Run:
    """One run of the TOML recipe at `path`. Paths in the recipe count from its own folder.

    fresh: every stage is done again, and what the folder holds is replaced. allow_nonfinite: damaged weights are written as 0.
    Raises MillError when the recipe's files are missing or not readable; `check` finds what else stands in the way.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: Path,
        folder: Folder,
        *,
        threads: int | None = None,
        fresh: bool = False,
        allow_nonfinite: bool = False,
    ):
        self.recipe, self.path, self.folder, self.threads, self.fresh = recipe, path.resolve(), folder, threads, fresh
        self.allow_nonfinite = allow_nonfinite
        stages = recipe.stages
        if "model" not in stages.get("source", {}):
            raise PlanError(f"{recipe.name}: a recipe to run needs [source] model = ...")
        self.mla_layout = stages.get("convert", {}).get("mla_layout")
        self.source = open_source(self._model(stages["source"]), mla_layout=self.mla_layout)
        stages_of_text = ("imatrix", "search", "validate")
        self.texts = {stage: self._words(stage) for stage in stages_of_text if "text" in stages.get(stage, {})}
        self.target = recipe_target(recipe)
        self.wishes = recipe_wishes(recipe, self.path.parent, threads=threads)
        self.memory = Memory(folder.state, fresh)
        self.room: int | None = None  # bytes on the disk for all files of a model, known after `check`; None: as the plan says

    def _model(self, source: dict[str, Any]) -> str | Path:
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

    def _words(self, stage: str) -> Words:
        wanted, where = self.recipe.stages[stage], f"{self.recipe.name}, [{stage}] text"
        path = self._existing(wanted["text"])
        return read_words(where, path, wanted.get("ctx", 512), wanted.get("chunks"), self._source_model.tokenizer)

    @cached_property
    def _source_model(self) -> Model:
        return load_model(self.source)

    @property
    def inputs(self) -> list[Path]:
        """All that is read, and so must not be written to."""
        given = [self.imatrix_path] if self.imatrix_path is not None and "imatrix" not in self.texts else []
        return [*self.source.files, self.path, *(words.path for words in self.texts.values()), *given]

    @property
    def to_go_on(self) -> str:
        """What to do after an interruption, as a half sentence."""
        again = "the same command without --force" if self.fresh else "the same command"
        return f"what was finished is kept, {again} goes on with it"

    # -- imatrix

    @cached_property
    def imatrix_path(self) -> Path | None:
        """The file that is given, or the one that is computed; None for a run without."""
        wanted = self.recipe.stages.get("imatrix", {})
        if "file" in wanted:
            return self._existing(wanted["file"])
        return self.folder.imatrix if "imatrix" in self.texts else None

    @cached_property
    def imatrix(self) -> Imatrix | None:
        """Computed from the recipe's text through the source itself, or read from its file; None without [imatrix]."""
        if self.imatrix_path is None:
            return None
        words = self.texts.get("imatrix")
        if words is not None:
            self.memory.stage("imatrix", self._imatrix_key, [self.folder.imatrix], lambda: self._collected(words))
        return load(self.imatrix_path).fit(self.source, str(self.imatrix_path))

    @cached_property
    def _imatrix_key(self) -> str:
        """Of all that decides what is in the imatrix."""
        words = self.texts.get("imatrix")
        if words is not None:
            return key_of(__version__, self.source.identity, self.mla_layout, words.digest, words.n_ctx, words.chunks)
        return hashlib.sha256(self.imatrix_path.read_bytes()).hexdigest() if self.imatrix_path is not None else ""

    def _collected(self, words: Words) -> dict[str, Any]:
        with chunk_progress("imatrix") as progress:
            made, result = collect(
                self._source_model,
                words.tokens.tolist(),
                dataset=words.path.name,
                n_ctx=words.n_ctx,
                chunks=words.chunks,
                on_chunk=progress,
            )
        made.save(self.folder.imatrix)
        return {"chunks": made.chunk_count, "perplexity": result.perplexity, "starved": made.starved()}

    def _importance(self) -> Importance | None:
        made, path = self.imatrix, self.imatrix_path
        return Importance(made.means(), made.metadata(path.name)) if made is not None and path is not None else None

    def _expected_importance(self) -> Importance | None:
        """What is known before any work: a given file's data, or that there will be data with metadata of this size."""
        words = self.texts.get("imatrix")
        if words is None:
            return self._importance()
        return PendingImportance({}, Imatrix({}, [words.path.name], 1, words.n_ctx).metadata(self.folder.imatrix.name))

    # -- search

    def _search_job(self, importance: Importance | None, state: Path | None) -> SearchJob:
        planning = {"split_max_size": self.recipe.split_max_size, "allow_requantize": False, "ignore_imatrix_rules": False}
        return SearchJob(
            self.source,
            importance,
            self.wishes,
            fixed=self.recipe.rules,
            fixed_text=self.recipe.rules_text,
            state=state,
            planning=planning,
        )

    @property
    def _search_key(self) -> str:
        wishes, words = self.wishes, self.texts.get("search")
        types = ",".join(kind.name for kind in wishes.types)
        measuring = (wishes.rows, wishes.seed, wishes.measurements, wishes.refine, words and words.digest, wishes.n_ctx)
        made_from = (__version__, self.source.identity, self.mla_layout, self._imatrix_key, self.recipe.split_max_size)
        return key_of(*made_from, self.target, self.recipe.rules_text, types, wishes.repacked, wishes.chunks, *measuring)

    @property
    def is_found(self) -> bool:
        """Whether the rules are known: they stand in the recipe, or were found before."""
        return self.target is None or self.memory.holds("search", self._search_key, [self.folder.found])

    def search(self) -> dict[str, Any] | None:
        """Finds the rules of a recipe with a target, and leaves them in a file; None for a recipe without one."""
        if self.target is None:
            return None
        target, importance = self.target, self._importance()

        def work() -> dict[str, Any]:
            if self.fresh:
                self.folder.measured.unlink(missing_ok=True)
            result = self._search_job(importance, self.folder.measured).find(target)
            write_text(self.folder.found, result.text)
            text = self.wishes.text.name if self.wishes.text is not None else None
            asked = {"size": target.size, "bits": target.bits, "divergence": target.divergence}
            said = {
                "target": target.text,
                "asked": asked,
                "tensors": len(result.types),
                "text": text,
                "imatrix": importance is not None,
            }
            return said | result.figures()

        return self.memory.stage("search", self._search_key, [self.folder.found], work)

    @property
    def decided(self) -> Recipe:
        """What the file is quantised by: the recipe, or the one that was found for it."""
        return load_recipe(self.folder.found) if self.target is not None else self.recipe

    # -- quantize

    def _plan(self, importance: Importance | None, replaced: list[tuple[str, int]] | None) -> Plan:
        recipe = self.decided
        default, rules = recipe_types(self.source, recipe)
        plan = plan_quantize(
            self.source,
            self.folder.gguf,
            type=default,
            rules=rules,
            recipe_text=recipe.text,
            allow_requantize="outtype" in recipe.stages.get("convert", {}),
            importance=importance,
            split_max_size=self.recipe.split_max_size,
            nonfinite_counts=replaced,
            version=__version__,
        )
        if self.target is not None:
            name_lines(plan)
        return plan

    def check(self) -> Plan:
        """The preflight: everything that can be known before any work. Returns the plan, exact but for the importance data; of
        a recipe with a target whose rules are not found yet, the plan with the smallest types allowed."""
        importance, room = self._expected_importance(), None
        made = [self.folder.imatrix] * ("imatrix" in self.texts)
        made += [self.folder.found, self.folder.measured] if self.target is not None else []
        protect([*self.folder.reports, self.folder.state, *made], self.inputs)
        ours = self.fresh or self.memory.knows("quantize")  # else an existing file is somebody's who never ran this recipe here
        if self.target is None or self.is_found:
            plan = self._plan(importance, None)
            types = {o.name: [o.type] for o in plan.outputs}
        else:
            if self.folder.found.exists() and not (ours or self.memory.knows("search")):
                raise PlanError(f"{self.folder.found} exists; use --force to replace it")
            search = self._search_job(importance, None)
            plan, room = search.least(self.target, self.folder.gguf), search.most(self.target)
            types = {o.name: [o.type] for o in plan.outputs} | search.options
        if "repack" in self.recipe.stages:
            room = 2 * (room or plan.file_bytes)
        self.room = room
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=self.inputs, needed=room)
        if "repack" in self.recipe.stages:
            protect([self.folder.repacked], self.inputs)
            self._check_repack(types)
        if self._validation is not None:
            self._validation.check(self._source_model)
        return plan

    def quantize(self) -> Plan:
        replaced: list[tuple[str, int]] | None = [] if self.allow_nonfinite else None
        plan = self._plan(self._importance(), replaced)

        def work() -> dict[str, Any]:
            result = self._execute(plan, "quantize", self.inputs)
            warn_replaced(replaced or ())
            return {"resumed": result.resumed}

        self.memory.stage("quantize", plan.fingerprint, [f.path for f in plan.files], work)
        return plan

    def _execute(self, plan: Plan, label: str, inputs: Sequence[Path]) -> JobResult:
        """A journal of this very plan is gone on with; one of an earlier recipe in this folder of ours is not."""
        journal = journal_path(plan)
        known = journal.read_bytes().partition(b"\n")[0] if journal.exists() and not self.fresh else b""
        job = {"threads": self.threads, "unchanged": watch([path for path in inputs if path.exists()])}
        resume = plan.fingerprint.encode() in known
        self.memory.forget("verify")
        try:
            with byte_progress(plan.total_bytes, label) as progress:
                return execute(plan, resume=resume, force=not resume, progress=progress, **job)
        except MillError as error:
            cause = error.__cause__
            if isinstance(cause, MillError):  # of a tensor; the rest is kept
                raise MillError(f"{cause}; {self.to_go_on}") from error
            if isinstance(cause, OSError):
                raise MillError(f"{plan.files[0].path}: {cause.strerror or cause}; {self.to_go_on}") from error
            raise

    # -- repack

    def _check_repack(self, types: Mapping[str, Sequence[TensorType]]) -> None:
        """Raises PlanError when no tensor, as one of the types that it may get, could be repacked."""
        where, pattern = f"{self.recipe.name}, [repack]", self.recipe.stages["repack"].get("pattern", "")
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise PlanError(f"{where} pattern: {pattern!r} is no regular expression: {error}") from None
        if not any(search(name) and any(kind.packed is not None for kind in kinds) for name, kinds in types.items()):
            raise PlanError(f"{where}: no tensor of a type with an interleaved form has {pattern!r} in its name")

    def repack(self, quantized: Plan) -> Plan:
        """The plan of the file with interleaved rows beside the quantised one; without [repack] the one that is given."""
        if "repack" not in self.recipe.stages:
            return quantized
        pattern = self.recipe.stages["repack"].get("pattern")
        opened = open_gguf(quantized.files[0].path)
        plan = plan_repack(opened, self.folder.repacked, pattern=pattern)
        key = key_of(__version__, quantized.fingerprint, pattern)
        self.memory.stage(
            "repack",
            key,
            [f.path for f in plan.files],
            lambda: {"resumed": self._execute(plan, "repack", opened.paths).resumed},
        )
        return plan

    # -- verify

    def verify(self, quantized: Plan, final: Plan) -> Verification:
        """Samples of what was written against what it was made from (quantize/verify.py). Raises MillError for a difference."""

        def work() -> dict[str, Any]:
            checks = verified(quantized, self.source).tensors
            if final is not quantized:
                checks = [*checks, *verified(final, gguf_source(quantized.files[0].path)).tensors]
            refuse_problems(Verification(checks), quantized.files[0].path)
            return {"tensors": [asdict(t) for t in checks[: len(quantized.outputs)]]}

        key = key_of(__version__, quantized.fingerprint, final.fingerprint)
        found = self.memory.stage("verify", key, [], work)
        return Verification([TensorCheck(**t) for t in found["tensors"]])

    # -- validate

    @cached_property
    def _validation(self) -> Validation | None:
        words, wanted = self.texts.get("validate"), self.recipe.stages.get("validate", {})
        if words is None:
            return None
        return Validation(self.recipe.name, wanted, words, self.source, self.allow_nonfinite)

    def validate(self, plan: Plan) -> dict[str, Any] | None:
        """What `Validation.measure` finds of the plan's file; None without [validate]."""
        job = self._validation
        if job is None:
            return None
        key = key_of(__version__, plan.fingerprint, *job.settings)
        return self.memory.stage("validate", key, [], lambda: job.measure(plan))

    def judge(self, figures: dict[str, Any] | None) -> list[str]:
        """What exceeds the limits that the recipe sets."""
        return self._validation.failures(figures) if self._validation is not None and figures is not None else []

    def settings(self) -> str:
        nbytes = sum(p.stat().st_size for p in self.source.files if p.suffix in (".safetensors", ".gguf"))
        return f"source {Path(self.source.path).resolve().name} ({len(self.source.tensors)} tensors, {gib(nbytes)} of weights)"
