"""How much memory a call may use: what `memory` says, else half of what is free."""

from __future__ import annotations

from ...operating_system.memory import free_bytes
from .arguments import Size, as_bytes
from .figures import size_text
from .messages import warn

_UNKNOWN = 8 << 30  # where the system does not say what is free


def memory_budget(asked: Size | None) -> int:
    """Bytes. Raises PlanError for a text that is no size."""
    given = as_bytes(asked)
    if given is not None:
        return given
    free = free_bytes()
    return free // 2 if free is not None else _UNKNOWN


PROGRAM = 75 << 20  # bytes of a program that reads and writes importance matrices and covariances, measured


def warn_over(needed: int, memory: int | None, what: str, hint: str) -> None:
    """Warns if `what` takes more bytes than --memory says. hint: how to take less."""
    if memory is not None and needed > memory:
        warn([f"{what} takes {size_text(needed)}, more than --memory; {hint}"])
