"""`ggufmill perplexity` scores a text."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.common.figures import (
    BITS,
    DIVERGENCE,
    DIVERGENCE_DIGITS,
    PERPLEXITY,
    SAME_TOP,
    SHARE_DIGITS,
    SIZE,
    bits_text,
    duration,
    error_text,
    file_bytes_of,
    per_cent_text,
    share_text,
    size_text,
    windows_text,
)
from ...pipeline.requests.measure import PerplexityRequest, TasksRequest
from ...simd.compile.compile_time import seconds_without_compilation
from ..command import Verb
from ..display.console import above_bars, call, emit, progress_bars, table
from ..display.messages import say
from ..display.origins import comparison_text, origin_rows, settings_text, stored_rows
from ..options import flags
from ..options.fields import options_of
from ..options.sections import SectionedOption
from ..options.types import MODEL, ModelPath

if TYPE_CHECKING:
    from ...pipeline.common.progress import Bars, Progress
    from ...pipeline.measuring.perplexity import PerplexityResult, PerplexityTable, TaskResult
    from ...runtime.evaluate.perplexity import Perplexity


_STORED = "-"  # --kl-divergence without a value


class _Baseline(ModelPath):
    """A model or a file of predictions; True for the one that --kl-divergence-base names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return True if value in (_STORED, True) else super().convert(value, param, ctx)


# kind of tasks -> how many are taken without --KIND-tasks; None: all
_TASKS = {"hellaswag": 400, "winogrande": None, "multiple-choice": None}
_UNDER: dict[str, Any] = {"cls": SectionedOption, "section": "Tasks"}
_TASK_OPTIONS = [
    option
    for kind, default in _TASKS.items()
    for option in (
        click.option(f"--{kind}", is_flag=True, help=f"Score {kind} tasks: -f has them, as llama-perplexity reads.", **_UNDER),
        click.option(
            f"--{kind}-tasks",
            metavar="N",
            type=click.IntRange(0),
            help=f"Score this many tasks, drawn at random; 0 scores all. [default: {default or 'all'}]",
            **_UNDER,
        ),
    )
]


def _task(values: dict[str, Any]) -> tuple[str, int | None] | None:
    """The kind of tasks that were asked for, and how many; None: none."""
    asked = [kind for kind in _TASKS if values[kind.replace("-", "_")]]
    given = {kind: values[f"{kind.replace('-', '_')}_tasks"] for kind in _TASKS}
    if len(asked) > 1:
        raise click.UsageError(f"--{asked[0]} and --{asked[1]}: one kind of tasks at a time")
    for kind, count in given.items():
        if count is not None and kind not in asked:
            raise click.UsageError(f"--{kind}-tasks does nothing without --{kind}")
    if not asked:
        return None
    count = given[asked[0]]
    return asked[0], (_TASKS[asked[0]] if count is None else count or None)


_names = [name for kind in _TASKS for name in (kind.replace("-", "_"), f"{kind.replace('-', '_')}_tasks")]
_task_options = flags.gathered(_TASK_OPTIONS, _names, "task", _task)


@click.command(cls=Verb)
@options_of(
    PerplexityRequest,
    model={"type": MODEL, "nargs": -1},
    kl_divergence={"type": _Baseline(), "is_flag": False, "flag_value": _STORED},
)
@_task_options
def command(model: tuple[Any, ...], text: Any, as_json: bool, task: tuple[str, int | None] | None, **options: Any) -> None:
    """Measure the perplexity of MODEL (a GGUF or a Hugging Face folder) on a text, as llama-perplexity does.

    The text is cut into windows of the context size, and the second half of each is scored. Compare figures only
    for the same text, context and number of windows. Several models are compared with a baseline in one pass of it.

    \b
    Examples:
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw --kl-divergence model-bf16.gguf --chunks 40
      ggufmill perplexity model-bf16.gguf -f wiki.test.raw --kl-divergence-base bf16.kld
      ggufmill perplexity iq4_k.gguf iq3_k.gguf --kl-divergence bf16.kld
      ggufmill perplexity model-iq4_k.gguf -f hellaswag_val_full.txt --hellaswag
    """
    from ...pipeline.measuring.perplexity import N_CTX, perplexity, score_tasks
    from ...runtime import Settings

    if task is not None:
        _refuse_beside_tasks(model, text, options)
        kind, count = task
        taken = {name: value for name, value in options.items() if name in TasksRequest.__dataclass_fields__}
        call(score_tasks, model[0], text, kind, tasks=count, show=_task_text, as_json=as_json, **taken)
        return
    if len(model) > 1 or options["dry_run"]:
        call(perplexity, list(model) if len(model) > 1 else next(iter(model)), text, show=_table, as_json=as_json, **options)
        return
    together = max(1, options.get("batch", Settings().batch) // options.get("n_ctx", N_CTX))
    with progress_bars() as bars:
        running = _RunningValues(as_json, options["kl_divergence"] is not None, together, bars if sys.stderr.isatty() else None)

        def progress(report: Progress) -> None:
            (running if report.stage == "perplexity" else bars)(report)

        try:
            result = perplexity(next(iter(model)), text, progress=progress, **options)
        finally:
            running.end()
    emit(result.as_json, as_json, lambda: _text(result))


def _refuse_beside_tasks(model: tuple[Any, ...], text: Any, options: dict[str, Any]) -> None:
    """Raises click.UsageError for what has no meaning for tasks."""
    if len(model) > 1:
        raise click.UsageError("tasks are scored with one model")
    if text is None:
        raise click.UsageError("a file of tasks is missing (-f)")
    options.pop("n_ctx", None)  # as long as the tasks are
    for name, value in options.items():
        if name not in TasksRequest.__dataclass_fields__ and value not in (None, False):
            raise click.UsageError(f"--{name.replace('_', '-')} does nothing for tasks")


def _task_text(r: TaskResult) -> str:
    low, high = r.interval
    lines = [
        f"{r.kind}: {error_text(r.score, r.error, SHARE_DIGITS, ' %')} of {r.tasks:,} tasks; 95 %: {low:.2f} to {high:.2f}; "
        f"guessing: {r.chance:.2f}",
        *([f"{r.tasks} of {r.of} tasks in the file, at random"] if r.tasks < r.of else []),
    ]
    digest = r.text_digest
    rows = [*origin_rows(r.about, "model"), ("tasks", f"{digest['name']}, xxh3 {digest['xxh3']}")]
    return "\n".join([*lines, "", table(("origin", ""), [*rows, ("settings", settings_text(r.settings))])])


_COLUMNS = (PERPLEXITY, "ln(ratio)", DIVERGENCE, "     Δp RMS     ", " same top token")


class _RunningValues:
    """Prints running values as llama-perplexity does (on stderr beside JSON), and after the first pass how long all will take.

    compared: there is a baseline. together: windows of one pass. bars: in a terminal, below the values, where those of a
    pass have a line; None: there are only values.
    """

    def __init__(self, as_json: bool, compared: bool, together: int, bars: Bars | None):
        self.err, self.compared, self.together, self.bars = as_json, compared, together, bars
        self.start, self.line_is_open, self.values = seconds_without_compilation(), False, ""

    def __call__(self, report: Progress) -> None:
        if report.partial is not None and report.total is not None:
            self._add(report, report.total)
        elif not report.done and not report.share:
            self.start = seconds_without_compilation()
        if self.bars is not None:
            if report.partial is None or report.done == report.total:
                self.end()
            self.bars(report)

    def _add(self, report: Progress, total: int) -> None:
        so_far: Perplexity = report.partial[0]
        done = report.done
        if done == 1:
            self._estimate(total)
        if not self.compared:
            value = f"[{done}]{so_far.perplexity:.4f},"
            if self.bars is None:
                self._say(value, newline=done == total)
                self.line_is_open = done < total
            else:
                self.values += value
            return
        if done == 1:
            self._say("chunk  " + "  ".join(f"{name:^19}" for name in _COLUMNS[:3]) + "  " + "  ".join(_COLUMNS[3:]))
        columns = (
            (so_far.perplexity, so_far.error, 9, 4, ""),
            (so_far.log_ratio, so_far.log_ratio_error, 9, 5, ""),
            (so_far.kld_mean, so_far.kld_error, 9, 5, ""),
            (so_far.delta_p_rms, so_far.delta_p_rms_error, 6, 3, " %"),
            (so_far.top1_agreement, so_far.top1_error, 6, 3, " %"),
        )
        cells = [f"{v:{w}.{d}f} ± {e or 0:{w - 2}.{d}f}{unit}" for v, e, w, d, unit in columns if v is not None]
        self._say(f"{done:5d}  " + "  ".join(cells))

    def _estimate(self, total: int) -> None:
        seconds, together = seconds_without_compilation() - self.start, min(self.together, total)
        left = duration(seconds * total / together)
        with above_bars():
            say(f"perplexity: {seconds:.2f} seconds per pass of {together} windows, {left} for all {total}")

    def _say(self, text: str, newline: bool = True) -> None:
        with above_bars() if self.bars is not None else nullcontext():
            if self.err:
                say(text, newline=newline)
            else:
                click.echo(text, nl=newline)

    def end(self) -> None:
        """Writes the values of a pass; ends a line of values that an error interrupted."""
        if self.line_is_open or self.values:
            self._say(self.values)
        self.line_is_open, self.values = False, ""


def _text(result: PerplexityResult) -> str:
    parts = [_figures(result), table(("origin", ""), _origin(result))]
    if result.earlier is not None and result.compared_with is not None:
        parts.append(comparison_text(result.as_json(), result.earlier, result.compared_with))
    return "\n\n".join(parts)


def _figures(r: PerplexityResult) -> str:
    lines = [f"Final estimate: PPL = {error_text(r.perplexity, r.error, 4)}"]
    lines.append(f"{windows_text(r.chunks, r.n_ctx, r.tokens_scored)}, {r.tokens_per_second:.1f} tokens per second")
    for number, draft in enumerate(r.mtp or [], 1):
        lines.append(
            f"draft layer {number}: perplexity {draft.perplexity:.4f}, same top token as the model "
            f"{per_cent_text(draft.top1_agreement)} (drafts accepted at temperature 0), "
            f"accepted at temperature 1 {share_text(draft.acceptance, 2)}"
        )
    if r.kld_mean is None:
        return "\n".join(lines)
    noise = r.noise_floor
    confident = f"  where the baseline's top token has 50 % or more ({per_cent_text(r.confident_share or 0, 1)} of tokens)"
    perplexities = [
        ("perplexity", error_text(r.perplexity, r.error, 6)),
        ("perplexity of the baseline", error_text(r.baseline_perplexity, r.baseline_error, 6)),
        ("ratio", error_text(r.ratio, r.ratio_error, 6)),
        ("ln(ratio)", error_text(r.log_ratio, r.log_ratio_error, 6)),
        ("difference", error_text(r.difference, r.difference_error, 6)),
        ("correlation of the losses", share_text(r.correlation, 2) if r.correlation is not None else ""),
        ("KL divergence, mean", error_text(r.kld_mean, r.kld_error, 6)),
        *([("  of a baseline with rounded activations", error_text(noise.kld_mean, noise.kld_error, 6))] if noise else []),
        *([(confident, error_text(r.kld_confident, r.kld_confident_error, 6))] if r.kld_confident is not None else []),
        *([("  lacks, of tokens left out, about", f"{r.kld_missing:.6f}")] if r.kld_missing is not None else []),
        ("change of probability Δp, mean", error_text(r.delta_p_mean, r.delta_p_error, 3, " %")),
        ("Δp, root mean square", error_text(r.delta_p_rms, r.delta_p_rms_error, 3, " %")),
        (SAME_TOP, error_text(r.top1_agreement, r.top1_error, 3, " %")),
    ]
    klds, deltas = r.kld_percentiles or {}, r.delta_p_percentiles or {}
    spread = [("minimum", f"{r.kld_min:.6f}", f"{r.delta_p_min:.3f} %")]
    spread += [
        (f"{p} %" if p != "50" else "median", f"{klds[p]:.6f}" if p in klds else "", f"{delta:.3f} %")
        for p, delta in deltas.items()
    ]
    spread.append(("maximum", f"{r.kld_max:.6f}", f"{r.delta_p_max:.3f} %"))
    return "\n\n".join(
        ["\n".join(lines), table(("against the baseline", "value"), perplexities), table(("", DIVERGENCE, "Δp"), spread)]
    )


def _table(result: PerplexityTable) -> str:
    first = result.results[0]
    compared, is_bound = first.kld_mean is not None, first.kld_missing is not None  # of a baseline's most probable tokens
    divergence = (DIVERGENCE, *(("lacks about",) if is_bound else ()), "99.9 %", SAME_TOP)
    heads = ("model", SIZE, BITS, PERPLEXITY, *(divergence if compared else ()), "t/s")
    rows = []
    for r in result.results:
        row: list[object] = [r.model, size_text(file_bytes_of(r.about)), bits_text(r.about["bits_per_weight"])]
        row.append(error_text(r.perplexity, r.error, 4))
        if compared:
            kld = error_text(r.kld_mean, r.kld_error, DIVERGENCE_DIGITS)
            row += [kld, *([f"{r.kld_missing:.6f}"] if is_bound else [])]
            row += [(r.kld_percentiles or {})["99.9"], error_text(r.top1_agreement, r.top1_error, 2, " %")]
        rows.append([*row, f"{r.tokens_per_second:.1f}"])
    lines = [f"{windows_text(first.chunks, first.n_ctx, first.tokens_scored)}; tokens {first.tokens_xxh3}"]
    if compared:
        lines.append(f"baseline {first.baseline}, perplexity {error_text(first.baseline_perplexity, first.baseline_error, 4)}")
    if is_bound:
        lines.append("the KL divergences lack what the baseline's tokens left out take from them, which is estimated for each")
    noise = first.noise_floor
    if noise is not None:
        lines.append(f"noise floor (the baseline with rounded activations): {error_text(noise.kld_mean, noise.kld_error, 6)}")
    return "\n".join([*lines, "", table(heads, rows), *([""] * bool(result.paired)), *(each.text for each in result.paired)])


def _origin(result: PerplexityResult) -> list[tuple[str, str]]:
    text, program = result.text_digest, result.program
    rows = origin_rows(result.about, "model")
    if result.baseline_about is not None:
        rows += (stored_rows if "logits" in result.baseline_about else origin_rows)(result.baseline_about, "baseline")
    of_text = f"{text['name']}, {text['nbytes']:,} bytes, xxh3 {text['xxh3']}; " if text is not None else ""
    return [
        *rows,
        ("text", f"{of_text}tokens {result.tokens_xxh3}"),
        ("settings", settings_text(result.settings)),
        ("program", f"ggufmill {program['ggufmill']}, numba {program['numba']}, {program['cpu']}"),
    ]
