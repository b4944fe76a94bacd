"""Gradient descent on the continuous numbers of a quantised model: Adam, with what is best on windows that it never sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from ...data_classes import dataclass

if TYPE_CHECKING:
    from ...runtime.backends.torch.parameter_gradients import ParameterGradients
    from ...runtime.backends.torch.tunable import TunableWeights

_BATCH = 4  # windows of a step
_RATE, _WARM_UP = 2e-3, 0.1  # relative to what is tuned; the share of steps in which the rate rises
_FIRST, _SECOND, _EPSILON = 0.9, 0.99, 1e-10  # of Adam; gradients are of a mean over tokens
_JUDGING = 8  # one window of so many judges
FORWARDS = 4  # passes in whose time a window's gradients are computed

OnShare = Callable[[float], None]


def judging(windows: int) -> np.ndarray:
    """bool [windows]: those that no step is made from."""
    return np.arange(windows) % _JUDGING == _JUDGING - 1


@dataclass
class Progressed:
    """How far a descent has come: what goes on from here ends in the same bits.

    step    steps that were made; losses: on the judging windows, before and after each epoch so far
    arrays  'best', 'first', 'second' -> name -> the best state, and the moments of gradients; 'changes' -> what is tuned now
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    arrays: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


OnStep = Callable[[Progressed], None]


class Descent:
    """The descent of some weights. The same bits for any number of threads, and however often it is interrupted.

    windows: int64 [n, n_ctx]; hidden: what the original model makes of each; epochs: times through the text
    """

    def __init__(
        self,
        gradients: ParameterGradients,
        weights: TunableWeights,
        windows: np.ndarray,
        hidden: Sequence[np.ndarray],
        epochs: int,
        on_share: OnShare = lambda share: None,
    ):
        self._gradients, self._weights, self._windows, self._hidden = gradients, weights, windows, hidden
        self._epochs, self._on_share = epochs, on_share
        self._judges, self._fitted = (np.flatnonzero(judging(len(windows)) == which) for which in (True, False))
        self._each = -(-len(self._fitted) // _BATCH)  # steps of an epoch
        self.steps = epochs * self._each

    def run(self, progressed: Progressed | None = None, on_step: OnStep = lambda progressed: None) -> list[float]:
        """Tunes the weights. Returns the mean divergence on the judging windows: before, and after each epoch; the weights are
        then those of the least. progressed: where it goes on, None: at the beginning; on_step: called after each step."""
        changes = self._weights.changes
        if progressed is None:
            zeros = {key: {name: np.zeros_like(x) for name, x in changes.items()} for key in ("best", "first", "second")}
            progressed = Progressed(0, [self._judged(0, 0)], {"changes": changes, **zeros})
        else:
            for name, x in changes.items():
                x[...] = progressed.arrays["changes"][name]
            progressed.arrays["changes"] = changes
            self._weights.apply()
        order = np.random.default_rng(0)
        for epoch in range(self._epochs):
            shuffled = order.permutation(self._fitted)
            for number in range(self._each):
                if epoch * self._each + number == progressed.step:
                    self._step(np.sort(shuffled[number * _BATCH : (number + 1) * _BATCH]), progressed)
                    on_step(progressed)
            if len(progressed.losses) == epoch + 1:
                self._end_epoch(progressed)
        for name, x in changes.items():
            x[...] = progressed.arrays["best"][name]
        self._weights.apply()
        return progressed.losses

    def _step(self, batch: np.ndarray, progressed: Progressed) -> None:
        judged, before = len(progressed.losses), progressed.step
        progressed.step += 1
        arrays, step = progressed.arrays, progressed.step
        hidden = [self._hidden[int(i)] for i in batch]
        _, found = self._gradients.of_windows(
            self._windows[batch], hidden, with_gradients=True, on_share=lambda share: self._within(before + share, judged)
        )
        for name, gradient in found.items():
            moments = arrays["first"][name], arrays["second"][name]
            _adam(arrays["changes"][name], gradient, moments, _rate(step, self.steps), step)
        self._weights.apply()
        self._tell(step, judged)

    def _end_epoch(self, progressed: Progressed) -> None:
        progressed.losses.append(self._judged(progressed.step, len(progressed.losses)))
        if progressed.losses[-1] == min(progressed.losses):
            progressed.arrays["best"] = {name: x.copy() for name, x in progressed.arrays["changes"].items()}

    def _judged(self, step: int, judged: int) -> float:
        hidden = [self._hidden[int(i)] for i in self._judges]
        found, _ = self._gradients.of_windows(
            self._windows[self._judges], hidden, with_gradients=False, on_share=lambda share: self._within(step, judged + share)
        )
        self._tell(step, judged + 1)
        return found

    def _tell(self, step: int, judged: int) -> None:
        """Says what is done after a step, or when it was judged."""
        self._within(step, judged)

    def _within(self, step: float, judged: float) -> None:
        """Says the share that is done, in forward passes of windows."""
        total = self.steps * _BATCH * FORWARDS + (self._epochs + 1) * len(self._judges)
        self._on_share(min(1.0, (step * _BATCH * FORWARDS + judged * len(self._judges)) / total))


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
