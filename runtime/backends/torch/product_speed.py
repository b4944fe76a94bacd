"""How fast products of float32 are, measured once."""

from __future__ import annotations

import time
from functools import cache

import torch

_SIZE = 1024  # rows and columns of matrices whose product is measured


def products_per_second(device: torch.device, threads: int) -> float:
    """Multiplications of products of float32 per second, by so many threads, or by the device."""
    return _measured(device) * (threads if device.type == "cpu" else 1)


@cache
def _measured(device: torch.device) -> float:
    """Those of the device; on the processor of one thread, in its own time, so that other programs do not change it."""
    on_cpu, before = device.type == "cpu", torch.get_num_threads()
    x, seconds, clock = torch.ones((_SIZE, _SIZE), device=device), [], time.thread_time if on_cpu else time.perf_counter
    if on_cpu:
        torch.set_num_threads(1)
    try:
        for _ in range(3):
            begun = clock()
            (x @ x).sum().item()
            seconds.append(clock() - begun)
    finally:
        if on_cpu:
            torch.set_num_threads(before)
    return _SIZE**3 / max(min(seconds), 1e-9)
