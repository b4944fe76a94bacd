"""The stages of `run`: each leaves a file and a key of all that decided it, and is not done again while both hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..convert import open_source
from ..formats import TYPES, MillError, PlanError, open_gguf
from ..formats.execute import Result, execute, journal_path, preflight
from ..formats.plan import Plan
from ..imatrix.collect import collect
from ..imatrix.entries import Imatrix
from ..imatrix.files import load
from ..quantize.planning import Expected, Importance, plan_quantize
from ..quantize.recipe import Recipe
from ..quantize.source import gguf_source, rounded
from ..quantize.verify import Checked, Verification
from ..repack.job import plan_repack
from ..runtime import Model, load_model
from ..runtime.compare import compare
from ..runtime.generate import generate
from ..runtime.perplexity import Perplexity, perplexity
from .checking import refuse_problems, verified, watch
from .console import byte_progress, chunk_progress, gib
from .remembered import Memory, key_of
from .writing import protect, warn_replaced


@dataclass(frozen=True)
class Folder:
    """Where a run keeps what it makes. state.json: stage -> `Done`."""

    path: Path
    stem: str

    @property
    def gguf(self) -> Path:
        return self.path / f"{self.stem}.gguf"

    @property
    def imatrix(self) -> Path:
        return self.path / f"{self.stem}.imatrix"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def repacked(self) -> Path:
        return self.path / f"{self.stem}-repacked.gguf"

    @property
    def reports(self) -> tuple[Path, Path, Path, Path]:
        """For programs, for people as Markdown and as a page, and the draft of a model card."""
        return self.path / "report.json", self.path / "report.md", self.path / "report.html", self.path / "README.md"


@dataclass(frozen=True)
class Words:
    """A text that a stage reads: its tokens by the source's own tokenizer, and the windows they are cut into."""

    path: Path
    tokens: np.ndarray
    n_ctx: int
    chunks: int | None
    digest: str


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
        self.mla_layout = stages.get("convert", {}).get("mla_layout", "ik")
        self.source = open_source(self._model(stages["source"]), mla_layout=self.mla_layout)
        self.texts = {stage: self._words(stage) for stage in ("imatrix", "validate") if "text" in stages.get(stage, {})}
        self.memory = Memory(folder.state, fresh)

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
        """Reads and tokenises a stage's text. Raises PlanError unless it is UTF-8 and fills a window."""
        wanted = self.recipe.stages[stage]
        where, path, n_ctx = f"{self.recipe.name}, [{stage}] text", self._existing(wanted["text"]), wanted.get("ctx", 512)
        if path.is_dir():
            raise PlanError(f"{where}: {path} is a folder; give a file")
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"{where}: {path} is not UTF-8 text (byte {error.start}: {error.reason})") from None
        tokenizer = self._source_model.tokenizer
        tokens = np.asarray(tokenizer.encode(text), np.int64)
        if len(tokens) < n_ctx:
            raise PlanError(f"{where}: {path} has {len(tokens)} tokens, a window takes {n_ctx}: give a longer one or less ctx")
        digest = key_of(hashlib.sha256(tokens.tobytes()).hexdigest(), tokenizer.bos if tokenizer.add_bos else None, path.name)
        return Words(path, tokens, n_ctx, wanted.get("chunks"), digest)

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
            key = key_of(__version__, self.source.identity, self.mla_layout, words.digest, words.n_ctx, words.chunks)
            self.memory.stage("imatrix", key, [self.folder.imatrix], lambda: self._collected(words))
        return load(self.imatrix_path).fit(self.source, str(self.imatrix_path))

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
        return Expected({}, Imatrix({}, [words.path.name], 1, words.n_ctx).metadata(self.folder.imatrix.name))

    # -- quantize

    def _plan(self, importance: Importance | None, replaced: list[tuple[str, int]] | None) -> Plan:
        return plan_quantize(
            self.source,
            self.folder.gguf,
            type=self.recipe.type,
            rules=self.recipe.rules,
            recipe_text=self.recipe.text,
            importance=importance,
            split_max_size=self.recipe.split_max_size,
            nonfinite=replaced,
            version=__version__,
        )

    def check(self) -> Plan:
        """The preflight: everything that can be known before any work. Returns the plan, exact but for the importance data."""
        plan = self._plan(self._expected_importance(), None)
        written = [*self.folder.reports, self.folder.state, self.folder.state.with_suffix(".part")]
        protect([*written, *[self.folder.imatrix] * ("imatrix" in self.texts)], self.inputs)
        ours = self.fresh or self.memory.knows("quantize")  # else an existing file is somebody's who never ran this recipe here
        room = None if "repack" not in self.recipe.stages else 2 * plan.file_bytes
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=self.inputs, needed=room)
        if "repack" in self.recipe.stages:
            protect([self.folder.repacked], self.inputs)
            self._check_repack(plan)
        if "validate" in self.texts:
            self._check_validation()
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

    def _execute(self, plan: Plan, label: str, inputs: Sequence[Path]) -> Result:
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

    def _check_repack(self, plan: Plan) -> None:
        """Raises PlanError when nothing of the plan's file could be repacked."""
        where, pattern = f"{self.recipe.name}, [repack]", self.recipe.stages["repack"].get("pattern", "")
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise PlanError(f"{where} pattern: {pattern!r} is no regular expression: {error}") from None
        if not any(o.type.packed is not None and search(o.name) for o in plan.outputs):
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
        return Verification([Checked(**t) for t in found["tensors"]])

    # -- validate

    @cached_property
    def _baseline(self) -> Plan:
        """The baseline is what a file of that type would hold: the source's weights rounded to it, without the file."""
        name = self.recipe.stages["validate"].get("baseline", "bf16")
        replaced: list[tuple[str, int]] | None = [] if self.allow_nonfinite else None
        return plan_quantize(self.source, self.folder.gguf, type=TYPES[name], nonfinite=replaced)

    def _check_validation(self) -> None:
        where, prompt = f"{self.recipe.name}, [validate]", self.recipe.stages["validate"].get("prompt", "")
        try:
            _ = self._baseline
        except PlanError as error:
            raise PlanError(f"{where} baseline: {error}") from None
        length = len(self._source_model.tokenizer.encode(prompt, parse_special=True))
        if length > self._source_model.n_ctx:
            raise PlanError(f"{where} prompt: it has {length} tokens, the model holds {self._source_model.n_ctx}")

    def validate(self, plan: Plan) -> dict[str, Any] | None:
        """Perplexity of baseline and result with the divergence between them, and a text from each; None without [validate]."""
        wanted, words = self.recipe.stages.get("validate", {}), self.texts.get("validate")
        if words is None:
            return None
        name, prompt, length = wanted.get("baseline", "bf16"), wanted.get("prompt", ""), wanted.get("n", 64)

        def work() -> dict[str, Any]:
            models = {
                name: load_model(rounded(self.source, self._baseline)),
                "result": load_model(open_source(plan.files[0].path)),
            }
            running: dict[str, list[float | None]] = {"perplexity": [], "baseline_perplexity": [], "kld_mean": []}
            with chunk_progress("validate") as progress:

                def on_chunk(so_far: Perplexity, total: int) -> None:
                    progress(so_far, total)
                    for figure, values in running.items():
                        values.append(getattr(so_far, figure))

                result = perplexity(
                    models["result"],
                    words.tokens,
                    n_ctx=words.n_ctx,
                    chunks=words.chunks,
                    on_chunk=on_chunk,
                    baseline=models[name],
                )
            base = self._baseline
            found: dict[str, Any] = {"baseline": name, "baseline_bytes": base.total_bytes}
            found |= {"baseline_bits": base.bits_per_weight, **result.as_json(), "running": running}
            layers = compare(models[name], models["result"], words.tokens, words.n_ctx, chunks=1, weights=None)
            found["layers"] = [asdict(layer) for layer in layers.layers]
            if prompt:
                found["texts"] = {
                    label: generate(model, prompt, n_predict=length, temp=0).text() for label, model in models.items()
                }
            return found

        key = key_of(__version__, plan.fingerprint, words.digest, words.n_ctx, words.chunks, name, prompt, length)
        return self.memory.stage("validate", key, [], work)

    def judge(self, validation: dict[str, Any] | None) -> list[str]:
        """What exceeds the limits that the recipe sets."""
        wanted, failures = self.recipe.stages.get("validate", {}), []
        for limit, figure in (("max_ppl_ratio", "ratio"), ("max_kld", "kld_mean")):
            if validation is not None and limit in wanted and validation[figure] > wanted[limit]:
                failures.append(f"{figure} is {validation[figure]:.4f}, the recipe allows {limit} = {wanted[limit]}")
        return failures

    def settings(self) -> str:
        nbytes = sum(p.stat().st_size for p in self.source.files if p.suffix in (".safetensors", ".gguf"))
        return f"source {Path(self.source.path).resolve().name} ({len(self.source.tensors)} tensors, {gib(nbytes)} of weights)"
