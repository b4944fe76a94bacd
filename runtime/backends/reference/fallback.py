"""The reference function of an op in place of a backend's own."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def note_fallback(backend: str, op: str) -> None:
    """Warns, once for each kind of op, that a backend computes it by its reference function."""
    warnings.warn(
        f"the {backend} backend has no code of its own for {op}: its reference function computes it, slowly", stacklevel=3
    )
