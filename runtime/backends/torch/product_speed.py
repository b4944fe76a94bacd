"""How fast products of float32 are, measured now."""

from __future__ import annotations

import time

import torch

_SIZE = 1024  # rows and columns of matrices whose product is measured


def products_per_second(device: torch.device, threads: int) -> float:
    """Multiplications of products of float32 per second, by so many threads, or by the device."""
    x, seconds = torch.ones((_SIZE, _SIZE), device=device), []
    for _ in range(3):
        begun = time.perf_counter()
        (x @ x).sum().item()
        seconds.append(time.perf_counter() - begun)
    share = threads / torch.get_num_threads() if device.type == "cpu" else 1
    return share * _SIZE**3 / min(seconds)
