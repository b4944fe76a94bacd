"""Checks Host, Origin and API key of every request, and adds security headers to every response."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, NamedTuple

from .page import PAGES
from .requests.checks import RequestError
from .tasks import origin

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Need no key: the pages themselves ask for the key and show nothing without it.
_PUBLIC_PATHS = (*PAGES, "/health", "/favicon.ico")

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+))(?::(?P<port>[0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


class WebOrigin(NamedTuple):
    """What browsers compare: pages of the same scheme, host and port are of one origin (RFC 6454)."""

    scheme: str
    host: str
    port: int


def read_host(scheme: str, header: str) -> WebOrigin | None:
    """The origin of what a Host header names: '[::1]:8080' -> '::1' and 8080, 'example.org' -> that and the scheme's port. None
    for what is no host and port (RFC 3986, without the characters that no name has)."""
    match = _HOST.fullmatch(header)
    if match is None or (match["port"] and int(match["port"]) > 65535):
        return None
    host = (match["v6"] or match["name"]).lower()
    return WebOrigin(scheme, host, int(match["port"] or _PORTS.get(scheme, 0)))


def read_origin(header: str) -> WebOrigin | None:
    """An Origin header; None for 'null' and for what is none."""
    scheme, separator, host = header.partition("://")
    return read_host(scheme.lower(), host) if separator else None


def known_hosts(host: str, more: Collection[str] = ()) -> frozenset[str]:
    """Names, in lower case, by which clients may call a server that is bound to `host`: that name, this machine's own ones
    unless the address is a loopback address, and `more`."""
    names = {host.strip("[]"), *more}
    if not is_loopback(host):
        own = socket.gethostname()
        names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
    return frozenset(name.rstrip(".").lower() for name in names if name)


def _is_address(host: str) -> bool:
    """Whether a host is an IP address: no name, so no name server of somebody else has led a browser here."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class SecurityMiddleware:
    """ASGI middleware that refuses requests of other sites and requests without the API key.

    A page of another site must not use this server through a visitor's browser. Its requests have an Origin other than that of
    this host; with DNS rebinding, when its own host name resolves to this machine, they have a foreign Host. Foreign origins
    are refused without an API key, foreign hosts always. A proxy that ends TLS on this machine says so by X-Forwarded-Proto,
    which uvicorn makes the scheme.
    """

    def __init__(
        self,
        app: App,
        respond: Callable[[Scope, RequestError], App],
        host: str,
        api_key: str | None,
        hosts: Collection[str] = (),
    ):
        """respond: makes the response to a refused request; host: name or address that the server is bound to; hosts:
        further names of this machine."""
        self._app, self._respond = app, respond
        self._hosts = known_hosts(host, hosts)
        self._loopback = is_loopback(host)
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request to the application, or responds with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        client = (scope.get("client") or ("?",))[0]
        asked = f"{client} {scope['method']} {scope['path'][:80]}"
        origin.set("".join(c if c.isprintable() else ascii(c)[1:-1] for c in asked))

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        error = self._check(scope)
        app = self._app if error is None else self._respond(scope, error)
        await app(scope, receive, send_with_headers)

    def _names_this_machine(self, host: str) -> bool:
        if is_loopback(host) or host.rstrip(".").lower() in self._hosts:
            return True
        return not self._loopback and _is_address(host)

    def _check(self, scope: Scope) -> RequestError | None:
        """The error that refuses a request, None if it is accepted."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin")
        own = read_host(scope.get("scheme", "http"), host)
        if own is None or not self._names_this_machine(own.host):
            message = f"the Host header ({host[:80]!r}) does not name this machine; --allow-host adds a name"
            return RequestError(message, code="forbidden_host", status=403)
        if origin is not None and read_origin(origin.decode("latin-1")) != own and self._key is None:
            return RequestError("requests from pages of other origins are refused", code="forbidden_origin", status=403)
        if self._key is not None and scope["path"] not in _PUBLIC_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            key = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
            if not hmac.compare_digest(key.strip(), self._key):
                message = "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY"
                return RequestError(message, code="invalid_api_key", status=401)
        return None
