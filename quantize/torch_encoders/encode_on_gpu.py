"""Rows encoded on a GPU of NVIDIA by the processor's own kernels, from their stored bytes to those of the target.

What rows need beside their encoder (scaling by powers of two, another importance, a second look) is the processor's work. Here
it is only found out, by bounds that take too many rows rather than too few, which rows may need any of that.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...simd.cuda.work_items import launching
from ..codecs.importance import MIN_MEAN_SQUARE
from ..plain_rows import GPU_ELEMENTS, PlainRows
from ..scale_range import plain_range
from .decoder import decoder_of
from .gpu_arrays import GpuArrays, sent
from .memory import in_pieces, joined

_NEARER = -1e-3  # of |x|^2: what |y - x|^2 - |x|^2 surely is below where sums in float32 say that it is
_MARGIN = 4  # times a limit: where sums in another order may be
_thread = threading.local()


def encode_on_gpu(x: np.ndarray, importance: np.ndarray | None, plain: PlainRows, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows, float32 [rows, n] or uint16 [rows, n] (the bits of bf16) -> uint8 [rows, row_bytes] of the plain type, and numbers
    of the rows whose bytes may be others than the processor's, or that it has to look at.

    Raises MillError where the device's memory does not suffice for a row.
    """
    doubtful: list[np.ndarray] = []
    step = max(1, GPU_ELEMENTS // x.shape[1])

    def encode(first: int, stop: int) -> np.ndarray:
        results, begun = list[np.ndarray](), list[_Begun]()
        with _on_stream(device):
            for begin in range(first, stop, step):  # the next rows are sent while these are encoded
                begun.append(_begin(x[begin : min(begin + step, stop)], begin, importance, plain, torch.device(device)))
                if len(begun) > 1:
                    results.append(_finished(begun.pop(0), doubtful))
            results.append(_finished(begun.pop(), doubtful))
        return joined(results)

    q = in_pieces(encode, len(x), len(x), f"encode {plain.type.name}", device)
    return q, np.unique(np.concatenate(doubtful))


def _on_stream(device: str) -> AbstractContextManager[object]:
    """This thread's own stream of a device."""
    streams = _thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(streams[device])


class _Begun(NamedTuple):
    """What a stream computes: rows from `first` on, and which of them are doubtful; both are there when `done` is."""

    first: int
    q: Tensor
    flags: Tensor
    done: Any


def _begin(x: np.ndarray, first: int, importance: np.ndarray | None, plain: PlainRows, device: torch.device) -> _Begun:
    items = plain.codec.items
    assert items is not None
    weights = sent(x, device)
    if weights.dtype == torch.uint16:
        weights = weights.view(torch.bfloat16).float()
    arrays = GpuArrays(device)
    with launching(arrays):
        packed = items.encode(arrays.standing_for(weights), importance)
    q = arrays.tensor(packed).view(packed.shape)
    result, flags = _to_host(q), _to_host(_doubtful(weights, q, importance, plain))
    return _Begun(first, result, flags, torch.cuda.current_stream(device).record_event())


def _finished(begun: _Begun, doubtful: list[np.ndarray]) -> np.ndarray:
    begun.done.synchronize()
    doubtful.append(begun.first + np.flatnonzero(begun.flags.numpy()))
    return begun.q.numpy()


def _to_host(tensor: Tensor) -> Tensor:
    """Complete when the stream is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _doubtful(x: Tensor, q: Tensor, importance: np.ndarray | None, plain: PlainRows) -> Tensor:
    """bool [rows]: which rows the processor has to look at."""
    items, name, n = plain.codec.items, plain.type.name, x.shape[1]
    assert items is not None
    runs = x.abs().view(len(x), -1, min(n, items.scaled[0] if items.scaled else n)).amax(2)  # NaN where there is one
    amax = runs.amax(1)
    least, largest = plain_range(name) or (0.0, torch.finfo(torch.float32).max)
    found = ~((amax >= least) & (amax <= largest))
    if items.scaled is not None:
        low, high = (2.0**exponent for exponent in items.scaled[1])
        found |= ~((runs >= low) & (runs < high)).all(1)
    squares = x * x
    if importance is not None and (block := plain.guarded):
        limit = _MARGIN * block * float(MIN_MEAN_SQUARE)
        qw = sent(importance, x.device)
        for terms in (squares, qw * x.abs(), (qw * qw)[None]):
            found |= (terms.view(len(terms), -1, block).sum(2) <= limit).any(1)
    y = decoder_of(name, x.device)(q, n)
    return found | ~((y * (y - 2 * x)).sum(1) < _NEARER * squares.sum(1))
