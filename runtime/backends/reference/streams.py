"""The ops of several residual streams, and embeddings of n-grams, as `functions`."""

from __future__ import annotations

import numpy as np

from ...graph import activation_ops, hyper_connection_ops, ops
from ...graph.values import NgramHash
from .step import Step


def _with_magnitude(x: np.ndarray, like: np.ndarray, epsilon: float) -> np.ndarray:
    """x [n, streams, width] with the root mean square of like [n, width]."""
    squares = np.maximum(np.square(x).mean(axis=-1, keepdims=True), np.float32(epsilon))
    return x * np.sqrt(np.square(like).mean(axis=-1)[:, None, None]) / np.sqrt(squares)


def expand_streams(step: Step, x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    others = np.einsum("nc,src->nsr", x, weight)
    return np.concatenate([x[:, None], _with_magnitude(others, x, epsilon)], axis=1)


def merge_streams(step: Step, x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    others = _with_magnitude(np.einsum("nsc,src->nsr", x[:, 1:], weight), x[:, 0], epsilon)
    return (x[:, 0] + others.sum(axis=1)) / np.float32(x.shape[1])


def mix_streams(step: Step, x: np.ndarray, coefficients: np.ndarray, adds: bool) -> np.ndarray:
    n, streams, _ = x.shape
    return adds * x + np.einsum("nos,nsw->now", coefficients.reshape(n, streams, streams), x)


def add_to_streams(
    step: Step, x: np.ndarray, update: np.ndarray, coefficients: np.ndarray | None, constants: tuple[float, ...]
) -> np.ndarray:
    factors = np.array(constants, np.float32)[None] + (np.float32(0) if coefficients is None else coefficients)
    return x + factors[..., None] * update[:, None]


def scale_channels(step: Step, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x * weight


def keep_largest(step: Step, x: np.ndarray, factor: float) -> np.ndarray:
    cutoff = x.mean(axis=-1, keepdims=True) + np.float32(factor) * x.std(axis=-1, keepdims=True)
    return np.maximum(x - cutoff, 0)


def ngram_embedding(step: Step, table: np.ndarray, layer: int, ngrams: NgramHash) -> np.ndarray:
    out = []
    for cache, rows in step.segments:
        new = (step.tokens[rows, None] + 1).astype(np.float32)
        kept = np.concatenate([np.zeros((ngrams.n_past, 1), np.float32), cache.append(layer, "tokens", new)])
        history = kept[len(kept) - len(new) - ngrams.n_past : len(kept) - len(new)]
        out.append(table[ngrams.rows(history, step.tokens[rows])].reshape(len(new), -1))
    return np.concatenate(out)


def match_streams(step: Step, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    products = (x * y).sum(axis=-1) / np.float32(np.sqrt(x.shape[-1]))
    return np.sign(products) * np.sqrt(np.maximum(np.abs(products), np.float32(1e-6)))


STREAM_FUNCTIONS = {
    ops.NgramEmbedding: ngram_embedding,
    hyper_connection_ops.MatchStreams: match_streams,
    hyper_connection_ops.ExpandStreams: expand_streams,
    hyper_connection_ops.MergeStreams: merge_streams,
    hyper_connection_ops.HyperConnectionMix: mix_streams,
    hyper_connection_ops.HyperConnectionAdd: add_to_streams,
    activation_ops.Multiply: scale_channels,
    activation_ops.GaussianTopK: keep_largest,
}
