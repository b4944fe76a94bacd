"""Steps within a chunk that takes long: what computes it says which one begins, and whoever has it computed gets to hear."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 0.5  # seconds between two steps that are told: the others pass unheard


class _Thread(threading.local):
    """on_step: who listens to what this thread computes; told: when a step was told last."""

    on_step: Callable[[str], None] | None = None
    told = 0.0


_thread = _Thread()


@contextmanager
def hearing(on_step: Callable[[str], None] | None) -> Iterator[None]:
    """Within this, on_step, if it is not None, is called with steps of what this thread computes, from half a second on."""
    _thread.on_step, _thread.told = on_step, time.monotonic()
    try:
        yield
    finally:
        _thread.on_step = None


def listener() -> Callable[[str], None] | None:
    """Who listens to what this thread computes."""
    return _thread.on_step


def begin_step(name: str) -> None:
    """Says what begins now."""
    on_step, now = _thread.on_step, time.monotonic()
    if on_step is not None and now - _thread.told >= _EVERY:
        _thread.told = now
        on_step(name)
