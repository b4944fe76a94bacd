"""`ggufmill compare` says where two models differ."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.console import byte_progress, emit, table
from ..pipeline.reports.plots import plot_comparison
from ..pipeline.reports.result_comparison import origin, origin_lines
from .options import flags
from .options.settings import load, run_options
from .unused_options import refuse_idle

if TYPE_CHECKING:
    from ..runtime.evaluate.compare import Comparison

_TEXT, _WEIGHTS = "a text (-f)", "weights (leave --no-weights out)"
_NEEDS = {"n_ctx": _TEXT, "chunks": _TEXT, "tensors": _WEIGHTS}


@click.command(short_help="Errors of layers and weights between two models")
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option(
    "-f",
    "--file",
    "text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text that both read, for the errors of the layers; without it only weights are compared.",
)
@run_options(n_ctx=512)
@click.option("--chunks", type=click.IntRange(1), default=1, show_default=True, help="Windows of the text to read.")
@click.option(
    "--tensors", type=flags.REGEX, default="", metavar="REGEX", help="Only weights of tensors with this in their name."
)
@click.option("--no-weights", is_flag=True, help="Layers only: large models are decoded as a whole for their weights.")
@click.option("--products", is_flag=True, help="Also errors of each tensor's products with what A puts into it (needs -f).")
@click.option("--full-hash", is_flag=True, help="Digest of every byte of the model files, not of samples of large ones.")
@flags.plot("the errors")
@flags.as_json
def command(
    a: Path,
    b: Path,
    text: Path | None,
    chunks: int,
    tensors: re.Pattern[str],
    no_weights: bool,
    products: bool,
    full_hash: bool,
    plot: Path | None,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """Where model B differs from model A: errors of every layer's output on a text, and of every tensor's weights.

    A is the better one, as a rule the bf16 model, B a quantisation of it. The two read the same tokens layer by layer.
    An output that is not finite (NaN) ends the comparison and is named, with exit code 1.

    \b
    Examples:
      ggufmill compare model-bf16.gguf model-iq4_k.gguf -f wiki.test.raw
      ggufmill compare model-bf16.gguf model-iq2_k.gguf --tensors ffn_down --plot errors.png
    """
    from ..convert import open_source
    from ..formats import PlanError
    from ..imatrix.texts import decoded
    from ..runtime.evaluate.compare import check, compare, tensor_nbytes
    from ..runtime.evaluate.provenance import describe_program, describe_settings, describe_text

    if no_weights and text is None:
        raise PlanError("--no-weights without a text (-f) leaves nothing to compare")
    if products and (text is None or no_weights):
        raise PlanError("--products needs a text (-f) and weights")
    refuse_idle(_NEEDS, {_TEXT: text is not None, _WEIGHTS: not no_weights})
    models = [load(open_source(path), settings) for path in (a, b)]
    if not (no_weights or any(tensors.search(name) for name in models[0].source.tensors)):
        raise click.UsageError(f"--tensors: no tensor of {a} has {tensors.pattern!r} in its name")
    data = text.read_bytes() if text is not None else None
    total = sum(tensor_nbytes(t) for m in models for t in m.source.tensors.values())
    with nullcontext() if no_weights else byte_progress(total, "compare", quiet=total < 1 << 28) as progress:
        found = compare(
            models[0],
            models[1],
            decoded(data, text) if text is not None and data is not None else None,
            n_ctx=settings["n_ctx"],
            chunks=chunks,
            weights=None if no_weights else tensors.pattern,
            products=products,
            on_tensor=progress,
        )
    about = [origin(m, full_hash) for m in models]
    summary = {
        "a": about[0],
        "b": about[1],
        **found.as_json(),
        "n_ctx": settings["n_ctx"],
        "text_digest": describe_text(data, text.name) if text is not None and data is not None else None,
        "settings": describe_settings(models[0]),
        "program": describe_program(),
    }
    emit(summary, as_json, lambda: _text(found, about))
    if plot is not None:
        plot_comparison(found, f"{b.name} against {a.name}", plot)
    check(found)


def _text(found: Comparison, about: list[dict[str, Any]]) -> str:
    parts = [table(("models", ""), [*origin_lines(about[0], "A"), *origin_lines(about[1], "B")])]
    if found.tensors:
        measured = any(t.product is not None for t in found.tensors)
        rows = [
            (t.name, t.type_a, t.type_b, t.nbytes_b, f"{t.relative:.6f}", *([_maybe(t.product)] if measured else []))
            for t in found.tensors
        ]
        changed = sum(t.type_a != t.type_b for t in found.tensors)
        heads = ("tensor", "A", "B", "bytes of B", "weights", *(["products"] if measured else []))
        parts.append(table(heads, rows))
        parts.append(f"{changed} of {len(found.tensors)} tensors differ in type; errors are |B - A| / |A|")
    for names, where in ((found.only_a, "only in A"), (found.only_b, "only in B"), (found.reshaped, "of another shape in B")):
        if names:
            parts.append(f"{len(names)} tensors {where}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}")
    if found.layers:
        layers = [(e.layer, f"{e.relative:.6f}", f"{e.worst:.6f}", f"{e.cosine:.6f}") for e in found.layers]
        parts.append(table(("layer", "relative error", "worst token", "cosine"), layers))
    if found.output:
        o = found.output
        parts.append(
            f"predictions over {found.tokens} tokens: KL divergence {o['kld_mean']:.6f}, "
            f"same top token {o['top1_agreement']:.2f} %, "
            f"perplexity {o['baseline_perplexity']:.4f} -> {o['perplexity']:.4f} (ratio {o['ratio']:.5f})"
        )
    return "\n\n".join(parts)


def _maybe(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
