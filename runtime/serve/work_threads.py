"""Threads for what takes long beside the event loop, few of each kind, so that no kind of work holds up another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from ...formats import FormatError
from .engine import Busy
from .requests.checks import RequestError
from .responses import as_request_error

SHORT = 1 << 16  # characters, bytes or tokens of what is short work
# Threads of each kind of work, so that long texts and what goes through a whole vocabulary do not hold up short texts.
# Templates are rendered by one process; files of models are looked at by one thread.
_THREADS = {"short": 2, "long": 1, "json": 1, "vocabulary": 1, "template": 1, "files": 1}
_MAX_WAITING = 64  # requests that wait for one of these threads
T = TypeVar("T")


class WorkThreads:
    """The threads of a server."""

    def __init__(self) -> None:
        self._limiters = {kind: CapacityLimiter(count) for kind, count in _THREADS.items()}
        self._n_inside = dict.fromkeys(_THREADS, 0)  # requests that have one of these threads, or wait for it

    async def run(self, function: Callable[..., T], *arguments: Any, size: int = 0, kind: str = "") -> T:
        """The result of a function that may take long for a long text. Few run at once: other requests are served meanwhile,
        and short work does not wait for long work.

        size: characters, bytes or tokens; kind: a name of _THREADS, or '' for what follows from the size. Raises RequestError
        for a text that the vocabulary cannot write, and when too many wait already.
        """
        kind = kind or ("long" if size > SHORT else "short")
        if self._n_inside[kind] >= _THREADS[kind] + _MAX_WAITING:
            raise as_request_error(Busy(f"{_MAX_WAITING} requests wait already; try again later"))
        self._n_inside[kind] += 1
        try:
            return await to_thread.run_sync(function, *arguments, limiter=self._limiters[kind])
        except FormatError as error:
            raise RequestError(str(error), code="invalid_value") from None
        finally:
            self._n_inside[kind] -= 1
