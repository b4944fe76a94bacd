"""`ggufmill embed` makes vectors of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .command import Verb
from .display.console import call, table
from .options import flags
from .options.settings import run_options
from .options.types import MODEL, TEXT

if TYPE_CHECKING:
    from ..pipeline.embed import TextEmbeddings

POOLINGS = ("none", "mean", "cls", "last", "rank")
_SHOWN_NUMBERS, _SHOWN_TEXTS, _SHOWN_CHARACTERS = 4, 16, 48


@click.command(cls=Verb)
@click.argument("model", type=MODEL)
@click.option("-f", "--file", type=TEXT, help="A file with one text per line.")
@click.option("-p", "--prompt", multiple=True, help="A text; may be given several times.")
@click.option(
    "--pooling",
    type=click.Choice(POOLINGS, case_sensitive=False),
    help="What becomes of the tokens' vectors; rank scores a query and a document, with a tab between. [default: the model's]",
)
@click.option("--normalize/--no-normalize", default=True, show_default=True, help="Divide vectors by their lengths.")
@run_options()
@flags.as_json
def command(model: Any, as_json: bool, settings: dict[str, Any], **options: Any) -> None:
    """Make a vector of every text with MODEL (a GGUF or a Hugging Face folder), and compare them.

    Example: ggufmill embed bge-m3-q8_0.gguf -p "How deep is the sea?" -p "The ocean's mean depth is 3700 m."
    """
    from ..pipeline.embed import embed_texts

    call(embed_texts, model, show=_shown, as_json=as_json, **options, **settings)


def _shown(result: TextEmbeddings) -> str:
    """A line per text, and a table of similarities of the first of them."""
    rows = []
    for number, (text, tokens, vector) in enumerate(zip(result.texts, result.tokens, result.vectors, strict=True), 1):
        first = " ".join(f"{value:.4f}" for value in vector.reshape(-1)[:_SHOWN_NUMBERS])
        shape = " x ".join(map(str, vector.shape))
        cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
        rows.append([number, tokens, shape, f"{first} …" if vector.size > _SHOWN_NUMBERS else first, cut])
    parts = [f"pooling {result.pooling}", table(["", "tokens", "shape", "vector", "text"], rows)]
    pairs = result.similarities
    if pairs is not None and len(pairs) > 1:
        shown = pairs[:_SHOWN_TEXTS, :_SHOWN_TEXTS]
        numbers = [str(number) for number in range(1, len(shown) + 1)]
        lines = [[number, *map(float, row)] for number, row in enumerate(shown, 1)]
        parts += ["", f"cosine similarity{f' of the first {len(shown)}' if len(shown) < len(pairs) else ''}"]
        parts.append(table(["", *numbers], lines))
    return "\n".join(parts)
