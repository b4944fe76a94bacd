"""Normalisation of the rows of an activation matrix."""

from __future__ import annotations

import numpy as np

from .weights import WeightStore


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, along the last axis."""

    def __init__(self, store: WeightStore, name: str, size: int, epsilon: float):
        self.store, self.name = store, name
        self.weight, self.epsilon = store.vector(name, size), np.float32(epsilon)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [..., size] -> a new array of that shape."""
        mean = np.einsum("...i,...i->...", x, x)
        mean /= np.float32(x.shape[-1])
        mean += self.epsilon
        np.sqrt(mean, out=mean)
        out = x / mean[..., None]
        out *= self.weight
        self.store.check(self.name, out)
        return out
