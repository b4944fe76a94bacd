"""The stages of `run`: each leaves a file and a key of all that decided it, and is not done again while both hold."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import __version__
from ..convert import open_source
from ..formats import TYPES, MillError, PlanError
from ..formats.execute import execute, journal_path, preflight
from ..formats.plan import Plan
from ..formats.span import span_checksum
from ..imatrix.collect import collect
from ..imatrix.entries import Imatrix
from ..imatrix.files import load
from ..quantize.planning import Expected, Importance, plan_quantize
from ..quantize.recipe import Recipe
from ..quantize.source import rounded
from ..runtime import Model, load_model
from ..runtime.generate import generate
from ..runtime.perplexity import perplexity
from .console import byte_progress, chunk_progress, gib
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
    def reports(self) -> tuple[Path, Path]:
        """For programs and for people."""
        return self.path / "report.json", self.path / "report.md"


@dataclass(frozen=True)
class Made:
    """A file as a stage left it; xxh3 is of all its bytes, in hex. A file of this size and time is not hashed again."""

    name: str
    nbytes: int
    mtime_ns: int
    xxh3: str


@dataclass(frozen=True)
class Done:
    """A stage that has been begun; it is over when it has a result."""

    key: str
    seconds: float = 0.0
    result: dict[str, Any] | None = None
    files: list[Made] = field(default_factory=list)


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
        self.source = open_source(self._existing(stages["source"]["model"]), mla_layout=self.mla_layout)
        self.texts = {stage: self._words(stage) for stage in ("imatrix", "validate") if "text" in stages.get(stage, {})}
        self.seconds: dict[str, float] = {}
        # --force makes the folder ours, also for a run that goes on where this one was interrupted.
        self._state: dict[str, Done] = {"quantize": Done("")} if fresh else _read_state(folder.state)

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
        digest = _key(hashlib.sha256(tokens.tobytes()).hexdigest(), tokenizer.bos if tokenizer.add_bos else None, path.name)
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

    # -- stages and what is remembered of them

    def stage(self, name: str, key: str, files: Sequence[Path], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's result: remembered if its key is the same and its files are as it left them, else worked out now."""
        known = self._state.get(name)
        if known is not None and known.result is not None and known.key == key and self._intact(name, known, files):
            click.echo(f"{name}: done before, nothing has changed", err=True)
            self.seconds[name] = known.seconds
            return known.result
        self._remember(name, Done(key))
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        self._remember(name, Done(key, self.seconds[name], result, [_made(f) for f in files]))
        return result

    def _intact(self, name: str, known: Done, files: Sequence[Path]) -> bool:
        """Whether the files are those that the stage left; says what is wrong with them. Reads only what has a new time."""
        if [made.name for made in known.files] != [f.name for f in files]:
            return False
        for i, (made, file) in enumerate(zip(known.files, files, strict=True)):
            problem = ""
            if not file.is_file():
                problem = "is gone"
            elif (size := file.stat().st_size) != made.nbytes:
                problem = f"has {size:,} bytes, not the {made.nbytes:,} that were written"
            elif file.stat().st_mtime_ns != made.mtime_ns:
                known.files[i] = _made(file)
                problem = "has changed since it was written" if known.files[i].xxh3 != made.xxh3 else ""
            if problem:
                click.echo(f"{name}: {file} {problem}; it is made again", err=True)
                return False
        self._remember(name, known)
        return True

    def _remember(self, name: str, done: Done) -> None:
        self._state[name] = done
        self.folder.path.mkdir(parents=True, exist_ok=True)
        part = self.folder.state.with_suffix(".part")
        part.write_text(json.dumps({stage: asdict(d) for stage, d in self._state.items()}))
        part.replace(self.folder.state)

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
            key = _key(__version__, self.source.identity, self.mla_layout, words.digest, words.n_ctx, words.chunks)
            self.stage("imatrix", key, [self.folder.imatrix], lambda: self._collected(words))
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
        ours = self.fresh or "quantize" in self._state  # else an existing file is somebody's who never ran this recipe here
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=self.inputs)
        if "validate" in self.texts:
            self._check_validation()
        return plan

    def quantize(self) -> Plan:
        replaced: list[tuple[str, int]] | None = [] if self.allow_nonfinite else None
        plan = self._plan(self._importance(), replaced)

        def work() -> dict[str, Any]:
            # A journal of this very plan is gone on with; one of an earlier recipe in this folder of ours is not.
            journal = journal_path(plan)
            known = journal.read_bytes().partition(b"\n")[0] if journal.exists() and not self.fresh else b""
            resume = plan.fingerprint.encode() in known
            try:
                with byte_progress(plan.total_bytes, "quantize") as progress:
                    result = execute(plan, threads=self.threads, resume=resume, force=not resume, progress=progress)
            except MillError as error:
                if isinstance(error.__cause__, MillError):  # of a tensor; the rest is kept
                    raise MillError(f"{error.__cause__}; {self.to_go_on}") from error
                raise
            warn_replaced(replaced or ())
            return {"resumed": result.resumed}

        self.stage("quantize", plan.fingerprint, [f.path for f in plan.files], work)
        return plan

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
            with chunk_progress("validate") as progress:
                result = perplexity(
                    models["result"],
                    words.tokens,
                    n_ctx=words.n_ctx,
                    chunks=words.chunks,
                    on_chunk=progress,
                    baseline=models[name],
                )
            base = self._baseline
            found: dict[str, Any] = {"baseline": name, "baseline_bytes": base.total_bytes}
            found |= {"baseline_bits": base.bits_per_weight, **result.as_json()}
            if prompt:
                found["texts"] = {
                    label: generate(model, prompt, n_predict=length, temp=0).text() for label, model in models.items()
                }
            return found

        key = _key(__version__, plan.fingerprint, words.digest, words.n_ctx, words.chunks, name, prompt, length)
        return self.stage("validate", key, [], work)

    def judge(self, validation: dict[str, Any] | None) -> list[str]:
        """What exceeds the limits that the recipe sets."""
        wanted, failures = self.recipe.stages.get("validate", {}), []
        for limit, figure in (("max_ppl_ratio", "ratio"), ("max_kld", "kld_mean")):
            if validation is not None and limit in wanted and validation[figure] > wanted[limit]:
                failures.append(f"{figure} is {validation[figure]:.4f}, the recipe allows {limit} = {wanted[limit]}")
        return failures

    def settings(self) -> str:
        nbytes = sum(p.stat().st_size for p in self.source.files if p.suffix in (".safetensors", ".gguf"))
        return f"source {self.source.path} ({len(self.source.tensors)} tensors, {gib(nbytes)} of weights)"


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(p) for p in parts]).encode()).hexdigest()


def _made(path: Path) -> Made:
    """The file as it is now, with its checksum. Large files are read with a bar."""
    before = path.stat()
    with byte_progress(before.st_size, "checksum", quiet=before.st_size < 1 << 30) as progress:
        xxh3 = span_checksum(path, 0, before.st_size, progress)
    return Made(path.name, before.st_size, before.st_mtime_ns, xxh3)


def _read_state(path: Path) -> dict[str, Done]:
    """What earlier runs left; nothing, with a warning, if the file is not one that `run` wrote."""
    if not path.exists():
        return {}
    try:
        return {stage: _done(entry) for stage, entry in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        click.echo(f"warning: {path} is damaged and counts as absent: every stage is done again", err=True)
        return {}


def _done(entry: dict[str, Any]) -> Done:
    """Raises TypeError or KeyError for what is not a `Done` as JSON."""
    files = [Made(**made) for made in entry["files"]]
    fits = isinstance(entry["key"], str) and isinstance(entry["seconds"], int | float)
    if not fits or not isinstance(entry["result"], dict | None) or not all(isinstance(m.name, str) for m in files):
        raise TypeError
    return Done(entry["key"], entry["seconds"], entry["result"], files)
