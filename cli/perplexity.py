"""`ggufmill perplexity` scores a text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.console import emit, table, warn
from ..pipeline.reports.result_comparison import comparison_text, origin, origin_lines, read_result, setting_text
from .options import flags
from .options.settings import load, run_options

if TYPE_CHECKING:
    from ..runtime.evaluate.perplexity import Perplexity


@click.command(short_help="Perplexity and KL divergence on a text")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-f", "--file", "text", type=flags.FILE, required=True, help="Text to read.")
@run_options(n_ctx=512)
@flags.chunks
@click.option(
    "--kl-divergence",
    "baseline",
    metavar="MODEL",
    type=click.Path(exists=True, path_type=Path),
    help="Compare with this model, usually the bf16 one: KL divergence and agreement on the top token.",
)
@click.option("--full-hash", is_flag=True, help="Digest of every byte of the model files, not of samples of large ones.")
@click.option(
    "--compare-with",
    "earlier",
    metavar="RESULT",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What an earlier run wrote with --json: says whether the two can be compared, and how they differ.",
)
@flags.as_json
def command(
    model: Path,
    text: Path,
    chunks: int | None,
    baseline: Path | None,
    full_hash: bool,
    earlier: Path | None,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """Perplexity of MODEL (a GGUF or a Hugging Face folder) on a text, as llama-perplexity measures it.

    The text is cut into windows of the context size, and the second half of each is scored. Compare figures only
    for the same text, context and number of windows.

    \b
    Examples:
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw --kl-divergence model-bf16.gguf --chunks 40
    """
    from ..convert import open_source
    from ..imatrix.texts import decoded
    from ..runtime.evaluate.perplexity import perplexity
    from ..runtime.evaluate.provenance import compare_results, describe_program, describe_settings, describe_text

    before = read_result(earlier) if earlier is not None else None
    data = text.read_bytes()
    words = decoded(data, text)
    loaded = load(open_source(model), settings)
    base = load(open_source(baseline), settings) if baseline is not None else None
    running = _Running(as_json, base is not None, max(1, loaded.settings.batch // settings["n_ctx"]))
    try:
        result = perplexity(loaded, words, n_ctx=settings["n_ctx"], chunks=chunks, on_chunk=running, baseline=base)
    finally:
        running.end()
    warn(result.notes)
    about = {"about": origin(loaded, full_hash), "baseline_about": None}
    if base is not None:
        about["baseline_about"] = origin(base, full_hash)
    summary = {
        "model": str(model),
        "text": str(text),
        "baseline": str(baseline) if baseline else None,
        **result.as_json(),
        **about,
        "settings": describe_settings(loaded),
        "text_digest": describe_text(data, text.name),
        "program": describe_program(),
    }
    verdict = compare_results(summary, before) if before is not None else None
    if verdict is not None:
        summary["compared_with"] = {"path": str(earlier), **verdict}

    def for_people() -> str:
        parts = [_report(result), table(("origin", ""), _origin(summary))]
        if before is not None and verdict is not None:
            parts.append(comparison_text(summary, before, verdict))
        return "\n\n".join(parts)

    emit(summary, as_json, for_people)


_RUNNING = ("perplexity", "ln(ratio)", "KL divergence", "     Δp RMS     ", " same top token")


class _Running:
    """Running values as llama-perplexity prints them (on stderr beside JSON), and after the first pass how long it will take.

    together: windows of one pass.
    """

    def __init__(self, as_json: bool, compared: bool, together: int):
        self.err, self.compared, self.together = as_json, compared, together
        self.began, self.open = time.monotonic(), False

    def __call__(self, so_far: Perplexity, total: int) -> None:
        done = so_far.chunks
        if done == 1:
            self._estimate(total)
        if not self.compared:
            self._say(f"[{done}]{so_far.perplexity:.4f},", newline=done == total)
            self.open = done < total
            return
        if done == 1:
            self._say("chunk  " + "  ".join(f"{name:^19}" for name in _RUNNING[:3]) + "  " + "  ".join(_RUNNING[3:]))
        scale = (
            (so_far.perplexity, so_far.error, 9, 4, ""),
            (so_far.log_ratio, so_far.log_ratio_error, 9, 5, ""),
            (so_far.kld_mean, so_far.kld_error, 9, 5, ""),
            (so_far.delta_p_rms, so_far.delta_p_rms_error, 6, 3, " %"),
            (so_far.top1_agreement, so_far.top1_error, 6, 3, " %"),
        )
        cells = [f"{v:{w}.{d}f} ± {e or 0:{w - 2}.{d}f}{unit}" for v, e, w, d, unit in scale if v is not None]
        self._say(f"{done:5d}  " + "  ".join(cells))

    def _estimate(self, total: int) -> None:
        seconds, together = time.monotonic() - self.began, min(self.together, total)
        from ..pipeline.forecast import duration

        left = duration(seconds * total / together)
        click.echo(f"perplexity: {seconds:.2f} seconds per pass of {together} windows, {left} for all {total}", err=True)

    def _say(self, text: str, newline: bool = True) -> None:
        click.echo(text, nl=newline, err=self.err)

    def end(self) -> None:
        if self.open:
            self._say("")


def _report(r: Perplexity) -> str:
    lines = [f"Final estimate: PPL = {_with_error(r.perplexity, r.error, 4)}"]
    lines.append(
        f"{r.chunks} windows of {r.n_ctx} tokens, {r.tokens_scored:,} predictions, {r.tokens_per_second:.1f} tokens per second"
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


def _origin(summary: dict[str, Any]) -> list[tuple[str, str]]:
    text, program = summary["text_digest"], summary["program"]
    rows = origin_lines(summary["about"], "model")
    if summary["baseline_about"] is not None:
        rows += origin_lines(summary["baseline_about"], "baseline")
    return [
        *rows,
        ("text", f"{text['name']}, {text['nbytes']:,} bytes, xxh3 {text['xxh3']}; tokens {summary['tokens_xxh3']}"),
        ("settings", setting_text(summary["settings"])),
        ("program", f"ggufmill {program['ggufmill']}, numba {program['numba']}, {program['cpu']}"),
    ]
