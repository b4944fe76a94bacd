"""Results of `evaluate` in a file, from which a later call takes what it need not measure again, or another joins them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import PlanError
from ...formats.file_range import read_text
from ...jobs.atomic_write import write_text
from ..common.messages import json_text

NOISE = "noise_floors"  # key of a file of results
Result = dict[str, Any]  # what `PerplexityResult.as_json` gives, with `key` and `stock`

# Settings that decide how fast a model is computed, or where, but not what.
_OF_SPEED = ("threads", "cpus", "numa", "batch", "ubatch", "parallel", "cache_bytes", "n_ctx", "checkpoints")
_NUMBERS = ("perplexity", "kld_mean", "top1_agreement", "baseline_perplexity", "n_ctx", "chunks", "tokens_scored")
_SAME_BASELINE = 1e-3  # relative difference of its perplexities, since it may be kept in rounded form


def result_key(
    about: Mapping[str, Any],
    tokens_xxh3: str,
    n_ctx: int,
    baseline: Sequence[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> str:
    """A digest of all that decides a result: the model's files, the windows' tokens, the baseline's files and the settings.

    about: of `describe_model`, of a stock mix with its `stock` and `identity`.
    """
    files = [[(file["nbytes"], file["digest"]) for file in each or ()] for each in (about["files"], baseline)]
    deciding = {name: value for name, value in settings.items() if name not in _OF_SPEED}
    made = about.get("stock"), about.get("identity")
    content = json.dumps([files, made, tokens_xxh3, n_ctx, deciding], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class ResultsFile:
    """Results by key, as they were measured, and those of baselines with rounded activations, which are the noise floors.
    Raises PlanError for a file that is something else."""

    def __init__(self, path: Path):
        self.path = path
        self.results: dict[str, Result] = {}
        self.noise: dict[str, Result] = {}
        if path.exists():
            self.results, self.noise = (
                {result["key"]: result for result in read_results(path, kind) if isinstance(result.get("key"), str)}
                for kind in ("results", NOISE)
            )

    def add(self, key: str, result: Result, *, is_noise: bool = False) -> None:
        """Adds a result, and writes the file."""
        (self.noise if is_noise else self.results)[key] = result
        noise = {NOISE: list(self.noise.values())} if self.noise else {}
        write_text(self.path, json_text({"results": list(self.results.values()), **noise}, indent=1) + "\n")


def read_results(path: Path, kind: str = "results") -> list[Result]:
    """The results in a file, or with NOISE the noise floors: of `evaluate`, or of `perplexity --json` with a baseline. Raises
    PlanError for anything else."""
    try:
        content: Any = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        content = None
    found = content.get(kind, [] if kind == NOISE else [content]) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(map(_is_result, found)):
        raise PlanError(f"{path} has no results of `ggufmill evaluate`, or of `ggufmill perplexity --json` with a baseline")
    return found


def _is_result(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("about"), dict):
        return False
    numbers = [value.get(name) for name in _NUMBERS] + [value["about"].get(name) for name in ("nbytes", "bits_per_weight")]
    return all(isinstance(number, int | float) and abs(number) < 1e300 for number in numbers) and "tokens_xxh3" in value


def why_not_comparable(result: Result, other: Result) -> str:
    """Why two results cannot stand in one table: ''  if they can."""
    for what, key in (("of another text, or of other windows of it", "tokens_xxh3"), ("of another context", "n_ctx")):
        if result[key] != other[key]:
            return what
    if not math.isclose(result["baseline_perplexity"], other["baseline_perplexity"], rel_tol=_SAME_BASELINE):
        return "against another baseline"
    return ""


def is_same_model(result: Result, other: Result) -> bool:
    """Whether two results are of the same files, or of the same stock mix."""
    files, other_files = ([file.get("digest") for file in each["about"].get("files", ())] for each in (result, other))
    return files == other_files and result["about"].get("stock") == other["about"].get("stock")
