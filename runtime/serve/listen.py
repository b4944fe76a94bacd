"""Runs the HTTP application with uvicorn: opens the socket and shuts down in order."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from ...formats import MillError
from ...operating_system.process import reuse_address, signals_handled_as
from ..line_limit import LineLimit
from ..model import Model
from .app import make_app, make_models_app, make_service, service_routes
from .connections import connection_limit, limit_logs, limited_protocol
from .engine import Engine
from .model_folder import ModelFolder
from .served_models import ServedModels
from .server_settings import ServerSettings
from .service import Service
from .tasks import EndEvent
from .work_threads import WorkThreads

_BACKLOG = 128  # connections that wait to be accepted
_ACCEPTED = 8  # connections that are accepted at a time, before they are counted: few against the reserve of descriptors
_SHUTDOWN_SECONDS = 5  # that open connections may take to end after the generations have ended


class _Server(uvicorn.Server):
    """Stops the engine before the connections: answers may take minutes, and clients get an error in place of the rest."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]):
        """stop: ends all generations and returns at once."""
        super().__init__(config)
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio has set as many as it accepts at a time

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends in the same order after the signals that end the program as SIGTERM does, such as SIGHUP."""
        before, numbers = signal.getsignal(signal.SIGTERM), signals_handled_as(signal.SIGTERM)
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread():
                numbers = []
            for each in numbers:
                signal.signal(each, self.handle_exit)
            try:
                yield
            finally:
                for each in numbers:
                    signal.signal(each, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Ends all generations and the server; may be called from any thread."""
        self._stop()
        self.should_exit = True


def serve(
    model: Model, settings: ServerSettings, *, alias: str | None = None, options: Mapping[str, Any] | None = None
) -> None:
    """Serves a model until SIGINT or SIGTERM, or until `settings.stop` is set. alias, options: as of `make_app`.

    Raises MillError when the address cannot be bound, UsageError when the process can open too few files. After a signal its
    handler runs: by default KeyboardInterrupt is raised.
    """
    listener = _listen(settings.host, settings.port)
    engine = Engine(model, settings.max_queue, settings.on_end)
    try:
        application = make_app(model, settings, engine=engine, alias=alias, options=options)
        if settings.warm_up:
            engine.warm_up()
        _run(application, engine.stop, listener, settings)
    finally:
        engine.close()
        listener.close()


def serve_models(
    folder: str | Path,
    open_model: Callable[[Path], tuple[Model, Mapping[str, Any]]],
    settings: ServerSettings,
    **models_arguments: Any,
) -> None:
    """Serves the models of a folder as `serve` does one, each when a request asks for it.

    open_model        loads a file: the model, and the options (of `make_app`) for requests that do not set them
    models_arguments  further arguments of `ServedModels`

    Raises MillError as `serve`, and when the folder cannot be listed.
    """
    threads = WorkThreads()

    def load(path: Path, name: str) -> tuple[Service, list[Route]]:
        def ended(end: EndEvent) -> None:
            if settings.on_end is not None:
                settings.on_end(replace(end, origin=f"{end.origin} [{name}]"))

        model, options = open_model(path)
        engine = Engine(model, settings.max_queue, ended)
        try:
            service = make_service(model, engine, threads, settings, name, options)
        except BaseException:
            engine.close()
            raise
        if settings.warm_up:
            engine.warm_up()
        return service, service_routes(service, settings.slot_save_path)

    models = ServedModels(ModelFolder(folder), threads, load=load, max_waiting=settings.max_queue, **models_arguments)
    listener = _listen(settings.host, settings.port)
    try:
        _run(make_models_app(models, settings), models.stop, listener, settings)
    finally:
        models.stop()
        listener.close()


def _run(application: Starlette, end: Callable[[], None], listener: socket.socket, settings: ServerSettings) -> None:
    """Runs an application. end: ends all generations and returns at once."""
    config = uvicorn.Config(
        application,
        http=limited_protocol(connection_limit(settings.max_connections), settings.header_seconds),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    server = _Server(config, end)
    if settings.on_ready is not None:
        settings.on_ready(browser_url(settings.host, listener.getsockname()[1]))
    if settings.stop is not None:
        threading.Thread(target=_stop_when_set, args=(settings.stop, server), daemon=True).start()
    limit_logs(LineLimit())
    server.run(sockets=[listener])


def _stop_when_set(stop: threading.Event, server: _Server) -> None:
    stop.wait()
    server.stop()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises MillError."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, protocol, _, address = addresses[0]
        # With the protocol asyncio knows TCP, and turns off Nagle's algorithm: 40 ms for each request of a kept connection.
        listener = socket.socket(family, socket.SOCK_STREAM, protocol)
        try:
            reuse_address(listener)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MillError(f"cannot listen on {host}, port {port}: {reason} (--host and --port choose another place)") from None


def browser_url(host: str, port: int) -> str:
    """The URL with which a browser reaches the server: from other machines too, if it listens on all addresses."""
    name = host.strip("[]")
    if name in ("0.0.0.0", "::"):
        name = _own_address(socket.AF_INET if name == "0.0.0.0" else socket.AF_INET6)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _own_address(family: socket.AddressFamily) -> str:
    """The address from which this machine reaches others; the loopback address where it reaches none."""
    elsewhere, loopback = ("192.0.2.1", "127.0.0.1") if family == socket.AF_INET else ("2001:db8::1", "::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # finds a route, and sends nothing
            return probe.getsockname()[0].partition("%")[0]
    except OSError:
        return loopback
