"""Gradient descent on the continuous numbers of a quantised model: Adam, with what is best on windows that it never sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...runtime.backends.torch.parameter_gradients import ParameterGradients
    from ...runtime.backends.torch.tunable import TunableWeights

_BATCH = 4  # windows of a step
_RATE, _WARM_UP = 2e-3, 0.1  # relative to what is tuned; the share of steps in which the rate rises
_FIRST, _SECOND, _EPSILON = 0.9, 0.99, 1e-10  # of Adam; gradients are of a mean over tokens
_JUDGING = 8  # one window of so many judges

OnShare = Callable[[float], None]


def judging(windows: int) -> np.ndarray:
    """bool [windows]: those that no step is made from."""
    return np.arange(windows) % _JUDGING == _JUDGING - 1


def descend(
    gradients: ParameterGradients,
    weights: TunableWeights,
    windows: np.ndarray,
    hidden: Sequence[np.ndarray],
    epochs: int,
    on_share: OnShare = lambda share: None,
) -> list[float]:
    """Tunes the weights. Returns the mean divergence on the judging windows: before, and after each epoch; the weights are then
    those of the least.

    windows: int64 [n, n_ctx]; hidden: what the original model makes of each. The same bits for any number of threads.
    """
    changes = {**weights.vectors, **{name: tuned.changes for name, tuned in weights.matrices.items()}}
    moments = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in changes.items()}
    judges = np.flatnonzero(judging(len(windows)))
    fitted, order = np.flatnonzero(~judging(len(windows))), np.random.default_rng(0)
    steps = epochs * -(-len(fitted) // _BATCH)
    total = steps * _BATCH * 4 + (epochs + 1) * len(judges)  # in units of a window's forward pass
    done = step = 0

    def judged() -> float:
        nonlocal done
        found = gradients.of_windows(windows[judges], [hidden[int(i)] for i in judges], with_gradients=False)[0]
        done += len(judges)
        on_share(done / total)
        return found

    losses, best = [judged()], {name: x.copy() for name, x in changes.items()}
    for _ in range(epochs):
        shuffled = order.permutation(fitted)
        for first in range(0, len(shuffled), _BATCH):
            batch = np.sort(shuffled[first : first + _BATCH])
            _, found = gradients.of_windows(windows[batch], [hidden[int(i)] for i in batch], with_gradients=True)
            step += 1
            for name, gradient in found.items():
                _adam(changes[name], gradient, moments[name], _rate(step, steps), step)
            weights.apply()
            done += 4 * _BATCH
            on_share(min(1.0, done / total))
        losses.append(judged())
        if losses[-1] == min(losses):
            best = {name: x.copy() for name, x in changes.items()}
    for name, x in changes.items():
        x[...] = best[name]
    weights.apply()
    return losses


def _rate(step: int, steps: int) -> float:
    """It rises from 0, and falls along a cosine."""
    rising = max(1, round(_WARM_UP * steps))
    if step <= rising:
        return _RATE * step / rising
    return _RATE * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _adam(x: np.ndarray, gradient: np.ndarray, moments: tuple[np.ndarray, np.ndarray], rate: float, step: int) -> None:
    """A step of Adam (arXiv:1412.6980) in place."""
    first, second = moments
    gradient = np.where(np.isfinite(gradient), gradient, 0)
    first += (1 - _FIRST) * (gradient - first)
    second += (1 - _SECOND) * (gradient * gradient - second)
    mean, square = first / (1 - _FIRST**step), second / (1 - _SECOND**step)
    x -= np.float32(rate) * (mean / (np.sqrt(square) + np.float32(_EPSILON)))
