"""The scale search for tables of four values, exhaustive, as `codecs/iqk/boundary_search.py` (which says why this is enough).

As the scale grows from zero each weight changes its value at most twice, from an outer value to inner ones, at known scales.
The events of a block are sorted by their scale, and running sums give the score after each.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..codecs.iqk.table_search import MIN_AMAX
from .blocks import wide


def search_boundaries(x: Tensor, w: Tensor, table: np.ndarray) -> tuple[Tensor, Tensor]:
    """Scale float32 and flag uint8 of each block [blocks], for x, w [block, blocks]; table: float32 [2, 4 or more].

    Blocks of zeros get 0 and 0.
    """
    best = torch.zeros(x.shape[1], dtype=wide(x.device), device=x.device)
    scale = torch.zeros_like(best)
    flags = torch.zeros(x.shape[1], dtype=torch.uint8, device=x.device)
    last = torch.zeros_like(x, dtype=torch.bool).scatter_(0, x.argmax(0, keepdim=True), True)
    for variant in range(4):
        shifted, down = variant % 2, variant >= 2
        values = [float(v) for v in table[shifted][:4]]
        sxq, sqq = _best_cut(-x if down else x, w, values, last, values[0] if down else values[3])
        if down:
            sxq = -sxq
        better = (sqq > 0) & (sxq * sxq > best * sqq)
        scale = torch.where(better, sxq / sqq, scale)
        best = torch.where(better, scale * sxq, best)
        flags = torch.where(better, shifted, flags)
    zero = x.abs().amax(0) < float(MIN_AMAX)
    return torch.where(zero, 0.0, scale).float(), torch.where(zero, 0, flags)


def _best_cut(y: Tensor, w: Tensor, values: list[float], last: Tensor, last_value: float) -> tuple[Tensor, Tensor]:
    """Sums w y q and w q q, float64 [blocks], of the cut of best score. `last` marks the weight that keeps its value."""
    v0, v1, v2, v3 = values
    dtype = wide(y.device)
    positive, negative = y > 0, (y < 0) & ~last
    outer = torch.where(positive, v3, torch.where(y < 0, v0, v2))
    inner = torch.where(y < 0, v1, v2)
    outer, inner = torch.where(last, last_value, outer), torch.where(last, last_value, inner)
    wy, w = w.to(dtype) * y, w.to(dtype)
    # When y / scale passes the middle between two values: from the outer one to an inner, and of negatives to the third.
    keys = torch.cat([torch.maximum(y * (2 / (v2 + v3)), y * (2 / (v0 + v1))), y * (2 / (v1 + v2))])
    second = torch.where(negative, 1.0, 0.0)
    gains = torch.cat([wy * (inner - outer), wy * second * (v2 - v1)])
    costs = torch.cat([w * (inner * inner - outer * outer), w * second * (v2 * v2 - v1 * v1)])
    order = keys.argsort(0)
    sxq = torch.cat([(wy * outer).sum(0, keepdim=True), gains.gather(0, order)]).cumsum(0)
    sqq = torch.cat([(w * outer * outer).sum(0, keepdim=True), costs.gather(0, order)]).cumsum(0)
    score = torch.where(sqq > 0, sxq * sxq / torch.where(sqq > 0, sqq, 1.0), 0.0)
    at = score.argmax(0, keepdim=True)
    return sxq.gather(0, at)[0], sqq.gather(0, at)[0]
