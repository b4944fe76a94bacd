"""The stages of `run`: each leaves a file and a key of all that decided it, and is not done again while the key holds."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..convert import open_source
from ..formats import TYPES, PlanError, TensorSource
from ..formats.execute import execute, journal_path, preflight
from ..formats.plan import Plan, parse_size
from ..imatrix.collect import collect
from ..imatrix.entries import Imatrix
from ..imatrix.files import load
from ..quantize.planning import Importance, plan_quantize
from ..quantize.recipe import Recipe, parse_type
from ..quantize.source import rounded
from ..runtime import Model, load_model
from ..runtime.generate import generate
from ..runtime.perplexity import perplexity
from .console import byte_progress, chunk_progress, gib


@dataclass(frozen=True)
class Folder:
    """Where a run keeps what it makes. state.json: stage -> key and result."""

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


class Run:
    """One run of a TOML recipe. Paths in the recipe count from its own folder.

    Raises MillError before any work when a stage could not be done: a missing file, an unknown type, too little disk.
    """

    def __init__(self, recipe: Recipe, base: Path, folder: Folder, *, threads: int | None = None, fresh: bool = False):
        self.recipe, self.base, self.folder, self.threads, self.fresh = recipe, base, folder, threads, fresh
        stages = recipe.stages
        if "source" not in stages or "model" not in stages["source"]:
            raise PlanError(f"{recipe.name}: a recipe to run needs [source] model = ...")
        layout = stages.get("convert", {}).get("mla_layout", "ik")
        self.source = open_source(self._path(stages["source"]["model"]), mla_layout=layout)
        self.texts = {
            stage: self._path(stages[stage]["text"]) for stage in ("imatrix", "validate") if "text" in stages.get(stage, {})
        }
        self.seconds: dict[str, float] = {}
        self._state: dict[str, Any] = {} if fresh or not folder.state.exists() else json.loads(folder.state.read_text())

    def _path(self, name: str) -> Path:
        path = self.base / name
        if not path.exists():
            raise PlanError(f"{self.recipe.name}: {path} does not exist")
        return path

    def stage(self, name: str, key: str, done: bool, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's result: remembered if its key is the same and its file is there, else worked out now."""
        known = self._state.get(name)
        if known is not None and known["key"] == key and done:
            click.echo(f"{name}: done before, nothing has changed", err=True)
            self.seconds[name] = known["seconds"]
            return known["result"]
        self.folder.path.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        self._state[name] = {"key": key, "result": result, "seconds": self.seconds[name]}
        part = self.folder.state.with_suffix(".part")
        part.write_text(json.dumps(self._state))
        part.replace(self.folder.state)
        return result

    # -- imatrix

    @cached_property
    def _source_model(self) -> Model:
        return load_model(self.source)

    def imatrix(self) -> Imatrix | None:
        """Computed from the recipe's text through the source itself, or read from its file; None without an [imatrix] table."""
        wanted = self.recipe.stages.get("imatrix", {})
        if "file" in wanted:
            return load(self._path(wanted["file"])).fit(self.source, wanted["file"])
        if "imatrix" not in self.texts:
            return None
        n_ctx, chunks = int(wanted.get("ctx", 512)), wanted.get("chunks")
        text = self.texts["imatrix"]

        def work() -> dict[str, Any]:
            tokens = self._source_model.tokenizer.encode(text.read_text("utf-8"))
            with chunk_progress("imatrix") as progress:
                made, result = collect(
                    self._source_model, tokens, dataset=text.name, n_ctx=n_ctx, chunks=chunks, on_chunk=progress
                )
            made.save(self.folder.imatrix)
            return {"chunks": made.chunk_count, "perplexity": result.perplexity, "starved": made.starved()}

        key = _key(__version__, self.source.identity, _file_digest(text), n_ctx, chunks)
        self.stage("imatrix", key, self.folder.imatrix.exists(), work)
        return load(self.folder.imatrix).fit(self.source, str(self.folder.imatrix))

    # -- quantize

    def plan(self, imatrix: Imatrix | None) -> Plan:
        wanted = self.recipe.stages.get("quantize", {})
        limit = wanted.get("split_max_size")
        return plan_quantize(
            self.source,
            self.folder.gguf,
            type=parse_type(wanted["type"], f"{self.recipe.name}, [quantize] type") if "type" in wanted else None,
            rules=self.recipe.rules,
            recipe_text=self.recipe.text,
            importance=Importance(imatrix.means(), imatrix.metadata(self.folder.imatrix.name)) if imatrix else None,
            ignore_imatrix_rules="imatrix" in self.recipe.stages,
            split_max_size=parse_size(limit) if limit else None,
            version=__version__,
        )

    def check(self) -> Plan:
        """The preflight: everything that can be known before any work. Returns the plan as far as sizes go."""
        plan = self.plan(None)
        ours = self.fresh or "quantize" in self._state  # else an existing file is somebody's who never ran this recipe here
        preflight(plan, force=ours, resume=journal_path(plan).exists(), inputs=self.source.files)
        return plan

    def quantize(self, imatrix: Imatrix | None) -> Plan:
        plan = self.plan(imatrix)

        def work() -> dict[str, Any]:
            # A journal of this very plan is gone on with; one of an earlier recipe in this folder of ours is not.
            resume = journal_path(plan).exists() and plan.fingerprint in journal_path(plan).read_text().partition("\n")[0]
            with byte_progress(plan.total_bytes, "quantize") as progress:
                result = execute(plan, threads=self.threads, resume=resume, force=not resume, progress=progress)
            return {"resumed": result.resumed}

        self.stage("quantize", plan.fingerprint, all(f.path.exists() for f in plan.files), work)
        return plan

    # -- validate

    def validate(self, plan: Plan) -> dict[str, Any] | None:
        """Perplexity of baseline and result with the divergence between them, and a text from each; None without [validate]."""
        wanted = self.recipe.stages.get("validate", {})
        if "validate" not in self.texts:
            return None
        n_ctx, chunks, text = int(wanted.get("ctx", 512)), wanted.get("chunks"), self.texts["validate"]
        name, prompt = wanted.get("baseline", "bf16"), wanted.get("prompt", "")

        def work() -> dict[str, Any]:
            # The baseline is what a file of that type would hold: the source's weights rounded to it, without the file.
            base_plan = plan_quantize(self.source, self.folder.gguf, type=TYPES[name])
            models = {
                name: load_model(rounded(self.source, base_plan)),
                "result": load_model(open_source(plan.files[0].path)),
            }
            words = text.read_text("utf-8")
            with chunk_progress("validate") as progress:
                result = perplexity(
                    models["result"], words, n_ctx=n_ctx, chunks=chunks, on_chunk=progress, baseline=models[name]
                )
            found: dict[str, Any] = {
                "baseline": name,
                "baseline_bytes": base_plan.total_bytes,
                "baseline_bits": base_plan.bits_per_weight,
                **result.as_json(),
            }
            if prompt:
                length = int(wanted.get("n", 64))
                found["texts"] = {
                    label: generate(model, prompt, n_predict=length, temp=0).text() for label, model in models.items()
                }
            return found

        key = _key(__version__, plan.fingerprint, _file_digest(text), n_ctx, chunks, name, prompt, wanted.get("n", 64))
        return self.stage("validate", key, True, work)

    def judge(self, validation: dict[str, Any] | None) -> list[str]:
        """What exceeds the limits that the recipe sets."""
        wanted, failures = self.recipe.stages.get("validate", {}), []
        for limit, figure in (("max_ppl_ratio", "ratio"), ("max_kld", "kld_mean")):
            if validation is not None and limit in wanted and validation[figure] > wanted[limit]:
                failures.append(f"{figure} is {validation[figure]:.4f}, the recipe allows {limit} = {wanted[limit]}")
        return failures

    def settings(self) -> str:
        return f"source {self.source.path} ({len(self.source.tensors)} tensors, {gib(_source_bytes(self.source))} of weights)"


def _source_bytes(source: TensorSource) -> int:
    return sum(p.stat().st_size for p in source.files if p.suffix in (".safetensors", ".gguf"))


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(p) for p in parts]).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
