"""The cache of a sequence on devices: rows of keys and values (or of latents) per layer, in a type of choice, and recurrent
states. Layers that the cpu backend runs have theirs in its own caches, which go along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from ....formats import MillError
from ....quantize.torch_encoders.decoder import decoder_of
from ...cache_layout import CachePart, LayerCache, types_text
from ..cpu.kv_cache import KVCache, encode_with_nan
from ..cpu.recurrent_state import RecurrentState, State
from ..reference.reference_pass import ReferenceCache
from .triton import row_kernels

_MIN_TOKENS = 256  # of a cache that holds any
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class States(RecurrentState):
    """Recurrent states as tensors by (layer, name). A pass makes new tensors, so that states share those that they can."""

    def _zeros(self) -> State:
        return State(0, {})

    def next_states(self) -> dict[tuple[int, str], Tensor]:
        """What the pass under way writes to."""
        if self._next is None:
            self._next = {}
        return self._next

    def commit(self, n: int) -> None:
        self._previous, self.current, self._next = self.current, State(self.current.length + n, self.next_states()), None


def rotate(x: Tensor, rotation: Sequence[int]) -> Tensor:
    """Rows with the transforms of their runs, of the sizes `rotation` (see `CachePart`), or of as many of the first ones as
    they have; x itself where there are none. Once more undoes it. float32 [..., width]."""
    parts, start = [], 0
    for size, runs in groupby(rotation):
        width = min(size * len(list(runs)), x.shape[-1] - start)
        if width <= 0:
            break
        run = x[..., start : start + width].unflatten(-1, (width // size, size))
        parts.append((run @ _hadamard(size, x.device)).flatten(-2))
        start += width
    return torch.cat(parts, dim=-1) if parts else x


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """The orthogonal Hadamard matrix of a power of two, in natural order."""
    matrix = torch.full((1, 1), size**-0.5)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix.to(device)


class DeviceCache:
    """What the layers keep of one sequence; the memory of rows grows as needed up to `limit` tokens.

    layers   what each layer keeps, of those that run on devices of torch
    devices  of each of these layers
    hosts    the caches of the layers that the cpu backend runs
    states   recurrent states; None where no layer has one
    history  what ops keep that the reference backend's functions compute
    moves    how many times rows have gone to other memory

    As with `KVCache`, `commit` adds what a pass wrote to the past; a pass that fails leaves the cache as it was.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerCache],
        devices: Mapping[int, torch.device],
        limit: int,
        hosts: Sequence[KVCache],
        checkpoints: int,
    ):
        self.layers, self.devices, self.limit, self.hosts = layers, devices, limit, list(hosts)
        self.length, self.history = 0, ReferenceCache(limit)
        self.states = States(0, checkpoints) if any(layer.states for layer in layers.values()) else None
        self._stored: dict[tuple[int, str], Tensor] = {}
        self.moves, self._reserved = 0, 0  # tokens that `reserve` has made room for

    @property
    def types(self) -> str:
        """The types of the rows, in words."""
        return types_text(self.layers.values()) or " and ".join(dict.fromkeys(host.types for host in self.hosts if host.types))

    def check_capacity(self, n: int) -> None:
        """Raises MillError if n more tokens do not fit."""
        if self.length + n > self.limit:
            raise MillError(
                f"the context is full: it holds {self.length} tokens, and {n} more do not fit into {self.limit}; "
                "choose a larger n_ctx (-c)"
            )

    def park(self) -> None:
        """Moves the rows to the machine's memory; they come back, layer by layer, when they are used."""
        self._stored = {key: stored.cpu() for key, stored in self._stored.items()}
        self._reserved = 0
        self.moves += 1

    def reserve(self, n: int) -> None:
        """Has memory for the rows of n more tokens in every layer."""
        if self.length + n <= self._reserved:
            return
        for number, layer in self.layers.items():
            for name, part in layer.rows.items():
                self._room(number, name, part.rows_of(self.length + n))
        self._reserved = self.length + n
        if all(part.every == 1 for layer in self.layers.values() for part in layer.rows.values()):
            self._reserved = min((stored.shape[1] for stored in self._stored.values()), default=self.limit)

    @property
    def room(self) -> int:
        """Rows that there is memory for, of the layer and name that has most."""
        return max((stored.shape[1] for stored in self._stored.values()), default=0)

    def stored(self, layer: int, name: str) -> Tensor:
        """The memory of a layer's rows, as far as it goes: [heads, tokens, numbers or bytes of a row]."""
        stored = self._rows(layer, name)
        assert stored is not None
        return stored

    def _rows(self, layer: int, name: str) -> Tensor | None:
        """The memory of a layer's rows on its device, [heads, tokens, numbers or bytes of a row]."""
        stored = self._stored.get((layer, name))
        if stored is not None and stored.device != self.devices[layer]:
            self._stored[layer, name] = stored = stored.to(self.devices[layer])
            self.moves += 1
        return stored

    def _room(self, layer: int, name: str, end: int) -> Tensor:
        """The memory of a layer's rows, with room for `end` of them. It begins as zeros: none of it is NaN."""
        part, stored = self.layers[layer].rows[name], self._rows(layer, name)
        if stored is None or stored.shape[1] < end:
            limit = part.rows_of(self.limit)
            size = max(end, min(2 * (0 if stored is None else stored.shape[1]), limit), min(_MIN_TOKENS, limit))
            width, dtype = (part.width, FLOATS[part.type]) if part.type in FLOATS else (part.row_bytes, torch.uint8)
            grown = torch.zeros((part.heads, size, width), dtype=dtype, device=self.devices[layer])
            if stored is not None:
                grown[:, : stored.shape[1]] = stored
            self._stored[layer, name] = stored = grown
            self.moves += 1
        return stored

    def part(self, layer: int, name: str) -> CachePart | None:
        """What a layer keeps per token under this name; None: nothing."""
        return self.layers[layer].rows.get(name)

    def rotation(self, layer: int, name: str) -> tuple[int, ...]:
        """How rows of this name are rotated in memory (see `CachePart`)."""
        return self.layers[layer].rows[name].rotation

    def write_all(self, layer: int, rows: Mapping[str, Tensor]) -> None:
        """`write` of rows by name."""
        for name, own in rows.items():
            self.write(layer, name, own)

    def write(self, layer: int, name: str, rows: Tensor) -> None:
        """Writes the rows of this pass, float32 [n, heads, width], of runs of tokens that share one the last one's; where a
        type in blocks cannot hold a row (NaN, infinity), all of it becomes NaN."""
        part = self.layers[layer].rows[name]
        first = part.rows_of(self.length)
        rows = rows[-(self.length + 1) % part.every :: part.every]
        end = first + len(rows)
        self._room(layer, name, end)[:, first:end] = self._encoded(rotate(rows, part.rotation), part).transpose(0, 1)

    def _encoded(self, rows: Tensor, part: CachePart) -> Tensor:
        """[n, heads, numbers or bytes of a row]. Types in blocks are encoded by the processor, as the cpu backend does it."""
        if part.type in FLOATS:
            return rows
        flat = rows.reshape(-1, part.width).cpu().numpy()
        return torch.from_numpy(encode_with_nan(flat, part.type)).to(rows.device).view(len(rows), part.heads, part.row_bytes)

    def read(self, layer: int, name: str, start: int, stop: int) -> Tensor:
        """Rows start ... stop - 1, of tokens or of runs of them, this pass included: float32 [heads, stop - start, width]."""
        return rotate(self.read_rotated(layer, name, start, stop), self.layers[layer].rows[name].rotation)

    def read_rotated(self, layer: int, name: str, start: int, stop: int) -> Tensor:
        """As `read`, with the rotation that the rows have in memory."""
        part, stored = self.layers[layer].rows[name], self._rows(layer, name)
        assert stored is not None
        stored = stored[:, start:stop]
        if part.type in FLOATS:
            return stored.float()
        decode = decoder_of(part.type, self.devices[layer])
        return decode(stored.reshape(-1, part.row_bytes), part.width).view(part.heads, stop - start, part.width)

    def state(self, layer: int, name: str) -> Tensor:
        """What a pass begins with: zeros at the beginning of a sequence."""
        assert self.states is not None
        found = self.states.current.memory.get((layer, name))
        return torch.zeros(self.layers[layer].states[name].shape, device=self.devices[layer]) if found is None else found

    def write_state(self, layer: int, name: str, state: Tensor) -> None:
        assert self.states is not None
        self.states.next_states()[layer, name] = state

    def extend(self, layer: int, name: str, new: Tensor, first: int) -> Tensor:
        """The rows of a state from position `first` on, and the new ones after them: the last ones become the state."""
        kept = torch.cat([self.state(layer, name), new])
        size = len(kept) - len(new)
        self.write_state(layer, name, kept[len(new) :].clone())
        return kept[size - (self.length - first) :]

    def commit(self, n: int) -> None:
        self.length += n
        self.history.length = self.length
        if self.states is not None:
            self.states.commit(n)

    def checkpoint(self) -> None:
        """Has `truncate` and `fork` go back to the present length at no cost."""
        for each in self._stateful():
            each.checkpoint()

    def resumable(self, length: int) -> int:
        """What `length` is after `truncate(length)`: less where a layer's recurrent state is only there for fewer tokens."""
        length, before = min(length, self.length), -1
        while length != before:
            before = length
            for each in self._stateful():
                length = min(length, each.resumable(length))
        return length

    def truncate(self, length: int) -> None:
        """Drops all tokens from position `resumable(length)` on."""
        self.length = self.resumable(length)
        self.history.truncate(self.length)
        for each in self._stateful():
            each.truncate(self.length)

    def fork(self, length: int | None = None) -> DeviceCache:
        """A copy of the first `resumable(length)` tokens (all if None): for sequences that begin with the same tokens."""
        n = self.length if length is None else self.resumable(length)
        copy = DeviceCache(self.layers, self.devices, self.limit, [host.fork(n) for host in self.hosts], 1)
        copy.length, copy.history = n, self.history.fork(n)
        copy.states = None if self.states is None else self.states.fork(n)
        copy._stored = {
            (layer, name): stored[:, : self.layers[layer].rows[name].rows_of(n)].clone()
            for (layer, name), stored in self._stored.items()
        }
        return copy

    def _stateful(self) -> list[KVCache | States]:
        """What has a length of its own."""
        return [*self.hosts, *([] if self.states is None else [self.states])]


class FixedRows:
    """The rows of a sequence, as ops of a fixed pass use its cache.

    length  of the sequence before the pass, a number on the device
    """

    def __init__(self, cache: DeviceCache, positions: Tensor):
        """positions: of the tokens of the pass in their sequence."""
        self._cache, self._positions, self.length = cache, positions, positions[0]

    def rotation(self, layer: int, name: str) -> tuple[int, ...]:
        return self._cache.rotation(layer, name)

    def stored(self, layer: int, name: str) -> Tensor:
        return self._cache.stored(layer, name)

    def write_all(self, layer: int, rows: Mapping[str, Tensor]) -> None:
        stored = [self.stored(layer, name) for name in rows]
        turned = [rotate(own, self.rotation(layer, name)) for name, own in rows.items()]
        kernels = row_kernels(self._positions.device)
        if kernels and turned:
            kernels.write(stored, turned, self._positions)
            return
        for memory, own in zip(stored, turned, strict=True):
            memory.index_copy_(1, self._positions, own.transpose(0, 1).to(memory.dtype))

    def read_rotated(self, layer: int, name: str, start: int, stop: object) -> Tensor:
        return self.stored(layer, name).float()
