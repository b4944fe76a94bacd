"""`ggufmill compare` says where two models differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...pipeline.requests.measure import CompareRequest
from ..command import Verb
from ..display.console import call, table
from ..display.origins import origin_rows
from ..options.fields import options_of

if TYPE_CHECKING:
    from ...pipeline.measuring.compare import ComparisonResult

_LISTED = 6  # names in a line


@click.command(cls=Verb)
@options_of(CompareRequest)
def command(**options: Any) -> None:
    """Show where model B differs from model A: errors of every layer's output on a text, and of every tensor's weights.

    A is the better one, as a rule the bf16 model, B a quantisation of it. The two read the same tokens layer by layer.
    An output that is not finite (NaN) ends the comparison and is named, with exit code 1.

    \b
    Examples:
      ggufmill compare model-bf16.gguf model-iq4_k.gguf -f wiki.test.raw
      ggufmill compare model-bf16.gguf model-iq2_k.gguf --tensors ffn_down --plot errors.png
    """
    from ...pipeline.measuring.compare import compare_models

    call(compare_models, show=_text, **options)


def _text(result: ComparisonResult) -> str:
    parts = [table(("models", ""), [*origin_rows(result.a, "A"), *origin_rows(result.b, "B")])]
    if result.tensors:
        with_products = any(t.product is not None for t in result.tensors)
        rows = [
            (t.name, t.type_a, t.type_b, t.nbytes_b, f"{t.relative:.6f}", *([_number(t.product)] if with_products else []))
            for t in result.tensors
        ]
        changed = sum(t.type_a != t.type_b for t in result.tensors)
        heads = ("tensor", "A", "B", "bytes of B", "weights", *(["products"] if with_products else []))
        parts.append(table(heads, rows))
        parts.append(f"{changed} of {len(result.tensors)} tensors differ in type; errors are |B - A| / |A|")
    for names, where in (
        (result.only_a, "only in A"),
        (result.only_b, "only in B"),
        (result.reshaped, "of another shape in B"),
    ):
        if names:
            more = ", ..." if len(names) > _LISTED else ""
            parts.append(f"{len(names)} tensors {where}: {', '.join(names[:_LISTED])}{more}")
    if result.layers:
        layers = [(e.layer, f"{e.relative:.6f}", f"{e.worst:.6f}", f"{e.cosine:.6f}") for e in result.layers]
        parts.append(table(("layer", "relative error", "worst token", "cosine"), layers))
    if result.output:
        o = result.output
        parts.append(
            f"predictions over {result.tokens} tokens: KL divergence {o['kld_mean']:.6f}, "
            f"same top token {o['top1_agreement']:.2f} %, "
            f"perplexity {o['baseline_perplexity']:.4f} -> {o['perplexity']:.4f} (ratio {o['ratio']:.5f})"
        )
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
