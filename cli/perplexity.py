"""`ggufmill perplexity` scores a text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.messages import duration
from .command import Verb
from .display.console import emit, progress_bars, table
from .display.origins import comparison_text, origin_rows, settings_text
from .options import flags
from .options.settings import run_options
from .options.types import FILE, MODEL, TEXT

if TYPE_CHECKING:
    from ..pipeline.common.progress import Progress
    from ..pipeline.perplexity import PerplexityResult
    from ..runtime.evaluate.perplexity import Perplexity


@click.command(cls=Verb)
@click.argument("model", type=MODEL)
@click.option("-f", "--file", "text", type=TEXT, required=True, help="Text to read.")
@run_options(n_ctx=512)
@flags.chunks
@click.option(
    "--kl-divergence",
    metavar="MODEL",
    type=MODEL,
    help="Compare with this model, usually the bf16 one: KL divergence and agreement on the top token.",
)
@click.option("--mtp", is_flag=True, help="Rate each draft layer too: perplexity, agreement with the model, acceptance.")
@click.option("--full-hash", is_flag=True, help="Digest of every byte of the model files, not of samples of large ones.")
@click.option(
    "--compare-with",
    metavar="RESULT",
    type=FILE,
    help="What an earlier run wrote with --json: says whether the two can be compared, and how they differ.",
)
@flags.cluster
@flags.as_json
def command(model: Any, text: Any, as_json: bool, settings: dict[str, Any], **options: Any) -> None:
    """Perplexity of MODEL (a GGUF or a Hugging Face folder) on a text, as llama-perplexity measures it.

    The text is cut into windows of the context size, and the second half of each is scored. Compare figures only
    for the same text, context and number of windows.

    \b
    Examples:
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw --kl-divergence model-bf16.gguf --chunks 40
    """
    from ..pipeline.perplexity import N_CTX, perplexity
    from ..runtime import Settings

    together = max(1, settings.get("batch", Settings().batch) // settings.get("n_ctx", N_CTX))
    running = _RunningValues(as_json, options["kl_divergence"] is not None, together)
    with progress_bars() as bars:

        def progress(report: Progress) -> None:
            (running if report.stage == "perplexity" else bars)(report)

        try:
            result = perplexity(model, text, progress=progress, **options, **settings)
        finally:
            running.end()
    emit(result.as_json(), as_json, lambda: _text(result))


_COLUMNS = ("perplexity", "ln(ratio)", "KL divergence", "     Δp RMS     ", " same top token")


class _RunningValues:
    """Prints running values as llama-perplexity does (on stderr beside JSON), and after the first pass how long all will take.

    compared: there is a baseline. together: windows of one pass.
    """

    def __init__(self, as_json: bool, compared: bool, together: int):
        self.err, self.compared, self.together = as_json, compared, together
        self.start, self.line_is_open = time.monotonic(), False

    def __call__(self, report: Progress) -> None:
        so_far: Perplexity | None = report.partial
        if so_far is None or report.total is None:
            self.start = time.monotonic()
            return
        done, total = report.done, report.total
        if done == 1:
            self._estimate(total)
        if not self.compared:
            self._say(f"[{done}]{so_far.perplexity:.4f},", newline=done == total)
            self.line_is_open = done < total
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
        seconds, together = time.monotonic() - self.start, min(self.together, total)
        left = duration(seconds * total / together)
        click.echo(f"perplexity: {seconds:.2f} seconds per pass of {together} windows, {left} for all {total}", err=True)

    def _say(self, text: str, newline: bool = True) -> None:
        click.echo(text, nl=newline, err=self.err)

    def end(self) -> None:
        """Ends a line of values that an error interrupted."""
        if self.line_is_open:
            self._say("")


def _text(result: PerplexityResult) -> str:
    parts = [_figures(result), table(("origin", ""), _origin(result))]
    if result.earlier is not None and result.compared_with is not None:
        parts.append(comparison_text(result.as_json(), result.earlier, result.compared_with))
    return "\n\n".join(parts)


def _figures(r: Perplexity) -> str:
    lines = [f"Final estimate: PPL = {_with_error(r.perplexity, r.error, 4)}"]
    lines.append(
        f"{r.chunks} windows of {r.n_ctx} tokens, {r.tokens_scored:,} predictions, {r.tokens_per_second:.1f} tokens per second"
    )
    for number, draft in enumerate(r.mtp or [], 1):
        lines.append(
            f"draft layer {number}: perplexity {draft.perplexity:.4f}, same top token as the model {draft.top1_agreement:.2f} %"
            f" (drafts accepted at temperature 0), accepted at temperature 1 {100 * draft.acceptance:.2f} %"
        )
    if r.kld_mean is None:
        return "\n".join(lines)
    perplexities = [
        ("perplexity", _with_error(r.perplexity, r.error)),
        ("perplexity of the baseline", _with_error(r.baseline_perplexity, r.baseline_error)),
        ("ratio", _with_error(r.ratio, r.ratio_error)),
        ("ln(ratio)", _with_error(r.log_ratio, r.log_ratio_error)),
        ("difference", _with_error(r.difference, r.difference_error)),
        ("correlation of the losses", f"{100 * r.correlation:.2f} %" if r.correlation is not None else ""),
        ("KL divergence, mean", _with_error(r.kld_mean, r.kld_error)),
        ("change of probability Δp, mean", _with_error(r.delta_p_mean, r.delta_p_error, 3, " %")),
        ("Δp, root mean square", _with_error(r.delta_p_rms, r.delta_p_rms_error, 3, " %")),
        ("same top token", _with_error(r.top1_agreement, r.top1_error, 3, " %")),
    ]
    klds, deltas = r.kld_percentiles or {}, r.delta_p_percentiles or {}
    spread = [("minimum", f"{r.kld_min:.6f}", f"{r.delta_p_min:.3f} %")]
    spread += [
        (f"{p} %" if p != "50" else "median", f"{klds[p]:.6f}" if p in klds else "", f"{delta:.3f} %")
        for p, delta in deltas.items()
    ]
    spread.append(("maximum", f"{r.kld_max:.6f}", f"{r.delta_p_max:.3f} %"))
    return "\n\n".join(
        ["\n".join(lines), table(("against the baseline", "value"), perplexities), table(("", "KL divergence", "Δp"), spread)]
    )


def _with_error(value: float | None, error: float | None, digits: int = 6, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "") + unit


def _origin(result: PerplexityResult) -> list[tuple[str, str]]:
    text, program = result.text_digest, result.program
    rows = origin_rows(result.about, "model")
    if result.baseline_about is not None:
        rows += origin_rows(result.baseline_about, "baseline")
    return [
        *rows,
        ("text", f"{text['name']}, {text['nbytes']:,} bytes, xxh3 {text['xxh3']}; tokens {result.tokens_xxh3}"),
        ("settings", settings_text(result.settings)),
        ("program", f"ggufmill {program['ggufmill']}, numba {program['numba']}, {program['cpu']}"),
    ]
