"""Byte ranges of files on a web server (RFC 9110, section 14), with retries that continue where a connection broke."""

from __future__ import annotations

import http.client
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from urllib.parse import urlsplit

import numpy as np

from ...formats import MillError

MAX_PAUSE = 30.0  # seconds between two attempts
MAX_RETRY_AFTER = 120.0  # seconds that a server's Retry-After is obeyed at most
PROGRESS_BYTES = 1 << 16  # a connection that brought this many before it broke does not count as a failed attempt in a row
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_FATAL = {401: "access is denied; a token in HF_TOKEN may help", 403: "access is denied", 404: "there is no such file"}
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Sends the token to the server of the original URL only, not to one that it redirects to."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.URLError("redirected to something other than http")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            new.remove_header("Authorization")
        return new


class Transport:
    """Fetches byte ranges; may be used by several threads."""

    def __init__(self, token: str | None = None, *, timeout: float = 30.0, attempts: int = 6, pause: float = 0.5):
        """token: for the server of the requested URL. timeout: seconds without any byte. attempts: in a row without progress;
        between them `pause`, 2 `pause`, 4 `pause` ... seconds, at most MAX_PAUSE, and at least what the server asks for."""
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "ggufmill"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout, self._attempts, self._pause = timeout, attempts, pause
        self._opener = urllib.request.build_opener(_RedirectHandler)

    def fetch(self, url: str, start: int, stop: int, size: int) -> np.ndarray:
        """Bytes [start, stop) of a file of `size` bytes -> uint8 [stop - start]. Raises MillError if they cannot be fetched."""
        out = np.empty(stop - start, np.uint8)
        received, failures = 0, 0
        while received < len(out):
            retry_after = 0.0
            before = received
            try:
                for count in self._receive(url, start + received, stop, size, out[received:]):
                    received += count
                if received == len(out):
                    break
                problem = "the connection was closed too early"
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}"
                if error.code not in _TEMPORARY:
                    raise MillError(f"{without_query(url)}: {_FATAL.get(error.code, problem)}") from None
                retry_after = _seconds(error.headers.get("Retry-After"))
                error.close()
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", None) or error or type(error).__name__)
            failures = 1 if received - before >= PROGRESS_BYTES else failures + 1
            if failures >= self._attempts:
                raise MillError(f"{without_query(url)}: gave up after {failures} attempts: {problem}")
            pause = min(MAX_PAUSE, self._pause * 2 ** (failures - 1))
            threading.Event().wait(max(retry_after, pause * random.uniform(0.75, 1.25)))
        return out

    def _receive(self, url: str, start: int, stop: int, size: int, out: np.ndarray) -> Iterable[int]:
        """Fills `out` from one request, yielding the number of bytes after each read; may end early."""
        request = urllib.request.Request(url, headers=self._headers | {"Range": f"bytes={start}-{stop - 1}"})
        with self._opener.open(request, timeout=self._timeout) as response:
            if response.status != 206 and not (start == 0 and stop == size and response.status == 200):
                raise MillError(f"{without_query(url)}: the server does not serve parts of files; download the model instead")
            if response.status == 206:
                sent = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if sent is None or int(sent[1]) != start or not start <= int(sent[2]) < stop:
                    raise http.client.HTTPException("the server sent another range than was asked for")
                if int(sent[3]) != size:
                    raise MillError(
                        f"{without_query(url)}: has {sent[3]} bytes, not {size}: the file has changed on the server"
                    )
            received = 0
            while received < len(out):
                count = response.readinto(out[received:].data)
                if not count:
                    return
                received += count
                yield count


def without_query(url: str) -> str:
    """The URL without its query, which may contain a signature; for messages."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def _seconds(text: str | None) -> float:
    try:
        return min(MAX_RETRY_AFTER, max(0.0, float(text or 0)))
    except ValueError:
        return 0.0
