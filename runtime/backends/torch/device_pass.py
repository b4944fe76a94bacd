"""A pass over the tokens of several sequences: what the functions of ops are given beside their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ...graph import Observer, Op, Value
from ...graph.values import RotaryEmbedding
from .cache import DeviceCache
from .weights import Weights

_FEW = 8  # tokens
# What passes from one op to others: float32 [n, *shape]; of a `RoutingValue` experts int64 [n, used] and weights float32.
Result = Tensor | tuple[Tensor, ...]


class DevicePass:
    """One pass.

    tokens     int64 [n]; positions: int64 [n], of each in its sequence
    segments   each sequence's cache, and the rows that are its tokens
    inputs     float32 [n, n_embd], rows for `HiddenInput`, or None
    op         the one that is being computed, on `device`
    reduction  (n, share) of Settings.expert_reduction, or None
    scratch    bytes that attention may take for scores
    is_exact   whether products are made in float32
    followers  the ops after it, as far as they are on the same device and can be computed with it
    weights    those of the model
    ahead      what was computed with the op before: an op's results by the number of its value
    turns      cosines, sines, first number and whether pairs are neighbours, by the numbers of values that are rotated where
               they are read; readers: how many ops read each value
    prepared   what products have made of the values that they multiply, by the number of the value
    """

    def __init__(
        self,
        tokens: np.ndarray,
        caches: Sequence[tuple[DeviceCache, int]],
        observer: Observer,
        inputs: np.ndarray | None = None,
        reduction: tuple[int, float] | None = None,
        scratch: int = 512 << 20,
        is_exact: bool = True,
    ):
        self.tokens, self.observer, self.inputs = tokens, observer, inputs
        self.reduction, self.scratch, self.is_exact = reduction, scratch, is_exact
        self.segments: list[tuple[DeviceCache, slice]] = []
        positions, row = [np.zeros(0, np.int64)], 0
        for cache, count in caches:
            self.segments.append((cache, slice(row, row + count)))
            positions.append(np.arange(cache.length, cache.length + count))
            row += count
        self.positions = np.concatenate(positions)
        self.device, self.op = torch.device("cpu"), None
        self.prepared: dict[int, dict[Any, Any]] = {}
        self.ahead: dict[int, list[Any]] = {}
        self.turns: dict[int, tuple[Tensor, Tensor, int, bool]] = {}
        self._rotations: dict[tuple[bytes, float, int, torch.device], tuple[Tensor, Tensor]] = {}

    op: Op | None
    followers: Sequence[Op] = ()
    weights: Weights
    readers: Mapping[int, int]
    xp = torch

    def to_numpy(self, x: Tensor) -> np.ndarray:
        return to_numpy(x)

    def constants(self, numbers: ArrayLike) -> Tensor:
        """float32 numbers."""
        return self.on_device(np.array(numbers, np.float32))

    def on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def rotations(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of each token's position times the magnitude: float32 [n, pairs]."""
        key = rope.frequencies.tobytes(), rope.magnitude, rope.offset, self.device
        if key not in self._rotations:
            angles = (self.positions[:, None] + rope.offset) * rope.frequencies
            cos, sin = ((rope.magnitude * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
            self._rotations[key] = self.on_device(cos), self.on_device(sin)
        return self._rotations[key]

    @property
    def is_small(self) -> bool:
        """Whether products are those of few vectors."""
        return len(self.tokens) <= _FEW

    def kernels(self, of: Callable[[torch.device], Any]) -> Any:
        """Kernels for the op's device; None where there are none, or gradients are wanted, which they have not."""
        return None if torch.is_grad_enabled() else of(self.device)

    @property
    def wanted(self) -> str:
        """What products are to be given besides float32: 'bytes', 'bf16' or '', nothing."""
        return "" if self.is_exact else "bytes" if self.is_small else "bf16"

    def prepared_of(self, value: Value | None) -> dict[Any, Any]:
        """What products have been given, or have made, of a value: for those that come after. Of many tokens only the last
        value's is kept."""
        if value is None:
            return {}
        if not self.is_small and value.index not in self.prepared:
            self.prepared.clear()
        return self.prepared.setdefault(value.index, {})

    def prepares(self, out: Tensor, prepared: Any) -> Tensor:
        """The op's result. prepared: what was made of it for products, or None."""
        if prepared is not None and self.op is not None:
            self.prepared_of(self.op.outputs[0])[self.device if self.is_small else prepared.dtype] = prepared
        return out

    @property
    def following(self) -> Op | None:
        return self.followers[0] if self.followers else None

    def observing(self) -> tuple[Observer, Op] | None:
        """The observer and the op, if it wants that op's inputs."""
        return (self.observer, self.op) if self.op is not None and self.observer.wants_input(self.op) else None

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of each sequence. Their gradients are put together once, where each slice would have all rows."""
        return x.split([rows.stop - rows.start for _, rows in self.segments])

    def row_blocks(self, n: int, row_bytes: int) -> list[slice]:
        """Runs of rows, of which each run's take at most `scratch` bytes."""
        step = max(1, self.scratch // max(1, row_bytes))
        return [slice(first, min(first + step, n)) for first in range(0, n, step)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows one below the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def to_numpy(x: Tensor) -> np.ndarray:
    """The numbers in the machine's memory, C-contiguous; zeros where there are only shapes."""
    if x.device.type == "meta":
        return np.zeros(tuple(x.shape), np.float32)
    return np.ascontiguousarray(x.detach().cpu().numpy())
