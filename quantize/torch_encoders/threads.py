"""Threads that have a GPU compute for whoever encodes, which have a stream each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from ...jobs.steps import hearing, listener
from ...operating_system.processors import available_cpus
from .memory import in_pieces

THREADS = 12  # at most: they copy as fast as memory does
_thread = threading.local()
_Work = Callable[[], None]
_Errors = SimpleQueue[BaseException | None]


def share_rows(
    work: Callable[[int, int, int], None],
    rows: int,
    at_once: int,
    what: str,
    device: str,
    *,
    group: int = 1,
    free: Callable[[], None] | None = None,
) -> None:
    """Has the threads do work(first, stop, capacity) for pieces of about as many rows, and waits for them. capacity: the most
    rows of a piece.

    The other arguments are those of `in_pieces`, which does a piece whose memory does not suffice.
    """
    at_once = max(1, at_once // group) * group
    pieces = max(1, -(-rows // at_once))
    step = -(-rows // pieces // group) * group
    begins = iter(range(0, rows, step))  # whoever has time takes the next
    on_step = listener()

    def take_pieces() -> None:
        with nullcontext() if on_step is None else hearing(on_step):
            take_all()

    def take_all() -> None:
        for begin in begins:
            end = min(begin + step, rows)

            def part(first: int, stop: int, begin: int = begin, end: int = end) -> None:
                work(first, stop, at_once if (first, stop) == (begin, end) else stop - first)

            in_pieces(part, begin, end, what, device, group=group, free=free)

    tasks, errors = _started(), _Errors()
    takers = min(THREADS, pieces)
    for _ in range(takers):
        tasks.put((take_pieces, errors))
    raised = [error for _ in range(takers) if (error := errors.get()) is not None]
    if raised:
        raise raised[0]


@cache
def _started() -> SimpleQueue[tuple[_Work, _Errors]]:
    """Starts the threads -> what they take work from, and where they put what it raised, or None. (Putting it there takes a
    twentieth of what an executor's future does.)"""
    tasks = SimpleQueue[tuple[_Work, _Errors]]()

    def serve() -> None:
        while True:
            work, errors = tasks.get()
            try:
                work()
            except BaseException as error:  # raised where it is waited for
                errors.put(error)
            else:
                errors.put(None)
            del work, errors

    for number in range(min(THREADS, available_cpus())):
        threading.Thread(target=serve, name=f"gpu_{number}", daemon=True).start()
    return tasks


def stream_of(device: torch.device) -> Any:
    """This thread's own stream of a device."""
    streams = _thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def on_stream(stream: Any) -> AbstractContextManager[object]:
    """Within this, the stream is the one of what torch does."""
    return torch.cuda.stream(stream)
