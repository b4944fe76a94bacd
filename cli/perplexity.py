from __future__ import annotations

from pathlib import Path

import click

from . import flags
from .console import chunk_progress, emit, table, warn


@click.command(short_help="Perplexity and KL divergence on a text")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-f", "--file", "text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@flags.ctx
@flags.chunks
@click.option(
    "--kl-divergence",
    "baseline",
    metavar="MODEL",
    type=click.Path(exists=True, path_type=Path),
    help="Compare with this model, usually the bf16 one: KL divergence and agreement on the top token.",
)
@flags.as_json
def command(model: Path, text: Path, n_ctx: int, chunks: int | None, baseline: Path | None, as_json: bool) -> None:
    """Perplexity of MODEL (a GGUF or a Hugging Face folder) on a text, as llama-perplexity measures it.

    The text is cut into windows of the context size, and the second half of each is scored. Compare figures only
    for the same text, context and number of windows.

    \b
    Examples:
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw
      ggufmill perplexity model-iq4_k.gguf -f wiki.test.raw --kl-divergence model-bf16.gguf --chunks 40
    """
    from ..convert import open_source
    from ..runtime import load_model
    from ..runtime.perplexity import perplexity

    loaded = load_model(open_source(model))
    base = load_model(open_source(baseline)) if baseline is not None else None
    with chunk_progress("perplexity", quiet=as_json) as progress:
        result = perplexity(
            loaded, text.read_text("utf-8", "replace"), n_ctx=n_ctx, chunks=chunks, on_chunk=progress, baseline=base
        )
    warn(result.notes)
    summary = {"model": str(model), "text": str(text), "baseline": str(baseline) if baseline else None, **result.as_json()}
    figures = [(k, str(v)) for k, v in summary.items() if v is not None and k != "notes"]
    emit(summary, as_json, lambda: table(("figure", "value"), figures))
