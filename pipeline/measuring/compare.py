"""`ggufmill compare`: where two models differ, layer by layer and tensor by tensor."""

from __future__ import annotations

from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...errors import CheckFailed, PlanError, UsageError
from ...formats.file_range import read_file
from ...imatrix.texts import decode_text
from ...jobs.patterns import NamePattern
from ...runtime import Model
from ...runtime.evaluate.compare import THREAD_BYTES, Comparison, compare, weights_bytes, weights_seconds
from ...runtime.evaluate.provenance import describe_program, describe_settings, describe_text
from ...runtime.placement.stored_sizes import stored_nbytes
from ..common.arguments import as_bytes, as_pattern, refuse_unused
from ..common.forecast import Planned
from ..common.memory import warn_over
from ..common.models import describe_origin, model_name, open_model, settings_of_each, window_settings
from ..common.progress import WINDOWS, Stage, reporting
from ..common.reading import loaded_bytes, logits_bytes, reading_forecast, reading_seconds, started_bytes, tokenising_bytes
from ..common.shown import shown
from ..reports.plots import plot_comparison
from ..reports.style import check_picture
from ..requests.measure import CompareRequest
from ..requests.running import settings_of
from ..requests.verb import verb

N_CTX = 512


@shown
@dataclass
class ComparisonResult(Comparison):
    """The errors of `Comparison` (tokens, layers, output, tensors, only_a, only_b, reshaped, nonfinite), and their origin.

    a, b                   the models: files with digests, types, recipe and imatrix
    n_ctx                  tokens per window
    text_digest, settings  size and digest of the text, None without one; settings that both models ran with
    program                versions and processor
    """

    a: dict[str, Any] = field(default_factory=dict)
    b: dict[str, Any] = field(default_factory=dict)
    n_ctx: int = N_CTX
    text_digest: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields, the models first."""
        return {"a": self.a, "b": self.b, **super().as_json()}


@verb(CompareRequest)
def compare_models(request: CompareRequest) -> ComparisonResult | Planned:
    """Where model b differs from model a: errors of every layer's output on a text, and of every tensor's weights.

    Returns a `ComparisonResult`, with dry_run a `Planned`. Raises PlanError for models of different shape, UsageError for
    arguments that have nothing to act on, CheckFailed for an output that is not finite (NaN).

    Example:
        >>> from ggufmill import compare_models, quantize_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = quantize_model(FOLDER / "demo", "demo-q4.gguf", "q4_0", force=True)
        >>> result = compare_models(FOLDER / "demo", "demo-q4.gguf", tensors="ffn_down")
        >>> all(0.05 < tensor.relative < 0.15 for tensor in result.tensors)
        True
    """
    if request.no_weights and request.text is None:
        raise PlanError("--no-weights without a text (-f) leaves nothing to compare")
    if request.products and (request.text is None or request.no_weights):
        raise PlanError("--products needs a text (-f) and weights")
    if request.text is None:
        refuse_unused(request, "a text (-f)", "n_ctx", "chunks")
    if request.no_weights:
        refuse_unused(request, "weights (leave --no-weights out)", "tensors")
    if request.plot is not None:
        check_picture(Path(request.plot))
    window, pattern = request.n_ctx or N_CTX, as_pattern(request.tensors or "", "--tensors")
    each = settings_of_each((request.a, request.b), settings_of(request, "n_ctx"))
    models = [
        open_model(model, window_settings(model, window, own)) for model, own in zip((request.a, request.b), each, strict=True)
    ]
    if not (request.no_weights or any(pattern.search(name) for name in models[0].source.tensors)):
        raise UsageError(f"--tensors: no tensor of {model_name(request.a)} has {pattern.text!r} in its name")
    data = read_file(Path(request.text), pipes=True) if request.text is not None else None
    memory = as_bytes(request.memory)
    passes = _passes_memory(models, window, data is not None)
    threads = models[0].workers.count
    if memory is not None and passes is not None:
        warn_over(sum(passes), memory, f"a window of {window} tokens", "smaller ones (-c) take less")
        threads = max(1, min(threads, (memory - passes[0]) // THREAD_BYTES))
    if request.dry_run:
        chosen = None if request.no_weights else pattern
        return _planned(models, data is not None, window, request.chunks or 1, chosen, passes, threads)
    with reporting(request.progress) as report:
        total = sum(stored_nbytes(t) for model in models for t in model.source.tensors.values())
        of_weights = cache(lambda: Stage(report, "compare", total))
        of_layers = Stage(report, "layers", request.chunks or 1, WINDOWS) if data is not None else of_weights()
        with of_layers.watching(models[0]):
            comparison = compare(
                models[0],
                models[1],
                decode_text(data, Path(request.text)) if request.text is not None and data is not None else None,
                n_ctx=window,
                chunks=request.chunks or 1,
                weights=None if request.no_weights else pattern,
                products=request.products,
                on_window=of_layers.advance,
                on_tensor=lambda nbytes, name: of_weights().advance(nbytes, name),
                threads=threads,
            )
        about = [describe_origin(model, request.full_hash, report) for model in models]
    result = ComparisonResult(
        **vars(comparison),
        a=about[0],
        b=about[1],
        n_ctx=window,
        text_digest=describe_text(data, Path(request.text).name) if request.text is not None and data is not None else None,
        settings=describe_settings(models[0]),
        program=describe_program(),
    )
    if request.plot is not None:
        plot_comparison(
            comparison, f"{Path(model_name(request.b)).name} against {Path(model_name(request.a)).name}", Path(request.plot)
        )
    if comparison.nonfinite:
        raise CheckFailed(comparison.nonfinite, result)
    return result


def _passes_memory(models: list[Model], n_ctx: int, reads: bool) -> tuple[int, int] | None:
    """Bytes of both models and of the larger pass; and of the other pass, which runs at the same time if a text is read. None:
    not known."""
    if not reads:
        return loaded_bytes(models), 0
    a, _ = models
    passes = [nbytes for model in models if (nbytes := model.windows_bytes(1, n_ctx)) is not None]
    if len(passes) < len(models):
        return None
    most = max(max(passes), logits_bytes(a, n_ctx, is_compared=True) - min(passes))
    return max(tokenising_bytes(models) - min(passes), started_bytes(models) + most), min(passes)


def _planned(
    models: list[Model],
    reads: bool,
    n_ctx: int,
    windows: int,
    weights: NamePattern | None,
    passes: tuple[int, int] | None,
    threads: int,
) -> Planned:
    """reads: whether a text is read; weights: those that are compared, on so many threads; passes: see `_passes_memory`."""
    a, b = models
    work, seconds = dict[str, int](), dict[str, float]()
    memory, beside = passes or (None, 0)
    if reads:
        work["windows"] = windows
        seconds["layers"] = sum(reading_seconds(model, windows * n_ctx, n_ctx) for model in models)
    if weights is not None:
        ours, theirs = a.source.tensors, b.source.tensors
        both = [name for name in ours if weights.search(name) and name in theirs]
        names = [name for name in both if ours[name].shape == theirs[name].shape]
        work |= {"tensors": len(names), "weights": sum(ours[name].n_elements for name in names)}
        seconds["weights"] = weights_seconds(ours, theirs, names) / threads
        beside = max([beside, *(weights_bytes(ours[name], threads) for name in names)])
    return Planned(work, reading_forecast(seconds, memory + beside if memory is not None else None, models, Path()))
