"""Running windows of a calibration text while they are observed; an error names its cause and the window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ..errors import MillError
from ..runtime import Model
from ..runtime.evaluate.perplexity import OnHidden, ScoredModel, score_windows
from ..runtime.evaluate.score_statistics import ScoreStatistics
from ..simd.compile.compile_time import seconds_without_compilation


class NotFiniteError(MillError):
    """The input of a tensor, or the gradient at its outputs (then `name` ends in .outputs), is not finite; the cause is another
    tensor."""

    def __init__(self, name: str):
        tensor = name.removesuffix(".outputs")
        what = "input of" if tensor == name else "gradient at the outputs of"
        super().__init__(f"the {what} {tensor} is not finite: the model or its file is damaged")


def score_observed(
    model: Model, windows: np.ndarray, first: int, statistics: ScoreStatistics, on_hidden: OnHidden | None = None
) -> Iterator[None]:
    """As `score_windows`, or without scores where the model predicts no tokens. Raises MillError for NaN or infinity in an
    observed input: it names the first tensor that made one, and the window. first: number of the first window, from 0."""
    if not model.has_head:
        start = seconds_without_compilation()
        observe_windows(model, windows, first)
        statistics.seconds += seconds_without_compilation() - start
        for _ in windows:
            statistics.add_unscored()
            yield
        return
    with naming_causes(model, windows, first):
        yield from score_windows([ScoredModel(model, statistics, on_hidden)], windows)


def observe_windows(model: Model, windows: np.ndarray, first: int) -> None:
    """Runs windows for their observers alone: int [windows, n_ctx]. Raises MillError as `score_observed`."""
    with naming_causes(model, windows, first):
        model.hidden_of_windows(windows)


@contextmanager
def naming_causes(model: Model, windows: np.ndarray, first: int) -> Iterator[None]:
    """Within this, an observed number that is not finite raises a MillError as `score_observed` does."""
    try:
        yield
    except NotFiniteError as error:
        raise _cause(model, windows, first, error) from None


def _cause(model: Model, windows: np.ndarray, first: int, error: MillError) -> MillError:
    for number, window in enumerate(windows, first + 1):
        cause = model.first_nonfinite(window)
        if cause is not None:
            return MillError(f"{cause} (window {number} of the text)")
    return error


def is_due(frequency: int, before: int, done: int) -> bool:
    """Whether a multiple of the frequency is in (before, done]; frequency 0: never."""
    return frequency > 0 and done // frequency > before // frequency
