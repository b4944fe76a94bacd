"""What models are compared with: a baseline's predictions, window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...errors import MillError
from ..model import Model
from .divergence import ModelPredictions, OnLogits, Predictions

OnHidden = Callable[[np.ndarray, np.ndarray], None]


class Baseline(Protocol):
    """Predictions of the second halves of a text's windows.

    path: what it comes from; n_vocab: tokens that have a probability.
    """

    @property
    def path(self) -> str: ...

    @property
    def n_vocab(self) -> int: ...

    def predictions(self, windows: np.ndarray, first: int) -> Sequence[Predictions]:
        """Those of each of some windows, int64 [n, n_ctx]. first: the number of the first of them, counted from 0."""
        ...

    def explain_nonfinite(self, window: np.ndarray) -> MillError:
        """Why a prediction of this window is not finite."""
        ...


class ModelBaseline:
    """A model that runs the windows. on_logits: called with the logits of each block of its predictions, in order."""

    def __init__(self, model: Model, on_logits: OnLogits | None = None):
        self.model, self._on_logits = model, on_logits
        self.path, self.n_vocab = model.source.path, model.n_vocab

    def predictions(self, windows: np.ndarray, first: int) -> Sequence[Predictions]:
        outputs, targets = scored_outputs(self.model, windows), windows[:, windows.shape[1] // 2 + 1 :]
        return [ModelPredictions(self.model, *each, self._on_logits) for each in zip(outputs, targets, strict=True)]

    def explain_nonfinite(self, window: np.ndarray) -> MillError:
        return self.model.explain_nonfinite(window)


def scored_outputs(model: Model, windows: np.ndarray, on_hidden: OnHidden | None = None) -> list[np.ndarray]:
    """For each window the model's outputs that predict its scored tokens, float32 [scored, n_embd].

    on_hidden: called with each window and the model's outputs for it, float32 [n_ctx, n_embd]. Raises MillError when any output
    of a window is not finite.
    """
    n_ctx = windows.shape[1]
    outputs = model.hidden_of_windows(windows)
    for output, window in zip(outputs, windows, strict=True):
        if not np.isfinite(output).all():
            raise model.explain_nonfinite(window)
        if on_hidden is not None:
            on_hidden(window, output)
    return [output[n_ctx // 2 : n_ctx - 1] for output in outputs]
