"""Rows encoded on a GPU of NVIDIA by the processor's own kernels, from their stored bytes to those of the target.

What rows need beside their encoder (scaling by powers of two, another importance, a second look) is the processor's work. Here
it is only found out which rows may need any of that (`row_checks`).

Several threads, which all callers share, take pieces of rows. Each has a stream and memory of its own, here and on the device,
and keeps it, so that pages are not touched for the first time in every call: it copies its rows into memory that the device
reads by itself, has it compute, and copies what comes back to where it belongs. While one copies, the device works for others.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ...simd.cuda.launch import CallList
from ...simd.cuda.work_items import launching
from ..plain_rows import PlainRows
from .elements import RUN, from_bf16
from .gpu_arrays import Recording, address_of
from .row_checks import check_rows
from .threads import on_stream, share_rows, stream_of

PIECE = 1 << 20  # weights that a thread has encoded at once
_KEPT = 4  # kinds of pieces that a thread keeps memory for
_thread = threading.local()


def encode_on_gpu(x: np.ndarray, importance: np.ndarray | None, plain: PlainRows, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows, float32 [rows, n] or uint16 [rows, n] (the bits of bf16) -> uint8 [rows, row_bytes] of the plain type, and numbers
    of the rows whose bytes may be others than the processor's, or that it has to look at.

    Raises MillError where the device's memory does not suffice for a row.
    """
    rows, n = x.shape
    items = plain.codec.items
    assert items is not None
    q, doubtful = np.empty((rows, plain.type.row_bytes(n)), np.uint8), np.empty(rows, np.uint8)
    if importance is not None:
        importance = np.stack([items.importance(importance).reshape(-1), importance])
    kind = _Kind(plain, importance is not None, n, x.dtype, torch.device(device))
    arrays = [(address_of(array), array.strides[0], array) for array in (x, q, doubtful)]

    def encode(first: int, stop: int, capacity: int) -> None:
        weights = 0 if importance is None else address_of(importance)
        _workspace(kind, capacity).encode(stop - first, weights, *(start + first * step for start, step, _ in arrays))

    share_rows(encode, rows, PIECE // n, f"encode {plain.type.name}", device, free=_forget)
    return q, np.flatnonzero(doubtful)


class _Kind(NamedTuple):
    """Pieces whose calls are the same but for the number of rows."""

    plain: PlainRows
    weighted: bool
    n: int
    dtype: np.dtype[Any]
    device: torch.device


def _forget() -> None:
    _thread.__dict__.clear()


def _workspace(kind: _Kind, rows: int) -> Workspace:
    """This thread's, for at least so many rows."""
    kept: dict[_Kind, Workspace] = _thread.__dict__.setdefault("workspaces", {})
    if kind not in kept or kept[kind].rows < rows:
        if len(kept) >= _KEPT:
            kept.clear()
        kept.pop(kind, None)
        kept[kind] = Workspace(_recorded(kind, rows))
    return kept[kind]


class _Recorded:
    """The kernels that encode up to so many rows and look at them, and where on the device their arrays lie.

    importance [2, n], x, q, doubtful: where; their bytes, of the latter three for a row
    """

    def __init__(self, kind: _Kind, rows: int):
        plain, weighted, n, dtype, device = kind
        items = plain.codec.items
        assert items is not None
        self.device, self.rows, self.recording = device, rows, Recording(device)
        x, importance = np.empty((rows, n), np.float32), np.ones((2, n), np.float32)
        words = np.empty((rows, n), np.uint16) if dtype == np.uint16 else x
        self.importance, self.x = self.recording.place(importance), self.recording.place(words)
        of_encoder, of_checks = importance if weighted else (None, None)
        with launching(self.recording):
            if words is not x:
                from_bf16(words.reshape(-1, RUN), x.reshape(-1, RUN))
            q = items.encode(x, of_encoder)
            doubtful = check_rows(x, q, of_checks, plain)
        self.q, self.doubtful = self.recording.place(q), self.recording.place(doubtful)
        self.importance_bytes, self.x_bytes, self.q_bytes = importance.nbytes if weighted else 0, words[0].nbytes, q[0].nbytes


_recording = threading.Lock()
_records: dict[tuple[_Kind, int], _Recorded] = {}


def _recorded(kind: _Kind, rows: int) -> _Recorded:
    with _recording:
        if (kind, rows) not in _records:
            _records[kind, rows] = _Recorded(kind, max(2, rows))  # importance of one row would be that row's
        return _records[kind, rows]


class Workspace:
    """A thread's memory for pieces of a kind: on the device, and here, of numbers that it fetches and sends back."""

    def __init__(self, recorded: _Recorded):
        self._at, self.rows = recorded, recorded.rows
        device, pinned = recorded.device, partial(torch.empty, dtype=torch.uint8, pin_memory=recorded.device.type == "cuda")
        self._stream = stream_of(device)
        with on_stream(self._stream):
            self._memory = torch.empty(recorded.recording.size, dtype=torch.uint8, device=device)
        self._importance, self._doubtful = pinned(recorded.importance_bytes), pinned(self.rows)
        self._x, self._q = pinned(self.rows * recorded.x_bytes), pinned(self.rows * recorded.q_bytes)
        self._of_rows: dict[int, tuple[CallList, list[tuple[int, int]]]] = {}

    def encode(self, rows: int, importance: int, x: int, q: int, doubtful: int) -> None:
        """Rows x to q and doubtful, by their addresses. importance: float32 [2, n], as the encoder takes it and as it was
        given; 0 for none."""
        if rows not in self._of_rows:
            self._of_rows[rows] = self._calls(rows)
        calls, places = self._of_rows[rows]
        for place, address in zip(places, (x, q, doubtful, importance), strict=False):
            calls.table[place] = address
        calls.run()

    def _calls(self, rows: int) -> tuple[CallList, list[tuple[int, int]]]:
        """What is done with so many rows, and where in its table the addresses of x, q, doubtful and importance belong."""
        at, device = self._at, self._memory.data_ptr()
        calls, given = CallList(at.device.index or 0, self._stream.cuda_stream), list[tuple[int, int]]()
        sent = [(self._x, at.x, rows * at.x_bytes), (self._importance, at.importance, at.importance_bytes)]
        for here, there, size in sent[: 2 if at.importance_bytes else 1]:
            given.append((calls.copy(here.data_ptr(), 0, size), 2))
            calls.send(device + there, here.data_ptr(), size)
        at.recording.add_to(calls, self._memory, rows / at.rows)
        results = (self._q, at.q, rows * at.q_bytes), (self._doubtful, at.doubtful, rows)
        for here, there, size in results:
            calls.fetch(here.data_ptr(), device + there, size)
        calls.wait()
        given[1:1] = [(calls.copy(0, here.data_ptr(), size), 1) for here, _, size in results]
        return calls.made(), given
