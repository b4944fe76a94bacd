"""The sampling that a model's file recommends: general.sampling.*, which `convert` takes from generation_config.json.

As in llama.cpp it stands for what was not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import PlanError
from ...request_fields import Field, fields_of
from .sampling_options import Sampling

_PREFIX = "general.sampling."
# key -> field of `Sampling`
KEYS = {
    "sequence": "samplers",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temp",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def recommended_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Sampling` that the metadata sets. Values that sampling cannot work with are passed over."""
    fields = {field.name: field for field in fields_of(Sampling)}
    chosen: dict[str, Any] = {}
    for key, name in KEYS.items():
        value = _value(metadata.get(_PREFIX + key), fields[name])
        if value is None:
            continue
        try:
            chosen[name] = getattr(Sampling(**{name: value}), name)
        except PlanError:
            continue
    return chosen


def _value(stored: Any, field: Field) -> Any:
    """A stored value as one of this field; None for one that is absent or of another kind."""
    if field.type not in ("int", "float"):
        return stored if isinstance(stored, str) and stored else None
    if isinstance(stored, bool | np.bool_) or not isinstance(stored, int | float | np.number):
        return None
    if field.type == "int":  # llama.cpp takes every top_k below 1 for all
        return max(int(stored), int(field.option.least or 0)) if np.isfinite(stored) and stored == int(stored) else None
    return float(f"{float(stored):.7g}")  # 0.6, not the nearest float32
