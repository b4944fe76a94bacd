"""Hyperparameters from GGUF metadata: keys are `ARCHITECTURE.name`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..formats import FormatError
from ..formats.metadata_values import MAX_LAYERS

_REQUIRED: Any = object()


class HParams:
    """One model's hyperparameters, checked as they are read; keys are given without the architecture's name.

    path: the model's, for error messages.
    """

    def __init__(self, metadata: Mapping[str, Any], path: str):
        self.metadata, self.path = metadata, path
        self.architecture = str(metadata.get("general.architecture", ""))

    def with_defaults(self, defaults: Mapping[str, Any]) -> HParams:
        """The same hyperparameters, with these values for keys that the metadata lacks."""
        values = {f"{self.architecture}.{key}": value for key, value in defaults.items()}
        return HParams(values | dict(self.metadata), self.path)

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    @property
    def is_latent(self) -> bool:
        """Whether the model has latent attention: keys and values of all heads are computed from one row per token."""
        return "attention.kv_lora_rank" in self

    def _get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is _REQUIRED:
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is missing")
        return value

    def int(self, key: str, default: int = _REQUIRED) -> int:
        """Raises FormatError when the key is missing (and has no default) or holds no single number."""
        value = self._get(key, default)
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is no single number") from None

    def size(self, key: str, default: int = _REQUIRED, minimum: int = 1, maximum: int = 1 << 31) -> int:
        """As `int`, for a count. Raises FormatError for one that is not from minimum to maximum."""
        value = self.int(key, default)
        if not minimum <= value <= maximum:
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is {value}, not {minimum} to {maximum}")
        return value

    def of_layer(self, key: str, layer: int, default: int = _REQUIRED, minimum: int = 1) -> int:
        """As `size`, for a number that is the same in all layers, or one of a list with one for each. Raises FormatError."""
        value = self._get(key, default)
        if np.ndim(value) == 0:
            return self.size(key, default, minimum)
        try:
            number = int(value[layer]) if layer < len(value) else -1
        except (TypeError, ValueError, OverflowError):
            raise FormatError(
                f"{self.path}: metadata key {self.architecture}.{key} is {value[layer]!r:.40} in layer {layer}"
            ) from None
        if not minimum <= number <= 1 << 31:
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is {number} in layer {layer}")
        return number

    def float(self, key: str, default: float = _REQUIRED) -> float:
        """As `int`, for a real number. Raises FormatError for NaN and infinity, too."""
        value = self._get(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is no single number") from None
        if not math.isfinite(number):
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is {number}")
        return number

    def shared_float(self, key: str, layer: int) -> float:
        """A number of one layer from a list under a key that no architecture's name precedes. Raises FormatError as `float`."""
        value = np.ravel(self.metadata.get(key, []))
        if layer >= len(value) or not math.isfinite(number := float(value[layer])):
            raise FormatError(f"{self.path}: metadata key {key} has no number for layer {layer}")
        return number

    def number_of_layer(self, key: str, layer: int) -> float:
        """A real number, perhaps infinite, of one layer from a list. Raises FormatError for a missing one and for NaN."""
        value = np.ravel(self._get(key, _REQUIRED))
        if layer >= len(value) or math.isnan(number := float(value[layer])):
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} has no number for layer {layer}")
        return number

    def float_of_layer(self, key: str, layer: int, default: float = _REQUIRED) -> float:
        """As `float`, for a number that is the same in all layers, or one of a list with one for each. Raises FormatError."""
        value = self._get(key, default)
        if np.ndim(value) == 0:
            return self.float(key, default)
        number = float(value[layer]) if layer < len(value) else math.nan
        if not math.isfinite(number):
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is {number} in layer {layer}")
        return number

    def positive(self, key: str, default: float = _REQUIRED) -> float:
        """As `float`, for a number above 0. Raises FormatError for another one."""
        value = self.float(key, default)
        if value <= 0:
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is {value}; it has to be above 0")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """The key's value as a truth value; a number is one too. Raises FormatError for a list or a text."""
        value = self._get(key, default)
        if not isinstance(value, bool | int | float | np.bool_ | np.number):
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} is {value!r:.60}, not true or false")
        return bool(value)

    def flags(self, key: str, n: int) -> list[bool] | None:
        """n truth values, from a list of them or from a period (all but every period-th are true); None without the key.

        Raises FormatError for a list of fewer.
        """
        value = self._get(key, None)
        if value is None:
            return None
        if np.ndim(value) == 0:
            period = self.int(key)
            return [period == 0 or (i + 1) % period != 0 for i in range(n)]
        if len(value) < n:
            raise FormatError(f"{self.path}: metadata key {self.architecture}.{key} has {len(value)} values, not {n}")
        return [bool(v) for v in value[:n]]

    def text(self, key: str, default: str = "") -> str:
        """The key's value as a string."""
        return str(self._get(key, default))


def n_layers(hparams: HParams) -> int:
    """Layers that are run: without those after them that predict several tokens at once."""
    return hparams.size("block_count", maximum=MAX_LAYERS) - n_draft_layers(hparams)


def n_draft_layers(hparams: HParams) -> int:
    """Layers after the last one that is run, which predict further tokens (multi-token prediction)."""
    return hparams.size("nextn_predict_layers", 0, 0, hparams.size("block_count", maximum=MAX_LAYERS) - 1)
