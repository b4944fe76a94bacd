"""`ggufmill embed`: vectors of texts, and how similar they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import UsageError
from ...formats import PlanError
from ...formats.file_range import read_text
from ...runtime import Model
from ...runtime.embedding import embed_tokens, model_pooling, pair_tokens, similarities
from ..common.models import open_model
from ..common.progress import Stage, reporting
from ..common.shown import shown
from ..requests.measure import EmbedRequest
from ..requests.running import settings_of
from ..requests.verb import verb


@shown
@dataclass(frozen=True)
class TextEmbeddings:
    """Texts and their vectors.

    texts      as they were given; tokens: how many each has
    vectors    float32 [width] for each text, with pooling 'none' [tokens, width], with 'rank' its score [1]
    pooling    as in `embed_texts`; normalize: whether the vectors are of length 1
    """

    texts: list[str]
    tokens: list[int]
    vectors: list[np.ndarray]
    pooling: str
    normalize: bool

    @property
    def similarities(self) -> np.ndarray | None:
        """Cosine similarities of all pairs of texts, float32 [n, n]; None with pooling 'none' and 'rank'."""
        return None if self.pooling in ("none", "rank") else similarities(np.stack(self.vectors))

    def as_json(self) -> dict[str, Any]:
        """What --json prints: pooling, normalize, embeddings (text, tokens, embedding), similarities."""
        values = [
            {"text": text, "tokens": tokens, "embedding": vector.tolist()}
            for text, tokens, vector in zip(self.texts, self.tokens, self.vectors, strict=True)
        ]
        pairs = self.similarities
        shared = {"pooling": self.pooling, "normalize": self.normalize, "embeddings": values}
        return shared if pairs is None else {**shared, "similarities": pairs.tolist()}


@verb(EmbedRequest)
def embed_texts(request: EmbedRequest) -> TextEmbeddings:
    """Makes a vector of every text.

    Returns a `TextEmbeddings`. Raises UsageError without texts, PlanError for a text that is too long, MillError for outputs
    that are not finite.

    Example:
        >>> from ggufmill import embed_texts
        >>> from ggufmill.recipes import FOLDER
        >>> result = embed_texts(FOLDER / "demo", ["a list", "the list"], pooling="mean")
        >>> result.vectors[0].shape, result.similarities.shape
        ((256,), (2, 2))
    """
    texts = [request.prompt] if isinstance(request.prompt, str) else list(request.prompt)
    if request.file is not None:
        texts += _lines(Path(request.file))
    if not texts:
        raise UsageError("there is no text: -p TEXT or -f FILE is needed")
    opened = open_model(request.model, settings_of(request))
    chosen = request.pooling or model_pooling(opened)
    sequences = [_tokens(opened, text, number, chosen) for number, text in enumerate(texts, 1)]
    vectors = []
    with reporting(request.progress) as report:
        stage = Stage(report, "embed", len(texts), "text")
        with stage.watching(opened):
            for vector in embed_tokens(opened, sequences, chosen, normalize=request.normalize):
                vectors.append(vector)
                stage.reach(len(vectors))
    return TextEmbeddings(texts, [len(tokens) for tokens in sequences], vectors, chosen, request.normalize)


def _lines(path: Path) -> list[str]:
    try:
        text = read_text(path, pipes=True)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not UTF-8 text") from None
    return [line for line in text.splitlines() if line.strip()]


def _tokens(model: Model, text: str, number: int, pooling: str) -> list[int]:
    """Raises PlanError where they are none, or more than the context has."""
    if pooling == "rank":
        first, separator, second = text.partition("\t")
        if not separator:
            raise PlanError(f"text {number} has no tab between a query and a document, which pooling 'rank' needs")
        tokens = pair_tokens(model, model.tokenizer.encode(first), second)
    else:
        tokens = model.tokenizer.encode(text)
    most = min(model.n_ctx, model.graph.n_positions or model.n_ctx)
    if not tokens or len(tokens) > most:
        problem = f"{len(tokens)} tokens, more than the context of {most}; shorten it" if tokens else "no tokens"
        raise PlanError(f"text {number} has {problem}")
    return tokens
