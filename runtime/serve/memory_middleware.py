"""Gives memory back after large requests: what the C library has got for one it keeps otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ...operating_system.memory import trim_free_memory

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LARGE = 1 << 18  # bytes of a request and its response together
_DELAY = 1.0  # seconds: requests that end meanwhile are done with one look at the memory


class MemoryMiddleware:
    """ASGI middleware that has free memory returned to the system a moment after a large request."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], trim: Callable[[], None] = trim_free_memory):
        self._app, self._trim, self._is_due = app, trim, False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        n_bytes = 0

        async def counted_receive() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal n_bytes
            n_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            if n_bytes >= LARGE and not self._is_due:
                self._is_due = True
                asyncio.get_running_loop().call_later(_DELAY, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        threading.Thread(target=self._trim, daemon=True).start()
