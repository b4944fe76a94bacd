"""Safetensors files on a server: tensors are fetched when they are needed, so no shard is on disk and few bytes are in memory.

The tensors that will be read are known in order, so a few connections prefetch for the reader, in chunks of at most
CHUNK_BYTES.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from ...formats import FormatError, MillError, PlanError
from ...formats.safetensors import StoredTensor, StoredTensors, header_length, parse_header
from .http_ranges import Transport, without_query

CHUNK_BYTES = 8 << 20
MAX_IN_FLIGHT = 6  # chunks requested ahead of the reader
MAX_CACHED = 16  # chunks in memory
CONNECTIONS = 4
HEADER_GUESS_BYTES = 1 << 16  # fetched first from a file whose header length is unknown: most headers fit


class RemoteShard:
    """A safetensors file of `size` bytes on a server; implements `formats.safetensors.Shard`.

    chunks: (start, stop) of the chunks that are planned, sorted; set by `Prefetcher.plan`.
    """

    def __init__(self, url: str, size: int, prefetcher: Prefetcher):
        self.url, self.size, self._prefetcher = url, size, prefetcher
        self.chunks: list[tuple[int, int]] = []

    def read_header(self, path: Path) -> StoredTensors:
        """The tensors of the file, name -> tensor; `path` names it in messages. Raises MillError."""
        transport = self._prefetcher.transport
        data = transport.fetch(self.url, 0, min(HEADER_GUESS_BYTES, self.size), self.size).tobytes()
        stop = 8 + header_length(path, data, self.size)
        if stop > len(data):
            data += transport.fetch(self.url, len(data), stop, self.size).tobytes()
        return parse_header(path, data[8:stop], self.size, self)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        if offset + nbytes > self.size:
            raise FormatError(f"{without_query(self.url)}: ends at byte {self.size}, before {offset + nbytes}")
        out = np.empty(nbytes, np.uint8)
        position, stop = offset, offset + nbytes
        while position < stop:
            chunk_start, chunk_stop = self._chunk(position, stop)
            data = self._prefetcher.get(self, chunk_start, chunk_stop)[position - chunk_start : stop - chunk_start]
            out[position - offset : position - offset + len(data)] = data
            position += len(data)
        return out

    view = read

    def _chunk(self, position: int, stop: int) -> tuple[int, int]:
        """The planned chunk that contains a position; where none is planned, one that ends at `stop` at most."""
        rank = bisect_right(self.chunks, (position, self.size + 1)) - 1
        if rank >= 0 and position < self.chunks[rank][1]:
            return self.chunks[rank]
        next_start = self.chunks[rank + 1][0] if rank + 1 < len(self.chunks) else stop
        return position, min(stop, next_start, position + CHUNK_BYTES)


ChunkKey = tuple[RemoteShard, int, int]  # shard, start, stop


class Prefetcher:
    """The chunks in memory and in flight, for all shards of a model."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self._order: list[ChunkKey] = []  # as they will be read
        self._ranks: dict[tuple[RemoteShard, int], list[int]] = {}  # (shard, start) -> indexes in _order
        self._cache: OrderedDict[ChunkKey, Future[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self._position = 0  # of the reader in _order
        self._requests: queue.SimpleQueue[tuple[ChunkKey, Future[np.ndarray]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def plan(self, tensors: Iterable[StoredTensor]) -> None:
        """These tensors will be read, in this order. Adjacent small ones are fetched as one chunk, large ones as several."""
        order: list[ChunkKey] = []
        planned: set[tuple[RemoteShard, int]] = set()  # (shard, offset) of tensors
        for tensor in tensors:
            shard = tensor.shard
            if not isinstance(shard, RemoteShard) or not tensor.nbytes or (shard, tensor.offset) in planned:
                continue
            planned.add((shard, tensor.offset))
            start, stop = tensor.offset, tensor.offset + tensor.nbytes
            if order and order[-1][0] is shard and order[-1][2] == start and stop - order[-1][1] <= CHUNK_BYTES:
                order[-1] = (shard, order[-1][1], stop)
                continue
            order += [(shard, first, min(first + CHUNK_BYTES, stop)) for first in range(start, stop, CHUNK_BYTES)]
        with self._lock:
            self._order, self._ranks, self._position = order, {}, 0
            for rank, (shard, start, _) in enumerate(order):
                self._ranks.setdefault((shard, start), []).append(rank)
        by_shard: dict[RemoteShard, list[tuple[int, int]]] = {}
        for shard, start, stop in order:
            by_shard.setdefault(shard, []).append((start, stop))
        for shard, chunks in by_shard.items():
            shard.chunks = sorted(chunks)

    def get(self, shard: RemoteShard, start: int, stop: int) -> np.ndarray:
        """The bytes of a chunk, uint8 [stop - start], read-only; also requests the next chunks. Raises MillError."""
        key = (shard, start, stop)
        with self._lock:
            prefetched = self._cache.get(key)
            needed = [key]
            ranks = self._ranks.get((shard, start))
            if ranks:
                self._position = next((r for r in ranks if r >= self._position - MAX_CACHED), ranks[0])
                needed += self._order[self._position + 1 : self._position + 1 + MAX_IN_FLIGHT]
            futures = [self._request(k) for k in needed]
            self._evict(set(needed))
        try:
            return futures[0].result()
        except MillError:
            if futures[0] is not prefetched:
                raise
        with self._lock:  # a prefetch that failed before the chunk was needed is tried again
            future = self._request(key)
        return future.result()

    def _request(self, key: ChunkKey) -> Future[np.ndarray]:
        future = self._cache.get(key)
        if future is None or (future.done() and future.exception() is not None):
            future = self._cache[key] = Future()
            self._requests.put((key, future))
            if len(self._threads) < CONNECTIONS:
                # Daemons: a server that does not answer must not keep the program from ending.
                self._threads.append(threading.Thread(target=self._fetch_requests, daemon=True))
                self._threads[-1].start()
        self._cache.move_to_end(key)
        return future

    def _evict(self, needed: set[ChunkKey]) -> None:
        """Removes the least recently used chunks beyond MAX_CACHED."""
        evictable = [k for k, f in self._cache.items() if f.done() and k not in needed]
        for key in evictable[: max(0, len(self._cache) - MAX_CACHED)]:
            del self._cache[key]

    def _fetch_requests(self) -> None:
        while True:
            (shard, start, stop), future = self._requests.get()
            try:
                future.set_result(self.transport.fetch(shard.url, start, stop, shard.size))
            except BaseException as error:
                is_ours = isinstance(error, MillError)
                future.set_exception(error if is_ours else PlanError(f"{without_query(shard.url)}: {error!r}"))
