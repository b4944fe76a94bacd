"""Passes over a few tokens whose shapes and addresses stay the same while sequences grow, so that on CUDA all their launches
are recorded once, as a graph, and replayed for each token.

What changes from pass to pass lies in memory of its own: the values that ops on the host make, and the positions of the tokens;
on CUDA first in the machine's memory, from where the recording copies them, and where it leaves the results.
Attention sees all rows that a cache has memory for, and masks what is not there yet; when a cache gets other memory, a pass
is recorded anew.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from ...graph import Observer
from ...graph.values import RotaryEmbedding
from .cache import DeviceCache, FixedRows
from .device_pass import DevicePass, to_numpy

_KEPT = 16  # passes, at most, of an executable

Compute = Callable[["FixedPass", dict[int, Tensor]], Sequence[Tensor]]


class FixedPass(DevicePass):
    """A pass that can be recorded: for as many tokens of the same sequences wherever these stand.

    inputs  values that are given, by number; they and positions are filled before each replay
    """

    def __init__(
        self,
        caches: Sequence[tuple[DeviceCache, int]],
        inputs: Mapping[int, Tensor],
        device: torch.device,
        n: int,
        reduction: tuple[int, float] | None,
        is_exact: bool,
    ):
        """n: of the tokens."""
        super().__init__(np.zeros(n, np.int64), [], Observer(), None, reduction, is_exact=is_exact)
        self.device, self._recording, self._broken = device, None, False
        self.inputs = {number: torch.empty_like(value, device=device) for number, value in inputs.items()}
        self._positions = torch.zeros(n, dtype=torch.int64, device=device)
        self._given = [_pinned(each) for each in (*self.inputs.values(), self._positions)]
        self._givens = [each.numpy() for each in self._given]
        self._caches, self._room, row = [weakref.ref(each) for each, _ in caches], 0, 0
        for each, count in caches:
            rows = slice(row, row + count)
            self.segments.append((FixedRows(each, self._positions[rows]), rows))  # type: ignore[arg-type]
            self._room, row = max(self._room, each.room), rows.stop
        self._moves, self._runs, self._results = [each.moves for each, _ in caches], 0, []

    _results: list[Tensor]
    _recording: torch.cuda.CUDAGraph | None

    def serves(self, caches: Sequence[tuple[DeviceCache, int]]) -> bool:
        """Whether it is for these caches with the memory that they have."""
        found = [ref() for ref in self._caches]
        return all(a is b and b.moves == moves for a, (b, _), moves in zip(found, caches, self._moves, strict=True))

    def rotations(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        key = rope.frequencies.tobytes(), rope.magnitude, rope.offset, self.device
        if key not in self._rotations:
            cos, sin = _rotation_table(_Rotation(rope), self._room, self.device)
            self._rotations[key] = cos[self._positions], sin[self._positions]
        return self._rotations[key]

    def on_device(self, array: np.ndarray) -> Tensor:
        return _constant(array.tobytes(), array.dtype.str, array.shape, self.device)

    def run(self, inputs: Mapping[int, Tensor], positions: np.ndarray, compute: Compute) -> list[np.ndarray]:
        """What `compute` makes of the values, for tokens at these positions. The first pass is made op by op, which builds
        what it needs; the second is recorded."""
        for given, value in zip(self._givens, (*inputs.values(), positions), strict=True):
            given[:] = value
        self._runs += 1
        if self._recording is None and self._runs > 1 and self.device.type == "cuda" and not self._broken:
            self._record(compute)
        if self._recording is None:
            return [to_numpy(result) for result in self._compute(compute)]
        self._recording.replay()
        torch.cuda.current_stream(self.device).synchronize()
        return [result.numpy().copy() for result in self._results]

    def _compute(self, compute: Compute) -> Sequence[Tensor]:
        """Op by op."""
        for given, own in zip(self._given, (*self.inputs.values(), self._positions), strict=True):
            own.copy_(given, non_blocking=True)
        self._rotations.clear()
        self.ahead.clear()
        self.turns.clear()
        self.prepared.clear()
        return compute(self, dict(self.inputs))

    def _record(self, compute: Compute) -> None:
        try:
            recording = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recording, pool=_keeper(self.device).pool(), capture_error_mode="thread_local"):
                made = self._compute(compute)
                self._results = [_pinned(result) for result in made]
                for result, own in zip(self._results, made, strict=True):
                    result.copy_(own, non_blocking=True)
        except Exception as error:  # of an operation that waits for the device, or a driver's
            self._broken = True
            note_unrecorded(str(self.device), str(error).strip().splitlines()[0] if str(error) else type(error).__name__)
            return
        self._recording = recording


def _pinned(like: Tensor) -> Tensor:
    """Memory of the machine's that a device copies from and to by itself."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class FixedPasses:
    """Those of an executable that are kept, the last used ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, FixedPass] = OrderedDict()

    def of(
        self,
        caches: Sequence[tuple[DeviceCache, int]],
        inputs: Mapping[int, Tensor],
        device: torch.device,
        n: int,
        reduction: tuple[int, float] | None,
        is_exact: bool,
    ) -> FixedPass:
        """One that serves these caches; arguments as of `FixedPass`."""
        key = (n, *inputs, *((id(each), count) for each, count in caches))
        found = self._kept.pop(key, None)
        if found is None or not found.serves(caches):
            found = FixedPass(caches, inputs, device, n, reduction, is_exact)
        self._kept[key] = found
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found

    def clear(self) -> None:
        self._kept.clear()


@cache
def note_unrecorded(device: str, reason: str) -> None:
    """Warns, once, that passes are made op by op."""
    warnings.warn(f"passes over few tokens are not recorded on {device}, which makes generation slower: {reason}", stacklevel=4)


@cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """A recording whose memory all recorded passes share, of which each one's result is read before the next one is run; it
    lasts, since memory that no recording has any more cannot be used again."""
    keeper = torch.cuda.CUDAGraph()
    with torch.cuda.graph(keeper, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)
    return keeper


class _Rotation:
    """The angles of a rope, for `cache`."""

    def __init__(self, rope: RotaryEmbedding):
        self.rope, self._key = rope, (rope.frequencies.tobytes(), rope.magnitude, rope.offset)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rotation) and self._key == other._key


@lru_cache(_KEPT)
def _rotation_table(rotation: _Rotation, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As `DevicePass.rotations`, of the first `count` positions."""
    rope = rotation.rope
    angles = (np.arange(count)[:, None] + rope.offset) * rope.frequencies
    cos, sin = ((rope.magnitude * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


@cache
def _constant(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)
