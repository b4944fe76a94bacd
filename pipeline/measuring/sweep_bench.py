"""`ggufmill sweep-bench`: speeds of prompts and generation over the depth of the context."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...runtime.evaluate.bench import Depth, sweep
from ...runtime.evaluate.provenance import describe_model, describe_program, describe_settings
from ..common.models import fast_settings, open_model, window_settings
from ..common.progress import Stage, reporting
from ..common.shown import shown
from ..reports.plots import plot_sweep
from ..reports.style import check_picture
from ..requests.measure import SweepRequest
from ..requests.running import settings_of
from ..requests.verb import verb

N_CTX, PROMPT = 4096, 512  # tokens


@shown
@dataclass
class SweepResult:
    """Speeds by depth, and what they were measured on.

    rows      a `Depth` for each step: pp prompt tokens and tg generated ones with n_kv tokens in the cache, in t_pp and t_tg
              seconds; s_pp and s_tg are tokens per second
    n_kv_max  tokens of context
    about     the model: files with digests, types, recipe and imatrix
    settings  that it ran with
    program   versions and processor
    """

    rows: list[Depth]
    n_kv_max: int
    about: dict[str, Any]
    settings: dict[str, Any]
    program: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: rows (with speed_pp and speed_tg), n_kv_max, about, settings, program."""
        return {**vars(self), "rows": [row_json(row) for row in self.rows]}


def row_json(depth: Depth) -> dict[str, Any]:
    """A row as JSON."""
    return asdict(depth) | {"speed_pp": depth.s_pp, "speed_tg": depth.s_tg}


@verb(SweepRequest)
def sweep_benchmark(request: SweepRequest) -> SweepResult:
    """How fast a model reads and generates as its context fills up, as llama-sweep-bench measures it.

    At each depth tokens are generated and taken back, then a prompt is read that stays.

    Returns a `SweepResult`. Raises PlanError when not one step fits into the context.

    Example:
        >>> from ggufmill import sweep_benchmark
        >>> from ggufmill.recipes import FOLDER
        >>> [row.n_kv for row in sweep_benchmark(FOLDER / "demo", n_ctx=48, pp=16, tg=4, threads=1).rows]
        [0, 16, 32]
    """
    settings = settings_of(request, "n_ctx")
    if request.plot is not None:
        check_picture(Path(request.plot))
    context, step = request.n_ctx or N_CTX, request.pp or settings.get("ubatch", PROMPT)
    opened = open_model(request.model, fast_settings(request.model, window_settings(request.model, context, settings)))
    result = SweepResult([], context, describe_model(opened), describe_settings(opened), describe_program())
    with reporting(request.progress) as report:
        stage = Stage(report, "sweep-bench", len(range(0, context - max(step, request.tg or 0) + 1, step)), "depth")
        for depth in sweep(opened, context, step, request.tg, not request.no_warmup, request.repetitions):
            result.rows.append(depth)
            stage.advance(1, f"{depth.n_kv} tokens", result)
    if request.plot is not None:
        types, used = ", ".join(list(result.about["types"])[:2]), result.settings
        title = f"{Path(opened.source.path).name} ({types}), {used['threads']} threads"
        plot_sweep(result.rows, f"{title}, cache {used['cache_k']}/{used['cache_v']}", Path(request.plot))
    return result
