"""What a server is given, whatever models it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from ...data_classes import dataclass
from .requests.checks import RequestError
from .tasks import EndEvent


class RefusedRequest(NamedTuple):
    """A request that was answered with an error."""

    method: str
    path: str
    error: RequestError

    def __str__(self) -> str:
        """One line: what was asked, the status, the field at fault, and the message."""
        field = f" ({self.error.param})" if self.error.param else ""
        line = f"refused {self.method} {self.path[:80]}: {self.error.status}{field} {self.error.message[:300]}"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


@dataclass(frozen=True)
class ServerSettings:
    """
    host, port       address to bind; port 0: any free one
    hosts            further names of this machine that a request's Host may have
    api_key          key that clients have to send
    max_connections  connections that may be open; fewer if the process can open fewer files
    max_queue        requests that may wait besides the running ones
    max_body         largest size of a request in bytes
    header_seconds   time that a client has for the header of a request
    body_seconds     time that a client has for the body of a request
    template         chat template, as for `find_template`
    metrics          /metrics shows what the server has done
    slot_save_path   folder of prompts that clients save and restore
    warm_up          run a short prompt first
    on_ready         called with the URL when the socket listens
    on_end           called at the end of each answer
    on_refused       called with each request that is answered with an error
    stop             the server ends when it is set (needed off the main thread, which gets no signals)
    """

    host: str = "127.0.0.1"
    port: int = 8080
    hosts: Collection[str] = ()
    api_key: str | None = None
    max_connections: int = 256
    max_queue: int = 16
    max_body: int = 8 << 20
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    template: str | None = None
    metrics: bool = False
    slot_save_path: Path | None = None
    warm_up: bool = True
    on_ready: Callable[[str], None] | None = None
    on_end: Callable[[EndEvent], None] | None = None
    on_refused: Callable[[RefusedRequest], None] | None = None
    stop: threading.Event | None = None


DEFAULTS = ServerSettings()
