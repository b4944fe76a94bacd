"""Embeddings of texts: a model's outputs for all tokens, pooled into one vector, after dense layers where it has some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..formats import FormatError, PlanError
from .graph.ops import Norm
from .hparams import HParams
from .model import Model
from .models.bert import pair_separator

POOLINGS = ("none", "mean", "cls", "last", "rank")  # by their values of ARCHITECTURE.pooling_type (llama.cpp's)
_DENSE = ("dense_2", "dense_3")


def model_pooling(model: Model) -> str:
    """The pooling that the metadata name, one of POOLINGS; without any 'last' where no token sees later ones, else 'mean'.

    Raises FormatError for an unknown number.
    """
    hparams = HParams(model.metadata, model.source.path)
    if "pooling_type" not in hparams:
        return "last" if model.graph.is_causal else "mean"
    number = hparams.int("pooling_type")
    if not 0 <= number < len(POOLINGS):
        raise FormatError(f"{model.source.path}: metadata key {hparams.architecture}.pooling_type is {number}, not 0 to 4")
    return POOLINGS[number]


def embed_tokens(
    model: Model, sequences: Sequence[Sequence[int]], pooling: str, *, normalize: bool = True
) -> Iterator[np.ndarray]:
    """Embeddings of sequences of tokens, in order: float32 [width] each, with pooling 'none' [tokens, width].

    pooling    'mean': of all outputs; 'cls': the first token's; 'last': the last token's; 'rank': [1], the score that the
               model's classifier gives (see `pair_tokens`)
    normalize  vectors are divided by their lengths; not with 'rank'

    Sequences are run together as far as the model's `batch` goes. Raises PlanError for an unknown pooling and for sequences
    that are too long, MillError where an output is not finite.
    """
    if pooling not in POOLINGS:
        raise PlanError(f"pooling {pooling!r} is unknown; there are {', '.join(POOLINGS)}")
    layers = _classifier(model) if pooling == "rank" else [matrix for name in _DENSE if (matrix := _matrix(model, name))]
    for batch in _batches(sequences, model.settings.batch):
        outputs = model.hidden([(model.new_cache(len(tokens)), tokens) for tokens in batch])
        for tokens, output in zip(batch, outputs, strict=True):
            if not np.isfinite(output).all():
                raise model.explain_nonfinite(tokens)
            vector = _pooled(_normalised(model, output), pooling)
            for number, (weight, bias) in enumerate(layers if pooling != "none" else []):
                vector = vector @ weight.T + bias
                if pooling == "rank" and number < len(layers) - 1:
                    vector = np.tanh(vector)
            if normalize and pooling != "rank":
                vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), np.float32(1e-12))
            yield vector.astype(np.float32)


def pair_tokens(model: Model, first: Sequence[int], second: str) -> list[int]:
    """The tokens of a query, which is encoded already, and a document as rankers read them: BERT's [CLS] query [SEP] document
    [SEP], where the model distinguishes texts by their token types, else XLM-RoBERTa's <s> query </s></s> document </s>.

    Raises PlanError for a vocabulary without the token in between.
    """
    tokenizer, types = model.tokenizer, model.source.tensors.get("token_types.weight")
    texts = first, tokenizer.encode(second)[1 if tokenizer.add_bos else 0 :]
    if types is not None and types.n_rows > 1:
        if pair_separator(model.source) not in texts[0]:
            raise PlanError(f"{model.source.path}: the vocabulary has no separator that ends the first text of a pair")
        return [*texts[0], *texts[1]]
    if tokenizer.eos is None:
        raise PlanError(f"{model.source.path}: the vocabulary has no token that separates the texts of a pair")
    return [*texts[0], tokenizer.eos, *texts[1]]


def similarities(vectors: np.ndarray) -> np.ndarray:
    """Cosine similarities of all pairs: float32 [n, width] -> [n, n]."""
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return units @ units.T


def _normalised(model: Model, outputs: np.ndarray) -> np.ndarray:
    """Outputs of `Model.hidden` after the last norm, where that is the head's (see `Graph.hidden`)."""
    norm = model.graph.head[0] if model.graph.head else None
    if not isinstance(norm, Norm) or norm.weight is None:
        return outputs
    weight = model.source.tensors[norm.weight.name].read(0, 1)[0]
    return outputs / np.sqrt(np.square(outputs).mean(axis=-1, keepdims=True) + np.float32(norm.epsilon)) * weight


def _pooled(outputs: np.ndarray, pooling: str) -> np.ndarray:
    if pooling == "mean":
        return outputs.mean(axis=0, dtype=np.float64).astype(np.float32)
    return {"none": outputs, "last": outputs[-1]}.get(pooling, outputs[0])


def _batches(sequences: Sequence[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    """Runs of sequences of at most `size` tokens together, or one longer sequence."""
    batch: list[Sequence[int]] = []
    for tokens in sequences:
        if batch and sum(map(len, batch)) + len(tokens) > size:
            yield batch
            batch = []
        batch.append(tokens)
    if batch:
        yield batch


def _matrix(model: Model, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight float32 [rows, columns] and bias [rows] (zeros where it has none) of a layer after the pooling; None without."""
    weight, bias = (model.source.tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None:
        return None
    matrix = np.asarray(weight.read(0, weight.n_rows), np.float32).reshape(-1, weight.shape[0])
    return matrix, np.zeros(len(matrix), np.float32) if bias is None else np.asarray(bias.read(0, 1), np.float32)[0]


def _classifier(model: Model) -> list[tuple[np.ndarray, np.ndarray]]:
    layers = [matrix for name in ("cls", "cls.output") if (matrix := _matrix(model, name))]
    if not layers:
        raise PlanError(f"{model.source.path}: it has no classifier (cls.weight) to rank with")
    return layers
