"""`ggufmill compare`: where two models differ, layer by layer and tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckFailed, PlanError, UsageError
from ..formats.file_range import read_file
from ..imatrix.texts import decode_text
from ..runtime.evaluate.compare import Comparison, compare
from ..runtime.evaluate.provenance import describe_program, describe_settings, describe_text
from ..runtime.stored_sizes import stored_nbytes
from .common.arguments import Pattern, as_pattern, refuse_unused
from .common.models import ModelLike, describe_origin, model_name, open_model, settings_of_each, window_settings
from .common.progress import OnProgress, Stage, reporting
from .reports.plots import plot_comparison
from .reports.style import check_picture

N_CTX = 512


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


def compare_models(
    a: ModelLike,
    b: ModelLike,
    text: str | Path | None = None,
    *,
    chunks: int | None = None,
    tensors: Pattern | None = None,
    no_weights: bool = False,
    products: bool = False,
    full_hash: bool = False,
    plot: str | Path | None = None,
    n_ctx: int | None = None,
    progress: OnProgress | bool | None = None,
    **settings: Any,
) -> ComparisonResult:
    """Where model b differs from model a: errors of every layer's output on a text, and of every tensor's weights.

    a, b        a is the better one, as a rule the bf16 model, b a quantisation of it; each as for `perplexity`
    text        a file that both read, for the errors of the layers; None: only weights are compared
    chunks      windows of the text to read; None: one
    tensors     only weights of tensors whose name this regular expression matches anywhere
    no_weights  layers only: comparing weights decodes every tensor of both models
    products    also errors of each tensor's products with what model a puts into it
    full_hash   digests of every byte of the model files, not of samples of large ones
    plot        a picture of the errors (.png, .svg, .pdf), which needs matplotlib
    n_ctx       tokens per window; None: 512
    settings    of `load_model`, as for `perplexity`
    progress    stage 'compare' in bytes of the weights; with full_hash 'checksum'

    Returns a `ComparisonResult`. Raises PlanError for models of different shape, UsageError for arguments that have nothing to
    act on, CheckFailed for an output that is not finite (NaN).

    Example:
        >>> from ggufmill import compare_models, quantize_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = quantize_model(FOLDER / "demo", "demo-q4.gguf", "q4_0", force=True)
        >>> result = compare_models(FOLDER / "demo", "demo-q4.gguf", tensors="ffn_down")
        >>> all(0.05 < tensor.relative < 0.15 for tensor in result.tensors)
        True
    """
    if no_weights and text is None:
        raise PlanError("--no-weights without a text (-f) leaves nothing to compare")
    if products and (text is None or no_weights):
        raise PlanError("--products needs a text (-f) and weights")
    if text is None:
        refuse_unused({"--ctx-size": n_ctx, "--chunks": chunks}, "a text (-f)")
    if no_weights:
        refuse_unused({"--tensors": tensors}, "weights (leave --no-weights out)")
    if plot is not None:
        check_picture(Path(plot))
    window, pattern = n_ctx or N_CTX, as_pattern(tensors or "", "--tensors")
    each = settings_of_each((a, b), settings)
    models = [open_model(model, window_settings(model, window, own)) for model, own in zip((a, b), each, strict=True)]
    if not (no_weights or any(pattern.search(name) for name in models[0].source.tensors)):
        raise UsageError(f"--tensors: no tensor of {model_name(a)} has {pattern.text!r} in its name")
    data = read_file(Path(text), pipes=True) if text is not None else None
    with reporting(progress) as report:
        total = sum(stored_nbytes(t) for model in models for t in model.source.tensors.values())
        stage = Stage(report, "compare", total) if not no_weights else None
        comparison = compare(
            models[0],
            models[1],
            decode_text(data, Path(text)) if text is not None and data is not None else None,
            n_ctx=window,
            chunks=chunks or 1,
            weights=None if no_weights else pattern,
            products=products,
            on_tensor=stage.advance if stage is not None else None,
        )
        about = [describe_origin(model, full_hash, report) for model in models]
    result = ComparisonResult(
        **vars(comparison),
        a=about[0],
        b=about[1],
        n_ctx=window,
        text_digest=describe_text(data, Path(text).name) if text is not None and data is not None else None,
        settings=describe_settings(models[0]),
        program=describe_program(),
    )
    if plot is not None:
        plot_comparison(comparison, f"{Path(model_name(b)).name} against {Path(model_name(a)).name}", Path(plot))
    if comparison.nonfinite:
        raise CheckFailed(comparison.nonfinite, result)
    return result
