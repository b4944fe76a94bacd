"""Work on rows that is done again, in smaller pieces, where a device's memory does not suffice."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ...errors import MillError


def in_pieces(
    work: Callable[[int, int], None],
    begin: int,
    end: int,
    what: str,
    device: str,
    *,
    group: int = 1,
    free: Callable[[], None] | None = None,
) -> None:
    """Does work(first, stop) for rows from begin to end: at once, and half as many after each failure of the device's memory.
    Rows do not depend on those that are done together.

    group  rows that are interleaved or weighed together, and so cannot be parted
    free   called after a failure: drops what is kept on the device

    Raises MillError, which says `what` was done, when a single group of rows is too much.
    """
    first, at_once = begin, end - begin
    while first < end:
        stop = min(first + at_once, end)
        try:
            work(first, stop)
            first = stop
            continue
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if stop - first <= group:
                reason = str(error).strip().splitlines()[0]
                least = "one row" if group == 1 else f"{stop - first} rows, which cannot be parted"
                raise MillError(
                    f"{device} has too little memory to {what}, even for {least}: end other programs that use it, or start "
                    f"over with --device none ({reason})"
                ) from None
        # Out of the except clause, so that no traceback keeps the tensors of what failed.
        at_once = max(1, (stop - first) // 2 // group) * group
        if free is not None:
            free()
        _empty_cache(device)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch says with this that a device's memory does not suffice. (That of Apple's GPUs is a RuntimeError.)"""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _empty_cache(device: str) -> None:
    import torch

    gc.collect()
    module = getattr(torch, torch.device(device).type)
    if hasattr(module, "empty_cache"):  # not of torch's cpu
        module.empty_cache()
