"""Listening: a socket, uvicorn on it, and an end in good order."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from ...formats import MillError
from ..model import Model
from .app import make_app
from .engine import End, Engine

_GRACE = 5  # seconds that connections get to end by themselves


class _Server(uvicorn.Server):
    """Ends what is being generated as soon as it is told to stop: answers may take minutes, and their clients are told."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.stop()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Takes nothing more and ends what runs."""
        self._engine.stop()
        self.should_exit = True


def serve(
    model: Model,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    waiting: int = 16,
    warm_up: bool = True,
    on_ready: Callable[[str], None] | None = None,
    on_end: Callable[[End], None] | None = None,
    stop: threading.Event | None = None,
    **app: Any,
) -> None:
    """Serves a model until SIGINT or SIGTERM (or, off the main thread, until `stop` is set).

    host, port: where to listen, port 0 for any that is free; waiting: requests that may queue up; warm_up: read a short
    prompt first; on_ready: told the address; on_end: told of each answer; app: further arguments of `make_app`.
    Raises MillError when the address cannot be had. After a signal KeyboardInterrupt is raised, or what else its handler does.
    """
    listening = _listen(host, port)
    engine = Engine(model, waiting, on_end)
    try:
        config = uvicorn.Config(
            make_app(model, engine=engine, host=host, **app),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE,
        )
        server = _Server(config, engine)
        if warm_up:
            engine.warm_up()
        if on_ready is not None:
            on_ready(address(host, listening.getsockname()[1]))
        if stop is not None:
            threading.Thread(target=_until, args=(stop, server), daemon=True).start()
        server.run(sockets=[listening])
    finally:
        engine.close()
        listening.close()


def _until(stop: threading.Event, server: _Server) -> None:
    stop.wait()
    server.end()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            if sys.platform != "win32":  # where it would let two servers have the same port
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(128)
        except OSError:
            listening.close()
            raise
        return listening
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MillError(f"cannot listen on {host}, port {port}: {reason} (--host and --port choose another place)") from None


def address(host: str, port: int) -> str:
    """The URL of a server for a browser on this machine."""
    name = host.strip("[]")
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
