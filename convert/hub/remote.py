"""Safetensors files on a server, read by HTTP range: no shard is ever on disk, and little of one in memory.

The tensors that are going to be read are known in order, so a few connections fetch ahead of the reader, in pieces of at most
PIECE bytes; AHEAD pieces are under way and KEPT in memory at most. A dropped connection is taken up where it broke. Ranges:
RFC 9110, section 14.
"""

from __future__ import annotations

import http.client
import queue
import random
import re
import threading
import urllib.error
import urllib.request
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from ...formats import FormatError, MillError, PlanError
from ...formats.safetensors import StoredTensor, header_length, parse_header

PIECE = 8 << 20
AHEAD = 6
KEPT = 16
CONNECTIONS = 4
FIRST = 1 << 16  # bytes asked for at once of a file whose header is not known: most headers fit
RESTARTS = 1 << 16  # a connection that brought so many bytes before it broke counts as new luck
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_HOPELESS = {401: "access is denied; a token in HF_TOKEN may help", 403: "access is denied", 404: "there is no such file"}
_PASSING = (408, 425, 429, 500, 502, 503, 504)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The token is for the server that was asked, not for where that one sends us."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.URLError("redirected to something other than http")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            new.remove_header("Authorization")
        return new


class Transport:
    """Fetches ranges of files.

    token: sent to the server of the URL that is asked for, never to one it redirects to. timeout: seconds without any byte.
    attempts: in a row without progress; between them pause, 2 pause, 4 pause ... seconds, at most 30, and never less than the
    server asks for.
    """

    def __init__(self, token: str | None = None, *, timeout: float = 30.0, attempts: int = 6, pause: float = 0.5):
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "ggufmill"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout, self._attempts, self._pause = timeout, attempts, pause
        self._opener = urllib.request.build_opener(_Redirects)

    def fetch(self, url: str, start: int, stop: int, size: int) -> np.ndarray:
        """uint8 [stop - start]: those bytes of a file of `size` bytes. Raises MillError when they cannot be had."""
        out = np.empty(stop - start, np.uint8)
        have, failed = 0, 0
        while have < len(out):
            wait = 0.0
            before = have
            try:
                for count in self._receive(url, start + have, stop, size, out[have:]):
                    have += count
                if have == len(out):
                    break
                problem = "the connection was closed too early"
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}"
                if error.code not in _PASSING:
                    raise MillError(f"{_shown(url)}: {_HOPELESS.get(error.code, problem)}") from None
                wait = _seconds(error.headers.get("Retry-After"))
                error.close()
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", None) or error or type(error).__name__)
            failed = 1 if have - before >= RESTARTS else failed + 1
            if failed >= self._attempts:
                raise MillError(f"{_shown(url)}: gave up after {failed} attempts: {problem}")
            pause = min(30.0, self._pause * 2 ** (failed - 1))
            threading.Event().wait(max(wait, pause * random.uniform(0.75, 1.25)))
        return out

    def _receive(self, url: str, start: int, stop: int, size: int, out: np.ndarray) -> Iterable[int]:
        """Fills `out`, saying after each part how many bytes came. It may end early."""
        request = urllib.request.Request(url, headers=self._headers | {"Range": f"bytes={start}-{stop - 1}"})
        with self._opener.open(request, timeout=self._timeout) as answer:
            if answer.status != 206 and not (start == 0 and stop == size and answer.status == 200):
                raise MillError(f"{_shown(url)}: the server does not serve parts of files; download the model instead")
            if answer.status == 206:
                told = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if told is None or int(told[1]) != start or not start <= int(told[2]) < stop:
                    raise http.client.HTTPException("the server sent another range than was asked for")
                if int(told[3]) != size:
                    raise MillError(f"{_shown(url)}: has {told[3]} bytes, not {size}: the file has changed on the server")
            have = 0
            while have < len(out):
                count = answer.readinto(out[have:].data)
                if not count:
                    return
                have += count
                yield count


def _shown(url: str) -> str:
    """Without a query, which may carry a signature."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def _seconds(text: str | None) -> float:
    try:
        return min(120.0, max(0.0, float(text or 0)))
    except ValueError:
        return 0.0


class RemoteShard:
    """A safetensors file of `size` bytes on a server, read through the pieces of `ahead`."""

    def __init__(self, url: str, size: int, ahead: ReadAhead):
        self.url, self.size, self._ahead = url, size, ahead
        self.pieces: list[tuple[int, int]] = []  # in order; of what is known to be going to be read

    def directory(self, path: Path) -> dict[str, StoredTensor]:
        """The tensors of the header, `path` naming the file in messages. Raises MillError."""
        transport = self._ahead.transport
        first = transport.fetch(self.url, 0, min(FIRST, self.size), self.size).tobytes()
        stop = 8 + header_length(path, first, self.size)
        if stop > len(first):
            first += transport.fetch(self.url, len(first), stop, self.size).tobytes()
        return parse_header(path, first[8:stop], self.size, self)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        if offset + nbytes > self.size:
            raise FormatError(f"{_shown(self.url)}: ends at byte {self.size}, before {offset + nbytes}")
        out = np.empty(nbytes, np.uint8)
        at, stop = offset, offset + nbytes
        while at < stop:
            start, end = self._piece(at, stop)
            part = self._ahead.get(self, start, end)[at - start : stop - start]
            out[at - offset : at - offset + len(part)] = part
            at += len(part)
        return out

    view = read

    def _piece(self, at: int, stop: int) -> tuple[int, int]:
        """The piece that holds byte `at`; where none was planned, one up to `stop`."""
        rank = bisect_right(self.pieces, (at, self.size + 1)) - 1
        if rank >= 0 and at < self.pieces[rank][1]:
            return self.pieces[rank]
        after = self.pieces[rank + 1][0] if rank + 1 < len(self.pieces) else stop
        return at, min(stop, after, at + PIECE)


class ReadAhead:
    """The pieces in memory and under way, for all shards of a model."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self._order: list[tuple[RemoteShard, int, int]] = []
        self._ranks: dict[tuple[RemoteShard, int], list[int]] = {}
        self._held: OrderedDict[tuple[RemoteShard, int, int], Future[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self._at = 0
        self._todo: queue.SimpleQueue[tuple[tuple[RemoteShard, int, int], Future[np.ndarray]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def expect(self, tensors: Iterable[StoredTensor]) -> None:
        """These are going to be read, in this order. Small neighbours are fetched in one piece, large tensors in several."""
        order: list[tuple[RemoteShard, int, int]] = []
        cut: set[tuple[RemoteShard, int]] = set()  # tensors that have their pieces, by where they begin
        for tensor in tensors:
            shard = tensor.shard
            if not isinstance(shard, RemoteShard) or not tensor.nbytes or (shard, tensor.offset) in cut:
                continue
            cut.add((shard, tensor.offset))
            start, stop = tensor.offset, tensor.offset + tensor.nbytes
            if order and order[-1][0] is shard and order[-1][2] == start and stop - order[-1][1] <= PIECE:
                order[-1] = (shard, order[-1][1], stop)
                continue
            order += [(shard, at, min(at + PIECE, stop)) for at in range(start, stop, PIECE)]
        with self._lock:
            self._order, self._ranks, self._at = order, {}, 0
            for rank, (shard, start, _) in enumerate(order):
                self._ranks.setdefault((shard, start), []).append(rank)
        by_shard: dict[RemoteShard, list[tuple[int, int]]] = {}
        for shard, start, stop in order:
            by_shard.setdefault(shard, []).append((start, stop))
        for shard, pieces in by_shard.items():
            shard.pieces = sorted(pieces)

    def get(self, shard: RemoteShard, start: int, stop: int) -> np.ndarray:
        """uint8 [stop - start], not to be written to; waits for it. Raises MillError."""
        key = (shard, start, stop)
        with self._lock:
            early = self._held.get(key)
            wanted = [key]
            ranks = self._ranks.get((shard, start))
            if ranks:
                self._at = next((r for r in ranks if r >= self._at - KEPT), ranks[0])
                wanted += self._order[self._at + 1 : self._at + 1 + AHEAD]
            futures = [self._begin(k) for k in wanted]
            self._forget(set(wanted))
        try:
            return futures[0].result()
        except MillError:
            if futures[0] is not early:
                raise
        with self._lock:  # what went wrong before anybody asked for it gets another try
            future = self._begin(key)
        return future.result()

    def _begin(self, key: tuple[RemoteShard, int, int]) -> Future[np.ndarray]:
        future = self._held.get(key)
        if future is None or (future.done() and future.exception() is not None):
            future = self._held[key] = Future()
            self._todo.put((key, future))
            if len(self._threads) < CONNECTIONS:
                # Daemons: a server that does not answer must not keep the program from ending.
                self._threads.append(threading.Thread(target=self._work, daemon=True))
                self._threads[-1].start()
        self._held.move_to_end(key)
        return future

    def _forget(self, wanted: set[tuple[RemoteShard, int, int]]) -> None:
        for key in [k for k, f in self._held.items() if f.done() and k not in wanted][: max(0, len(self._held) - KEPT)]:
            del self._held[key]

    def _work(self) -> None:
        while True:
            (shard, start, stop), future = self._todo.get()
            try:
                future.set_result(self.transport.fetch(shard.url, start, stop, shard.size))
            except BaseException as error:
                future.set_exception(error if isinstance(error, MillError) else PlanError(f"{_shown(shard.url)}: {error!r}"))
