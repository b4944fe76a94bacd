"""Limits on what clients can hold open or cause: connections, the time of a request's header, messages of uvicorn."""

from __future__ import annotations

import logging
from asyncio import TimerHandle, Transport

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...errors import UsageError
from ...operating_system.process import open_file_limit
from ..line_limit import LineLimit

_RESERVED_FILES = 64  # descriptors that the program itself needs: model files, sockets, the process of the templates
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def connection_limit(wanted: int) -> int:
    """How many connections may be open at once: as wanted, or less if the process can open fewer files.

    Raises UsageError if the process can hardly open any.
    """
    limit = open_file_limit()
    if limit is None:
        return wanted
    if limit < _RESERVED_FILES + 8:
        raise UsageError(f"this process may open {limit} files only, too few for a server (ulimit -n)")
    return min(wanted, limit - _RESERVED_FILES)


def limited_protocol(max_connections: int, header_seconds: float) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1 with two limits.

    max_connections  one more takes the place of the one that has waited longest for the rest of its client's request, which
                     gets 408; where none waits for a client, it is answered with 503 and closed
    header_seconds   time from a connection's first byte, or from its opening, to the end of a request's header; then 408
    """

    class LimitedProtocol(H11Protocol):
        _header_timer: TimerHandle | None = None
        _waits_since: float = 0.0  # for a request: since the connection was opened, or since the last answer

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._waits_since = self.loop.time()
            if self._has_room():
                self._watch_header()
            else:
                self._refuse(_BUSY)

        def _has_room(self) -> bool:
            """Whether this connection can stay; another one may have to go for it."""
            others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
            if len(others) < max_connections:
                return True
            waiting = [each for each in others if isinstance(each, LimitedProtocol) and each._waits_for_client()]
            if waiting:
                min(waiting, key=lambda each: each._waits_since)._refuse(_TIMEOUT)
            return bool(waiting)

        def _waits_for_client(self) -> bool:
            return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            self._watch_header()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _watch_header(self) -> None:
            """Starts the timer while no request is being answered, and stops it otherwise."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._header_timer is None and not self.transport.is_closing():
                self._header_timer = self.loop.call_later(header_seconds, self._refuse, _TIMEOUT)

        def on_response_complete(self) -> None:
            self._stop_timer()  # uvicorn's own limit for idle connections applies until the next byte
            self._waits_since = self.loop.time()
            super().on_response_complete()

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self, response: bytes) -> None:
            self._stop_timer()
            if not self.transport.is_closing():
                self.transport.write(response)
                self.transport.close()

    return LimitedProtocol


class _LogFilter(logging.Filter):
    """Drops records beyond a limit."""

    def __init__(self, limit: LineLimit):
        super().__init__()
        self._limit = limit

    def filter(self, record: logging.LogRecord) -> bool:
        dropped = self._limit.admit()
        if dropped:
            record.msg = f"{record.msg} (and {dropped} messages that were left out)"
        return dropped is not None


def limit_logs(limit: LineLimit) -> None:
    """Applies a limit to the messages of uvicorn and asyncio, which a client can cause as often as it likes."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        for old in [each for each in logger.filters if isinstance(each, _LogFilter)]:
            logger.removeFilter(old)
        logger.addFilter(_LogFilter(limit))
