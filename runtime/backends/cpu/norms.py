"""Normalisation of the rows of an activation matrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...hparams import HParams
from .kernels.elementwise import RUN, centre, normalise, normalise_part
from .weights import WeightStore

Norm = Callable[[np.ndarray], np.ndarray]


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, along the last axis."""

    def __init__(self, store: WeightStore, name: str, size: int, epsilon: float):
        self.store, self.name = store, name
        self.weight, self.epsilon = np.array(store.vector(name, size)), float(epsilon)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [..., size] -> a new array of that shape."""
        store, rows = self.store, np.ascontiguousarray(x)
        out = values = np.empty(x.shape, np.float32)
        if x.ndim != 2:
            rows, values = rows.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])
        team = store.workers.ready() if x.size > RUN else 0
        normalise(team, normalise_part.address, rows, self.weight, self.epsilon, values)
        if store.watch:
            store.check(self.name, out)
        return out


class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, along the last axis; the bias where a model has one."""

    def __init__(self, store: WeightStore, stem: str, size: int, epsilon: float):
        """stem: name of the tensors without .weight and .bias."""
        self.rms = RMSNorm(store, f"{stem}.weight", size, epsilon)
        self.bias = store.vector(f"{stem}.bias", size) if f"{stem}.bias" in store else None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [..., size] -> a new array of that shape."""
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
        centred = np.empty_like(rows)
        centre(rows, centred)
        out = self.rms(centred).reshape(x.shape)
        if self.bias is not None:
            out += self.bias
        return out


class WholeNorm(RMSNorm):
    """RMSNorm of all heads of a token together."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, heads, width] -> a new array of that shape."""
        return super().__call__(x.reshape(len(x), -1)).reshape(x.shape)


class HeadLayerNorm:
    """LayerNorm of each head without a bias; every head has weights of its own, [heads, width]."""

    def __init__(self, store: WeightStore, name: str, heads: int, width: int, epsilon: float):
        self.weight, self.epsilon = store.vectors(name, width, heads), np.float32(epsilon)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, heads, width] -> a new array of that shape."""
        out = x - x.mean(axis=-1, keepdims=True)
        out /= np.sqrt(np.square(out).mean(axis=-1, keepdims=True) + self.epsilon)
        return out * self.weight


def heads_norm(store: WeightStore, name: str, heads: int, width: int, epsilon: float) -> Norm:
    """The norm of queries or keys [n, heads, width], of the kind that the shape of its weights says."""
    shape = store.tensor(name).shape
    if len(shape) > 1:
        return HeadLayerNorm(store, name, heads, width, epsilon)
    is_whole = shape == (heads * width,) and heads > 1
    return WholeNorm(store, name, heads * width, epsilon) if is_whole else RMSNorm(store, name, width, epsilon)


def norm_from(store: WeightStore, hparams: HParams, stem: str, size: int) -> Norm:
    """The norm STEM of the kind whose epsilon the metadata has. Raises FormatError for one that is missing."""
    if "attention.layer_norm_epsilon" in hparams:
        return LayerNorm(store, stem, size, hparams.float("attention.layer_norm_epsilon"))
    return RMSNorm(store, f"{stem}.weight", size, hparams.float("attention.layer_norm_rms_epsilon"))
