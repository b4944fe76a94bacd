"""Who may ask: host names, origins, keys; and the headers that every answer carries."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .requests import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/health", "/favicon.ico")  # paths that need no key: the page asks for one, and shows nothing without

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def host_name(header: str) -> str:
    """'[::1]:8080' -> '::1', 'example.org:80' -> 'example.org'."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


class Guard:
    """ASGI middleware.

    A page of another site must not use this server through a visitor's browser: its requests carry an Origin that is not this
    host, and if it made its own name point here (DNS rebinding) a Host that is not this machine. Both are refused, the second
    where the server is bound to the loopback address, as elsewhere its names are not known.
    """

    def __init__(self, app: App, refuse: Callable[[RequestError], App], bound_to: str, api_key: str | None):
        """refuse: makes the answer to a refused request; bound_to: host name or address that the server listens on."""
        self._app, self._refuse = app, refuse
        self._loopback = is_loopback(bound_to)
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        problem = self._problem(scope)
        app = self._app if problem is None else self._refuse(problem)
        await app(scope, receive, send_with_headers)

    def _problem(self, scope: Scope) -> RequestError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin")
        if self._loopback and not is_loopback(host_name(host)):
            return RequestError("the Host header does not name this machine", code="forbidden_host", status=403)
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host and self._key is None:
            return RequestError("requests from pages of other origins are refused", code="forbidden_origin", status=403)
        if self._key is not None and scope["path"] not in _OPEN:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                message = "a valid API key is needed: Authorization: Bearer KEY"
                return RequestError(message, code="invalid_api_key", status=401)
        return None
