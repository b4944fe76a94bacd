"""Measures the KL divergence that quantising some tensors causes while all others keep their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...formats import SourceTensor, TensorSource, TensorType
from ...jobs.outputs import Output
from ...quantize.gguf_source import simulated_tensor
from ...quantize.importance import Importance
from ...quantize.row_producer import ErrorWeights, RowProducer
from ..loading import load_model
from ..model import Model
from .divergence import ModelPredictions, score
from .perplexity import make_windows

if TYPE_CHECKING:
    from ...quantize.covariance.source import Covariances


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence from the unquantised model in nats: mean over the predictions and its standard error."""

    mean: float
    error: float


class Reference:
    """The outputs of an unquantised model on windows of a text, with which quantised variants are compared.

    Memory: 4 * n_embd bytes for every second token of the text.
    """

    def __init__(
        self,
        source: TensorSource,
        text: str | Sequence[int] | np.ndarray,
        n_ctx: int = 512,
        chunks: int | None = None,
        on_windows: Callable[[float], None] | None = None,
        **settings: Any,
    ):
        """text: or token ids; chunks: number of windows of n_ctx tokens, None: all; on_windows: called with how many of them a
        model has computed, fractions too; settings: of `load_model`."""
        self.source, self.settings, self._on_windows = source, settings, on_windows
        self.model = load_model(source, **settings)
        self.windows = make_windows(self.model, text, n_ctx, chunks)
        self._outputs = self._hidden(self.model)

    def _hidden(self, model: Model) -> list[np.ndarray]:
        """For each window the outputs that predict its second half, float32 [scored, n_embd]."""
        n_ctx = self.windows.shape[1]
        step = max(1, model.settings.batch // n_ctx)
        outputs: list[np.ndarray] = []
        report = self._on_windows
        for first in range(0, len(self.windows), step):
            model.on_windows = None if report is None else lambda done, first=first: report(first + done)
            hidden = model.hidden_of_windows(self.windows[first : first + step])
            outputs += [output[n_ctx // 2 : n_ctx - 1].copy() for output in hidden]
        return outputs

    def divergences(self, source: TensorSource) -> np.ndarray:
        """The divergence of another model with the same vocabulary at each prediction, float64 or float32 [predictions]."""
        model, middle = load_model(source, **self.settings), self.windows.shape[1] // 2
        each = zip(self._hidden(model), self.windows[:, middle + 1 :], self._outputs, strict=True)
        parts = [
            score(model, output, targets, ModelPredictions(self.model, base_output, targets)).divergences
            for output, targets, base_output in each
        ]
        return np.concatenate([part for part in parts if part is not None])

    def divergence(self, source: TensorSource) -> Divergence:
        """The divergence of another model with the same vocabulary; infinite if its predictions are not finite."""
        values = self.divergences(source)
        if not np.isfinite(values).all():
            return Divergence(np.inf, np.inf)
        return Divergence(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))

    def with_types(
        self, types: Mapping[str, TensorType], importance: Importance | None, covariances: Covariances | None = None
    ) -> Divergence:
        """The divergence of this model with some tensors quantised. types: tensor name -> type."""
        quantised = {name: _quantise(self.source.tensors[name], type, importance, covariances) for name, type in types.items()}
        return self.divergence(replace(self.source, tensors={**self.source.tensors, **quantised}))


def _quantise(
    tensor: SourceTensor, type: TensorType, importance: Importance | None, covariances: Covariances | None
) -> SourceTensor:
    """The tensor with the values that decoding it from this type gives; nothing is written to a file."""
    weights = ErrorWeights.of(tensor, importance, covariances)
    produce = RowProducer(tensor, type, weights, replaced=[], warn_on_range=False)
    simulated = simulated_tensor(Output(tensor.name, tensor.shape, tensor.source_type, type, "", produce))
    return SourceTensor(tensor.name, tensor.shape, type.name, simulated.read)
