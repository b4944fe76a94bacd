"""What a sequence keeps of its past tokens: rows of keys and values (or of latents) per layer, in a type of its own choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ....formats import TYPES, MillError, PlanError
from ....quantize import decode, encode
from ....quantize.codecs.registry import NonFiniteError
from .kernels.attention.cache_rows import KINDS

CACHE_TYPES = tuple(KINDS)
_SMALLEST = 64  # tokens
_LINE = 64  # bytes
_LANES = 16  # rows of the float types are filled up to a multiple of so many numbers, which kernels read at once


@dataclass(frozen=True)
class Part:
    """What a layer keeps per token under one name: a row of `width` numbers for each of `heads`, as `type`."""

    heads: int
    width: int
    type: str = "f32"

    @property
    def padded_width(self) -> int:
        """Numbers of a row in memory."""
        return -(-self.width // _LANES) * _LANES if TYPES[self.type].is_float else self.width

    @property
    def row_bytes(self) -> int:
        return TYPES[self.type].row_bytes(self.padded_width)

    @property
    def token_bytes(self) -> int:
        """Bytes per token and layer."""
        return self.heads * self.row_bytes


def part_of(what: str, option: str, heads: int, width: int, type_name: str) -> Part:
    """A part in a type that a user chose. Raises PlanError, naming the option, where that type cannot hold it."""
    found = next((name for name in CACHE_TYPES if name.lower() == type_name.lower()), None)
    if found is None:
        raise PlanError(f"{option} {type_name}: no type for a cache; there are {', '.join(CACHE_TYPES)}")
    if not TYPES[found].fits(width):
        raise PlanError(
            f"{option} {found}: {what} of this model have {width} numbers, no multiple of the {TYPES[found].block} of a block; "
            "f32, f16 and bf16 work"
        )
    return Part(heads, width, found)


@dataclass(frozen=True)
class Rows:
    """Where the rows of one layer and name lie: head h's row of token t at address + h * head_bytes + t * row_bytes."""

    address: int
    kind: int
    row_bytes: int
    head_bytes: int
    owner: np.ndarray  # keeps the memory

    @classmethod
    def of(cls, array: np.ndarray, kind: int = KINDS["f32"]) -> Rows:
        """array [heads, tokens, numbers or bytes of a row], a row's lying together."""
        return cls(array.ctypes.data, kind, array.strides[1], array.strides[0], array)


class KVCache:
    """Past rows of one sequence, grown as needed up to `limit` tokens.

    parts: name -> what each layer keeps per token. Within a pass every layer puts its rows; `commit` then makes them past.
    A pass that fails leaves the cache as it was.
    """

    def __init__(self, n_layers: int, parts: Mapping[str, Part], limit: int):
        self.n_layers, self.parts, self.limit, self.length = n_layers, dict(parts), limit, 0
        # uint8 [heads, tokens, row bytes], and what `rows` says of them
        self._rows = [{name: _new(part, 0) for name, part in parts.items()} for _ in range(n_layers)]
        self._places: list[dict[str, Rows]] = [{} for _ in range(n_layers)]
        self._table, self._table_end = np.zeros((0, 0, 3), np.int64), 0

    @property
    def types(self) -> str:
        """As what each layer's rows are kept, in words."""
        return " and ".join(part.type for part in self.parts.values())

    def room_for(self, n: int) -> None:
        """Raises MillError if n more tokens do not fit."""
        if self.length + n > self.limit:
            raise MillError(
                f"the context is full: {self.length} tokens are in it, {n} more do not fit into {self.limit} "
                "(a larger n_ctx, -c, has room)"
            )

    def rows(self, layer: int, name: str, new: int = 0) -> Rows:
        """The rows of the past, with memory for those of `new` tokens behind them."""
        store, end = self._rows[layer][name], self.length + new
        if store.shape[1] < end:
            size = min(max(end, 2 * store.shape[1], _SMALLEST), max(self.limit, end))
            grown = _new(self.parts[name], size)
            grown[:, : self.length] = store[:, : self.length]
            self._rows[layer][name] = store = grown
            self._places[layer].pop(name, None)
            self._table_end = 0
        place = self._places[layer].get(name)
        if place is None:
            place = self._places[layer][name] = Rows.of(store, KINDS[self.parts[name].type])
        return place

    def table(self, new: int) -> np.ndarray:
        """What `rows` says of all layers and names, int64 [layers, names, 3]: address, bytes of a row and of a head's rows. The
        same array for as long as it says the same."""
        if self.length + new > self._table_end:
            rows = [self.rows(layer, name, new) for layer in range(self.n_layers) for name in self.parts]
            places = np.array([(place.address, place.row_bytes, place.head_bytes) for place in rows], np.int64)
            self._table, self._table_end = places.reshape(self.n_layers, -1, 3), min(place.owner.shape[1] for place in rows)
        return self._table

    def put(self, layer: int, name: str, rows: np.ndarray) -> None:
        """Writes the rows of this pass, float32 [n, heads, width].

        Where a type in blocks cannot hold a row (NaN, infinity), all of it becomes NaN.
        """
        n, part = len(rows), self.parts[name]
        place = self.rows(layer, name, n)
        values = np.zeros((n * part.heads, part.padded_width), np.float32)
        values[:, : part.width] = rows.reshape(n * part.heads, part.width)
        place.owner[:, self.length : self.length + n] = encoded(values, part.type).reshape(n, part.heads, -1).transpose(1, 0, 2)

    def read(self, layer: int, name: str, new: int = 0) -> np.ndarray:
        """Rows of the past and of `new` tokens of this pass, float32 [heads, tokens, width]; a view where they are float32."""
        part, end = self.parts[name], self.length + new
        stored = self._rows[layer][name][:, :end]
        if part.type == "f32":
            return stored.view(np.float32)[..., : part.width]
        return decode(stored.reshape(-1, part.row_bytes), part.type, part.padded_width).reshape(part.heads, end, -1)[
            ..., : part.width
        ]

    def commit(self, n: int) -> None:
        self.length += n

    def truncate(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""
        self.length = min(self.length, length)

    def fork(self, length: int | None = None) -> KVCache:
        """A cache of its own that holds the first `length` tokens (all if None): what sequences with one beginning share."""
        copy = KVCache(self.n_layers, self.parts, self.limit)
        keep = self.length if length is None else min(length, self.length)
        for mine, theirs in zip(self._rows, copy._rows, strict=True):
            for name, store in mine.items():
                theirs[name] = _new(self.parts[name], keep)
                theirs[name][:] = store[:, :keep]
        copy.length = keep
        return copy

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in all layers."""
        return self.n_layers * sum(part.token_bytes for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes taken at present; token_bytes * limit at most."""
        return sum(rows.nbytes for layer in self._rows for rows in layer.values())


def _new(part: Part, tokens: int) -> np.ndarray:
    """uint8 [heads, tokens, row bytes] with any contents, from the start of a cache line on."""
    size = part.token_bytes * tokens
    whole = np.empty(size + _LINE, np.uint8)
    start = -whole.ctypes.data % _LINE
    return whole[start : start + size].reshape(part.heads, tokens, part.row_bytes)


def encoded(rows: np.ndarray, type_name: str) -> np.ndarray:
    """encode, but rows with NaN or infinity are kept for others to find: all bits set are NaN in every type's scale."""
    try:
        return encode(rows, type_name)
    except NonFiniteError:
        good: np.ndarray = np.all(np.isfinite(rows), axis=1)
        out = encode(np.where(good[:, None], rows, np.float32(0)), type_name)
        out[~good] = 0xFF
        return out
