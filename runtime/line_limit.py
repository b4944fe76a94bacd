"""How many lines a log takes: a token bucket, so that a flood of requests cannot fill a disk."""

from __future__ import annotations

import time
from collections.abc import Callable


class LineLimit:
    """Lets through `burst` lines at once and `per_second` of them in the long run, and counts the others."""

    def __init__(self, burst: int = 100, per_second: float = 2.0, clock: Callable[[], float] = time.monotonic):
        self._burst, self._rate, self._clock = float(burst), per_second, clock
        self._left, self._last, self._dropped = self._burst, clock(), 0

    def admit(self) -> int | None:
        """None for a line that is one too many; otherwise how many were dropped since the last one."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._last) * self._rate)
        self._last = now
        if self._left < 1:
            self._dropped += 1
            return None
        self._left -= 1
        dropped, self._dropped = self._dropped, 0
        return dropped
