"""Clients that keep connections open: they send nothing, half a request, or one byte after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from server import connected, http

HEADER, BODY = 20.0, 60.0  # seconds that `serve` gives a client for its header, and for its body
SLACK = 10.0  # seconds later that a loaded machine may close the connection
_HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
_HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_POST = http("/v1/completions", b"", length=100_000).replace(b"Connection: close\r\n", b"")

# kind -> (what is sent at once, seconds between the single bytes that follow or None, seconds until the server has to close)
KINDS: dict[str, tuple[bytes, float | None, float]] = {
    "no byte": (b"", None, HEADER),
    "half a header": (_HALF, None, HEADER),
    "half a header behind an answer": (_HEALTH + _HALF, None, HEADER),
    "header byte by byte": (_HALF, 0.5, HEADER),
    "no body": (_POST, None, BODY),
    "body byte by byte": (_POST + b'{"prompt": "', 0.5, BODY),
}


@dataclass
class Idle:
    """What idle clients did and saw. opened: connections; longest: seconds that one of them was open; both by kind."""

    opened: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def _hold(port: int, kind: str) -> None:
    """Keeps one connection open until the server closes it."""
    first, every, _ = KINDS[kind]

    async with connected(port) as (reader, writer):

        async def trickle(seconds: float) -> None:
            while True:
                await asyncio.sleep(seconds)
                writer.write(b"x")
                await writer.drain()

        writer.write(first)
        sending = asyncio.create_task(trickle(every)) if every is not None else None
        try:
            with suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])
                if not sending.cancelled():
                    sending.exception()  # a connection that the server has closed


async def keep_idle(port: int, idle: Idle, draw: random.Random, stop: asyncio.Event) -> None:
    """One client after the other, each as soon as the server has closed the last one's connection, until `stop` is set; the
    last one is waited for."""
    while not stop.is_set():
        kind = draw.choice(list(KINDS))
        idle.opened[kind] += 1
        limit, began = KINDS[kind][2] + SLACK, time.monotonic()
        try:
            await asyncio.wait_for(_hold(port, kind), limit)
        except TimeoutError:
            idle.problems.append(f"{kind}: the connection is still open after {limit:g} s")
        except OSError as error:
            idle.problems.append(f"{kind}: {type(error).__name__} after {time.monotonic() - began:.0f} s: {error}")
        idle.longest[kind] = max(idle.longest.get(kind, 0.0), time.monotonic() - began)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), draw.random())
