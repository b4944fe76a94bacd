"""`ggufmill perplexity`: how well a model predicts a text, and how far it is from a baseline."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..imatrix.texts import decode_text
from ..runtime.evaluate.perplexity import Perplexity
from ..runtime.evaluate.perplexity import perplexity as score_text
from ..runtime.evaluate.provenance import compare_results, describe_program, describe_settings, describe_text
from .cluster.windows import scoring_on
from .common.messages import warn
from .common.models import ModelLike, describe_origin, model_name, open_model, settings_of_each, window_settings
from .common.progress import WINDOWS, OnProgress, Stage, reporting

N_CTX = 512


@dataclass(frozen=True, kw_only=True)
class PerplexityResult(Perplexity):
    """The figures of `Perplexity` (perplexity, error, chunks, ..., with a baseline kld_mean, top1_agreement, ...), and what
    they were measured on.

    model, text, baseline   as they were given
    about, baseline_about   the models: files with digests, types, recipe and imatrix
    settings                that the model ran with
    text_digest, program    size and digest of the text; versions and processor
    earlier, compared_with  the result that this one was compared with, and the verdict: comparable, obstacles, differences,
                            ratio
    """

    model: str
    text: str
    baseline: str | None
    about: dict[str, Any]
    baseline_about: dict[str, Any] | None
    settings: dict[str, Any]
    text_digest: dict[str, Any]
    program: dict[str, Any]
    earlier: dict[str, Any] | None = field(default=None, repr=False)
    compared_with: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """What --json prints: model, text and baseline, the figures that have a value, and the origin of all."""
        beside = ("model", "text", "baseline", "about", "baseline_about", "settings", "text_digest", "program")
        left_out = (*beside, "earlier", "compared_with")
        figures = {name: value for name, value in super().as_json().items() if name not in left_out}
        summary = {name: getattr(self, name) for name in beside[:3]} | figures | {n: getattr(self, n) for n in beside[3:]}
        return summary | ({"compared_with": self.compared_with} if self.compared_with is not None else {})


def perplexity(
    model: ModelLike,
    text: str | Path,
    *,
    chunks: int | None = None,
    kl_divergence: ModelLike | None = None,
    mtp: bool = False,
    full_hash: bool = False,
    compare_with: str | Path | None = None,
    n_ctx: int | None = None,
    cluster: str | None = None,
    progress: OnProgress | bool | None = None,
    **settings: Any,
) -> PerplexityResult:
    """Scores a text as llama-perplexity does: it is cut into windows, and the second half of each is predicted.

    Compare figures only for the same text, context and number of windows.

    model          a GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave
    text           the file to read
    chunks         windows to read; None: all
    kl_divergence  a baseline with the same vocabulary, usually the bf16 model: KL divergence, agreement on the top token
    mtp            the draft layers (multi-token prediction) are rated, too: perplexity, agreement and acceptance of each
    full_hash      digests of every byte of the model files, not of samples of large ones
    compare_with   a file with what an earlier call printed with --json: whether the two can be compared, and how they differ
    n_ctx          tokens per window; None: 512
    cluster        workers run the windows, with the same figures: tcp://HOST:PORT, a scheduler file or local:N
    settings       of `load_model`: threads, batch, ubatch, cache_k, cache_v, flash, mla, attention_bytes, repack,
                   expert_reduction; none for a model that is loaded
    progress       stage 'perplexity' in windows, `partial` the `Perplexity` so far; with full_hash 'checksum' in bytes

    Returns a `PerplexityResult`. Raises PlanError when the text does not fill a window or the vocabularies differ, MillError
    naming the first tensor or layer whose output is not finite.

    Example:
        >>> from ggufmill import perplexity
        >>> from ggufmill.recipes import FOLDER
        >>> result = perplexity(FOLDER / "demo", FOLDER / "demo" / "heldout.txt", n_ctx=64, chunks=4)
        >>> result.chunks, result.tokens_scored, 10 < result.perplexity < 100
        (4, 124, True)
    """
    text, window = Path(text), n_ctx or N_CTX
    earlier = read_result(Path(compare_with)) if compare_with is not None else None
    data = text.read_bytes()
    content = decode_text(data, text)
    own, of_base = settings_of_each((model, kl_divergence), settings)
    own, of_base = window_settings(model, window, own), window_settings(kl_divergence or model, window, of_base)
    opened = open_model(model, own)
    base = open_model(kl_divergence, of_base) if kl_divergence is not None else None
    elsewhere = scoring_on(cluster, (model, opened, own), (kl_divergence, base, of_base), mtp)
    with reporting(progress) as report, elsewhere as run_windows:
        stage = Stage(report, "perplexity", unit=WINDOWS)

        def on_chunk(so_far: Perplexity, total: int) -> None:
            stage.reach(so_far.chunks, total, f"perplexity {so_far.perplexity:.4f}", so_far)

        figures = score_text(
            opened, content, n_ctx=window, chunks=chunks, on_chunk=on_chunk, baseline=base, mtp=mtp, elsewhere=run_windows
        )
        about = describe_origin(opened, full_hash, report)
        baseline_about = describe_origin(base, full_hash, report) if base is not None else None
    warn(figures.notes)
    result = PerplexityResult(
        **vars(figures),
        model=model_name(model),
        text=str(text),
        baseline=model_name(kl_divergence) if kl_divergence is not None else None,
        about=about,
        baseline_about=baseline_about,
        settings=describe_settings(opened),
        text_digest=describe_text(data, text.name),
        program=describe_program(),
        earlier=earlier,
    )
    if earlier is None:
        return result
    verdict = compare_results(result.as_json(), earlier)
    return replace(result, compared_with={"path": str(compare_with), **verdict})


def read_result(path: Path) -> dict[str, Any]:
    """An earlier result as `perplexity --json` printed it. Raises PlanError for anything else."""
    try:
        result: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        result = None
    losses = result.get("window_losses") if isinstance(result, dict) else None
    numbers = [result.get("perplexity"), *(losses or [])] if isinstance(result, dict) and isinstance(losses or [], list) else []
    fits = all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
    if not numbers or not fits or "tokens_xxh3" not in result:
        raise PlanError(f"{path} is not a result of `ggufmill perplexity --json`")
    return result
