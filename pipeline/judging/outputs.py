"""A baseline's outputs of a text, kept in a file: exact, and smaller than its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from ...errors import FormatError, MillError
from ...formats.file_range import range_checksum, read_range
from ...jobs.atomic_write import atomic_file
from ...runtime import Model
from ...runtime.evaluate.baseline import scored_outputs
from ...runtime.evaluate.divergence import ModelPredictions, Predictions
from ...runtime.evaluate.logits_file import scored

_DIGEST_BYTES = 8  # xxh3 of all before, at the end of the file


class StoredOutputs:
    """A baseline model whose outputs for some windows are in a file, float32 [windows, scored, n_embd]; its head makes logits
    of them."""

    def __init__(self, model: Model, file: Path, n_ctx: int):
        self.model, self._file = model, file
        self._shape = scored(n_ctx), model.graph.n_embd
        self.path, self.n_vocab = model.source.path, model.n_vocab

    def predictions(self, windows: np.ndarray, first: int) -> Sequence[Predictions]:
        rows, width = self._shape
        data = read_range(self._file, 4 * first * rows * width, 4 * len(windows) * rows * width)
        outputs, targets = data.view("<f4").reshape(-1, rows, width), windows[:, windows.shape[1] // 2 + 1 :]
        return [ModelPredictions(self.model, *each) for each in zip(outputs, targets, strict=True)]

    def explain_nonfinite(self, window: np.ndarray) -> MillError:
        return self.model.explain_nonfinite(window)


def are_whole(file: Path, n_windows: int, n_ctx: int, n_embd: int) -> bool:
    """Whether the file is there, and holds what `write_outputs` wrote for so many windows."""
    nbytes = 4 * n_windows * scored(n_ctx) * n_embd
    try:
        if file.stat().st_size != nbytes + _DIGEST_BYTES:
            return False
        return range_checksum(file, 0, nbytes) == read_range(file, nbytes, _DIGEST_BYTES).tobytes().hex()
    except (OSError, FormatError):
        return False


def write_outputs(model: Model, windows: np.ndarray, file: Path, on_window: Callable[[int], None]) -> None:
    """Runs windows int64 [n, n_ctx] and writes the outputs that predict their second halves.

    on_window: called with the number of windows done. Raises MillError for outputs that are not finite.
    """
    step, digest = max(1, model.settings.batch // windows.shape[1]), xxhash.xxh3_64()
    with atomic_file(file) as out:
        for first in range(0, len(windows), step):
            batch = windows[first : first + step]
            for output in scored_outputs(model, batch):
                data = output.astype("<f4").tobytes()
                digest.update(data)
                out.write(data)
            on_window(first + len(batch))
        out.write(digest.digest())
