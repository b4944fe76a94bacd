"""Measures the KL divergence that quantising some tensors causes while all others keep their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data_classes import dataclass
from ...formats import SourceTensor, TensorSource, TensorType
from ...jobs.outputs import Output
from ...operating_system.memory import free_bytes
from ...quantize.gguf_source import simulated_tensor
from ...quantize.importance import Importance
from ...quantize.row_producer import ErrorWeights, RowProducer, rows_within
from ..loading import load_model
from ..model import Model
from .divergence import ModelPredictions, score
from .perplexity import make_windows

if TYPE_CHECKING:
    from ...quantize.covariance.source import Covariances

_KEPT_BYTES, _KEPT_SHARE = 1 << 30, 4  # of encoded rows: as many, or one in so many of those free


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence from the unquantised model in nats: mean over the predictions and its standard error."""

    mean: float
    error: float


class Reference:
    """The outputs of an unquantised model on windows of a text, with which quantised variants are compared.

    Memory: 4 * n_embd bytes for every second token of the text, and the quantised tensors of the last variant, up to a quarter
    of what is free.
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
        self._encoded = _EncodedRows(most_rows_kept())

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
        self._encoded.choose(types, importance, covariances)
        quantised = {name: self._encoded.tensor(self.source.tensors[name], kind) for name, kind in types.items()}
        return self.divergence(replace(self.source, tensors={**self.source.tensors, **quantised}))


def most_rows_kept() -> int:
    """Bytes of encoded rows that a reference keeps, at the most."""
    free = free_bytes()
    return _KEPT_BYTES if free is None else free // _KEPT_SHARE


class _EncodedRows:
    """Rows of the last choice of types as they were encoded, of which another that differs in a few tensors has most. limit:
    bytes at most; rows beyond it are encoded each time."""

    def __init__(self, limit: int):
        self._limit, self._free, self._lock = limit, limit, Lock()
        self._kept, self._data = dict[tuple[str, str], dict[tuple[int, int], np.ndarray]](), (None, None)

    def choose(self, types: Mapping[str, TensorType], importance: Importance | None, covariances: Covariances | None) -> None:
        """Forgets the rows of other types, and those that other data were used for."""
        data = importance, covariances
        known = self._kept if all(a is b for a, b in zip(data, self._data, strict=True)) else {}
        chosen = [(name, kind.name) for name, kind in types.items()]
        self._kept, self._data = {key: known.get(key, {}) for key in chosen}, data
        self._free = self._limit - sum(rows.nbytes for kept in self._kept.values() for rows in kept.values())

    def tensor(self, tensor: SourceTensor, type: TensorType) -> SourceTensor:
        """The tensor with the values that decoding it from this type gives; nothing is written to a file."""
        produce = RowProducer(tensor, type, ErrorWeights.of(tensor, *self._data), replaced=[], warn_on_range=False)
        kept = self._kept[tensor.name, type.name]

        def run_of(run: tuple[int, int]) -> np.ndarray:
            found = kept.get(run)
            if found is None:
                found = produce(*run)
                with self._lock:
                    if found.nbytes <= self._free:
                        found.setflags(write=False)
                        kept[run] = found
                        self._free -= found.nbytes
            return found

        def rows(start: int, stop: int) -> np.ndarray:
            return rows_within(start, stop, {run: run_of(run) for run in produce.blocks(start, stop).values()})

        simulated = simulated_tensor(Output(tensor.name, tensor.shape, tensor.source_type, type, "", rows))
        return SourceTensor(tensor.name, tensor.shape, type.name, simulated.read)
