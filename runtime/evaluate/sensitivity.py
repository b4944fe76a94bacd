"""How much a model's predictions suffer when some of its weights are quantised and all others are left as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...formats import SourceTensor, TensorSource, TensorType
from ...jobs.plan import Output
from ...quantize.gguf_source import simulated_tensor
from ...quantize.planning import Importance
from ...quantize.transform import row_producer
from ..model import Model, load_model
from .divergence import score
from .perplexity import windows_of


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence from the unquantised model: mean over the predictions and its standard error, in nats."""

    mean: float
    error: float


class Reference:
    """A model's predictions on the first `chunks` windows of a text or of token ids, kept to compare many others with.

    settings: of load_model. Takes 4 bytes x embedding length for every second token of the text.
    """

    def __init__(
        self,
        source: TensorSource,
        text: str | Sequence[int] | np.ndarray,
        n_ctx: int = 512,
        chunks: int | None = None,
        **settings: Any,
    ):
        self.source, self.settings = source, settings
        self.model = load_model(source, **settings)
        self.windows = windows_of(self.model, text, n_ctx, chunks)
        self._outputs = self._hidden(self.model)

    def _hidden(self, model: Model) -> list[np.ndarray]:
        """The outputs that predict the second half of each window, float32 [scored, n_embd]."""
        n_ctx = self.windows.shape[1]
        together = max(1, model.settings.batch // n_ctx)
        found: list[np.ndarray] = []
        for at in range(0, len(self.windows), together):
            batch = [(model.new_cache(n_ctx), window) for window in self.windows[at : at + together]]
            found += [output[n_ctx // 2 : n_ctx - 1].copy() for output in model.hidden(batch)]
        return found

    def divergence(self, source: TensorSource) -> Divergence:
        """Of another model with the same vocabulary, or of this one with other weights; infinite if it computes no numbers."""
        model = load_model(source, **self.settings)
        first = self.windows.shape[1] // 2
        parts = [
            score(model, output, window[first + 1 :], self.model, base).divergences
            for output, window, base in zip(self._hidden(model), self.windows, self._outputs, strict=True)
        ]
        values = np.concatenate([part for part in parts if part is not None])
        if not np.isfinite(values).all():
            return Divergence(np.inf, np.inf)
        return Divergence(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))

    def with_types(self, types: Mapping[str, TensorType], importance: Importance | None) -> Divergence:
        """Of this model with these tensors quantised to these types."""
        changed = {name: _quantised(self.source.tensors[name], kind, importance) for name, kind in types.items()}
        return self.divergence(replace(self.source, tensors={**self.source.tensors, **changed}))


def _quantised(tensor: SourceTensor, kind: TensorType, importance: Importance | None) -> SourceTensor:
    weights = importance.for_tensor(tensor) if importance is not None else None
    produce = row_producer(tensor, kind, weights, [])
    planned = simulated_tensor(Output(tensor.name, tensor.shape, tensor.source_type, kind, "", produce))
    return SourceTensor(tensor.name, tensor.shape, kind.name, planned.read)
