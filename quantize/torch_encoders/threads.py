"""Threads that have a GPU compute for whoever encodes, which have a stream each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from ...jobs.steps import hearing, listener
from ...operating_system.processors import available_cpus
from .memory import in_pieces, is_out_of_memory

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

    Pieces whose memory does not suffice beside the others are done after them, one by one: the other arguments are those of
    `in_pieces`, which does that.
    """
    at_once = max(1, at_once // group) * group
    pieces = max(1, -(-rows // at_once))
    step = -(-rows // pieces // group) * group
    begins, failed, on_step = iter(range(0, rows, step)), list[int](), listener()  # whoever has time takes the next

    def take_pieces() -> None:
        for begin in begins:
            try:
                work(begin, min(begin + step, rows), at_once)
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            failed.append(begin)  # out of the except clause, so that no traceback keeps the tensors of what failed
            if free is not None:
                free()

    def take_failed() -> None:
        for begin in failed:
            end = min(begin + step, rows)
            in_pieces(lambda first, stop: work(first, stop, stop - first), begin, end, what, device, group=group, free=free)

    _done_by_threads(take_pieces, min(THREADS, pieces), on_step)
    if failed:
        _done_by_threads(take_failed, 1, on_step)


def _done_by_threads(work: _Work, takers: int, on_step: Callable[[str], None] | None) -> None:
    """Has so many threads do it, and waits for them. Raises what the first of them raised."""

    def heard() -> None:
        with hearing(on_step):
            work()

    tasks, errors = _started(), _Errors()
    for _ in range(takers):
        tasks.put((heard, errors))
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
