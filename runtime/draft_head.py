"""Running a model's draft layers: from hidden states and the tokens after them to predictions of the tokens after those."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from ..formats import PlanError, TensorSource
from ..simd.workers import Workers
from .backends import Cache, Executable
from .graph import Graph, Observer
from .micro_batches import PIECE
from .settings import Settings


class DraftingModel(Protocol):
    """What draft layers use of their model: `model.Model`."""

    graph: Graph
    settings: Settings
    source: TensorSource

    @cached_property
    def draft_heads(self) -> list[DraftHead]: ...
    @property
    def observer(self) -> Observer | None: ...
    @property
    def workers(self) -> Workers: ...


class DraftHead:
    """A draft layer with its head. Row i of the first comes from the hidden state after token i and the embedding of token
    i + 1, and predicts token i + 2; row i of each further one predicts the token after, and reads the one that the layer before
    it predicts.

    executable  its graph, compiled
    """

    def __init__(self, model: DraftingModel, executable: Executable):
        self._model, self.executable = model, executable

    @property
    def is_chained(self) -> bool:
        """Whether it reads the outputs of the draft layer before it; else the model's."""
        return self.executable.graph.is_chained

    def new_cache(self, limit: int) -> Cache:
        """An empty cache for at most `limit` rows."""
        self.executable.observer = self._model.observer
        return self.executable.new_cache(limit)

    def hidden(self, cache: Cache, tokens: np.ndarray, states: np.ndarray, step: int | None = None) -> np.ndarray:
        """The next rows of a sequence, `step` per pass (None: `settings.ubatch`, and few of them by the kernels for tokens that
        are generated): normalised outputs float32 [n, n_embd].

        tokens: int [n]; states: float32 [n, n_embd], the hidden states after the tokens before them. Raises MillError when the
        cache is full; whatever is raised, it is then as it was before.
        """
        cache.check_capacity(len(tokens))
        self.executable.observer, before = self._model.observer, cache.length
        generated, step = step is None, step or self._model.settings.ubatch
        pieces = []
        try:
            with self._model.workers.placed():
                for first in range(0, len(tokens), step):
                    ids, inputs = np.asarray(tokens[first : first + step], np.int64), states[first : first + step]
                    pieces.append(self.executable.hidden(ids, [(cache, len(ids))], inputs, generated))
        except BaseException:  # an interruption, too
            cache.truncate(before)
            raise
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] from `hidden` -> float32 [n, n_vocab]."""
        with self._model.workers.placed():
            return self.executable.logits(hidden)


def check_draft_layers(model: DraftingModel) -> None:
    """Raises PlanError for a model without draft layers, or with such that cannot be run."""
    if not model.draft_heads:
        raise PlanError(
            f"{model.source.path} has no draft layers (nextn_predict_layers): leave out --draft-max, --mtp and --nextn, or "
            "convert a checkpoint that has them without --no-mtp"
        )


def window_rows(model: DraftingModel, window: np.ndarray, hidden: np.ndarray) -> list[np.ndarray]:
    """Runs all draft layers over a window of tokens: each from the hidden states of the one before, or all from the model's;
    in pieces of PIECE tokens, as `Model.hidden_of_windows` runs the model.

    window: int [n]; hidden: float32 [n, n_embd] of the model. Returns for each layer d = 0, 1, ... float32 [n - 1 - d, n_embd],
    whose row i predicts token i + d + 2.
    """
    out: list[np.ndarray] = []
    for depth, head in enumerate(model.draft_heads):
        tokens, states = window[depth + 1 :], out[-1] if out and head.is_chained else hidden
        out.append(head.hidden(head.new_cache(max(len(tokens), 1)), tokens, states[: len(tokens)], PIECE))
    return out
