"""Rows refined on a device under a covariance: what all families of types share, and which class refines a type.

What a sweep reads and changes is sent to the device for each step and comes back after it; the matrices stay there. Scales are
searched by the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
from torch import Tensor

from ..covariance.matrix.panels import from_panels
from ..covariance.matrix.prepared import DampedCovariance, FeedbackMatrix
from ..covariance.refinement import Refinement
from .memory import one_at_a_time, sent

Owner = DampedCovariance | FeedbackMatrix

_kept: weakref.WeakKeyDictionary[Owner, dict[tuple[str, str], Tensor]] = weakref.WeakKeyDictionary()


def kept_on(device: str, owner: Owner, name: str, make: Callable[[], np.ndarray]) -> Tensor:
    """An array that belongs to a matrix, on a device; it is sent once and stays there as long as the matrix does."""
    tensors = _kept.setdefault(owner, {})
    if (device, name) not in tensors:
        tensors[device, name] = sent(make(), device)
    return tensors[device, name]


def forget_matrices() -> None:
    """Frees what `kept_on` has sent."""
    _kept.clear()


class OnDevice(Refinement):
    """A `Refinement` whose products with H are computed on a device. To be inherited from before the class for the CPU."""

    device: str  # to be set before __init__ of the class for the CPU

    def sent(self, array: np.ndarray) -> Tensor:
        return sent(array, self.device)

    def matrix(self, owner: Owner) -> Tensor:
        """H, or the matrix that feeds errors back: float32 [size, size]."""
        return kept_on(self.device, owner, "matrix", lambda: from_panels(owner.panels, self.damped.size))

    def _product(self, name: str, x: np.ndarray, panels: np.ndarray) -> np.ndarray:
        if panels is not self.damped.panels:
            return super()._product(name, x, panels)
        return self._times(x, self.damped)

    def _times(self, x: np.ndarray, owner: Owner) -> np.ndarray:
        """x [rows, n] times a matrix, flat."""
        with one_at_a_time:
            return (self.sent(x) @ self.matrix(owner)[: x.shape[1]]).cpu().numpy().reshape(-1)

    def feedback_sums(self, matrix: FeedbackMatrix) -> np.ndarray:
        return self._times(self.x - self.values, matrix)

    def feed_back(self) -> None:
        before = self.values.copy()
        self.round_in_order()
        change = self._product("", before - self.values, self.damped.panels)
        np.add(self.gradient, change, out=self.gradient)
