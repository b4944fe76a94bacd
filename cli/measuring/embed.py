"""`ggufmill embed` makes vectors of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...pipeline.requests.measure import EmbedRequest
from ..command import Verb
from ..display.console import call, table
from ..options.fields import options_of

if TYPE_CHECKING:
    from ...pipeline.measuring.embed import TextEmbeddings

_SHOWN_NUMBERS, _SHOWN_TEXTS, _SHOWN_CHARACTERS = 4, 16, 48


@click.command(cls=Verb)
@options_of(EmbedRequest)
def command(**options: Any) -> None:
    """Make a vector of every text with MODEL (a GGUF or a Hugging Face folder), and compare them.

    Example: ggufmill embed bge-m3-q8_0.gguf -p "How deep is the sea?" -p "The ocean's mean depth is 3700 m."
    """
    from ...pipeline.measuring.embed import embed_texts

    call(embed_texts, show=_shown, **options)


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
