"""Values of GGUF metadata as what is needed of them: a file may hold anything under any key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import FormatError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


MAX_LAYERS = 10_000


def text_of(metadata: Mapping[str, Any], key: str) -> str:
    """The text under a key; '' if there is none, or something else."""
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def whole_number(
    metadata: Mapping[str, Any], key: str, default: int = 0, *, maximum: int = 1 << 31, path: object = "the model"
) -> int:
    """The whole number from 0 to maximum under a key; default: if there is none. Raises FormatError for anything else."""
    value = metadata.get(key, default)
    is_number = isinstance(value, int | np.integer | float | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= maximum or value != int(value):
        raise FormatError(f"{path}: metadata key {key} is {value!r:.60}; a whole number from 0 to {maximum} is needed")
    return int(value)
