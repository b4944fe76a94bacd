"""Work on rows that is done again, in smaller pieces, where a device's memory does not suffice."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np

from ...errors import MillError

one_at_a_time = threading.Lock()
"""Held while a device computes: threads read, decode and write meanwhile, and only one fills its memory."""


def in_pieces(
    work: Callable[[int, int], np.ndarray],
    rows: int,
    at_once: int,
    what: str,
    device: str,
    *,
    group: int = 1,
    free: Callable[[], None] | None = None,
) -> np.ndarray:
    """The results of work(first, stop) for all rows, joined; rows do not depend on those that are done together.

    at_once  how many rows to begin with; half as many after each failure of the device's memory
    group    rows that are interleaved or weighed together, and so cannot be parted
    free     called after a failure: drops what is kept on the device

    Raises MillError, which says `what` was done, when a single group of rows is too much.
    """
    at_once = max(1, at_once // group) * group
    first, results = 0, []
    while first < rows:
        stop = min(first + at_once, rows)
        try:
            results.append(work(first, stop))
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
    return joined(results)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
