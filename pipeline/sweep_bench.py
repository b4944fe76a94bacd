"""`ggufmill sweep-bench`: speeds of prompts and generation over the depth of the context."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..runtime.evaluate.bench import Depth, sweep
from ..runtime.evaluate.provenance import describe_model, describe_program, describe_settings
from .common.models import ModelLike, open_model, window_settings
from .common.progress import OnProgress, Stage, reporting
from .reports.plots import plot_sweep
from .reports.style import check_picture

N_CTX, PROMPT = 4096, 512  # tokens


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


def sweep_benchmark(
    model: ModelLike,
    *,
    pp: int | None = None,
    tg: int | None = None,
    repetitions: int = 1,
    no_warmup: bool = False,
    plot: str | Path | None = None,
    n_ctx: int | None = None,
    progress: OnProgress | bool | None = None,
    **settings: Any,
) -> SweepResult:
    """How fast a model reads and generates as its context fills up, as llama-sweep-bench measures it.

    At each depth tokens are generated and taken back, then a prompt is read that stays.

    model      as for `perplexity`
    pp         prompt tokens per step; None: `ubatch` if that is given, else 512
    tg         tokens generated per step; None: a quarter of the prompt's
    repetitions
               of both at each depth: the figures are means, and the picture has their standard deviations
    no_warmup  measure at once: the first figures then include the compiling of kernels
    plot       a picture of the speeds (.png, .svg, .pdf), which needs matplotlib
    n_ctx      tokens of context; None: 4096
    settings   of `load_model`, as for `perplexity`
    progress   stage 'sweep-bench' in depths, `partial` the `SweepResult` so far

    Returns a `SweepResult`. Raises PlanError when not one step fits into the context.

    Example:
        >>> from ggufmill import sweep_benchmark
        >>> from ggufmill.recipes import FOLDER
        >>> [row.n_kv for row in sweep_benchmark(FOLDER / "demo", n_ctx=48, pp=16, tg=4, threads=1).rows]
        [0, 16, 32]
    """
    if plot is not None:
        check_picture(Path(plot))
    context, step = n_ctx or N_CTX, pp or settings.get("ubatch", PROMPT)
    opened = open_model(model, window_settings(model, context, settings))
    result = SweepResult([], context, describe_model(opened), describe_settings(opened), describe_program())
    with reporting(progress) as report:
        stage = Stage(report, "sweep-bench", len(range(0, context - max(step, tg or 0) + 1, step)), "depth")
        for depth in sweep(opened, context, step, tg, not no_warmup, repetitions):
            result.rows.append(depth)
            stage.advance(1, f"{depth.n_kv} tokens", result)
    if plot is not None:
        types, used = ", ".join(list(result.about["types"])[:2]), result.settings
        title = f"{Path(opened.source.path).name} ({types}), {used['threads']} threads"
        plot_sweep(result.rows, f"{title}, cache {used['cache_k']}/{used['cache_v']}", Path(plot))
    return result
