"""The cache of a sequence: rows of keys and values (or of latents) of past tokens, per layer, in a type of choice; and the
recurrent state of layers that have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....data_classes import dataclass
from ....formats import MillError
from ....quantize import NonFiniteError, decode, encode_unchecked
from ....simd.memory import aligned_empty
from ...cache_layout import CachePart, LayerCache, state_offsets, types_text
from ...settings import CACHE_TYPES
from ..reference.reference_pass import ReferenceCache
from .kernels.attention.cache_rows import TYPE_IDS
from .kernels.hadamard import transform_rows
from .recurrent_state import RecurrentState

_MIN_TOKENS = 64  # of a cache that holds any
assert set(CACHE_TYPES) == set(TYPE_IDS)


@dataclass(frozen=True)
class CacheRows:
    """The memory of the rows of one layer and name: head h's row of token t is at address + h * head_bytes + t * row_bytes.
    Where several tokens share a row (`CachePart.every`), t counts these.

    type_id  the type of the rows, of TYPE_IDS
    memory   the array that owns the memory
    """

    address: int
    type_id: int
    row_bytes: int
    head_bytes: int
    memory: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray, type_id: int = TYPE_IDS["f32"]) -> CacheRows:
        """array: [heads, tokens, numbers or bytes of a row], each row contiguous."""
        return cls(array.ctypes.data, type_id, array.strides[1], array.strides[0], array)


class KVCache:
    """What the layers keep of one sequence; the memory of rows grows as needed up to `limit` tokens.

    layers       what each layer keeps
    names        of rows, in any layer
    state        the recurrent state; None where no layer has one
    checkpoints  see `RecurrentState`
    history      what ops keep that the reference backend's functions compute

    Within a pass every layer writes its rows and states; `commit` then adds them to the past. A pass that fails leaves the
    cache as it was.
    """

    def __init__(self, layers: Sequence[LayerCache], limit: int, checkpoints: int = 1):
        self.layers, self.limit, self.length = tuple(layers), limit, 0
        self.names = tuple(dict.fromkeys(name for layer in layers for name in layer.rows))
        nbytes = state_offsets(layers)[1]
        self.state = RecurrentState(nbytes, checkpoints) if nbytes else None
        self.history = ReferenceCache(limit)
        self._stored = [{name: _new(part, 0) for name, part in layer.rows.items()} for layer in layers]  # see `_new`
        self._rows: list[dict[str, CacheRows]] = [{} for _ in layers]  # what `rows` returned last
        self._table, self._table_end = np.zeros((0, 0, 3), np.int64), 0

    @property
    def types(self) -> str:
        """The types of the rows, in words."""
        return types_text(self.layers)

    def check_capacity(self, n: int) -> None:
        """Raises MillError if n more tokens do not fit."""
        if self.length + n > self.limit:
            raise MillError(
                f"the context is full: it holds {self.length} tokens, and {n} more do not fit into {self.limit}; "
                "choose a larger n_ctx (-c)"
            )

    def rows(self, layer: int, name: str, new: int = 0) -> CacheRows:
        """The rows of the past, with memory for those of `new` tokens behind them."""
        stored, part = self._stored[layer][name], self.layers[layer].rows[name]
        past, end = part.rows_of(self.length), part.rows_of(self.length + new)
        if stored.shape[1] < end:
            size = min(max(end, 2 * stored.shape[1], _MIN_TOKENS), max(part.rows_of(self.limit), end))
            grown = _new(part, size)
            if past:
                grown[:, :past] = stored[:, :past]
            self._stored[layer][name] = stored = grown
            self._rows[layer].pop(name, None)
            self._table_end = 0
        rows = self._rows[layer].get(name)
        if rows is None:
            rows = self._rows[layer][name] = CacheRows.of(stored, TYPE_IDS[part.type])
        return rows

    def table(self, new: int) -> np.ndarray:
        """`rows` of all layers and names as int64 [layers, names, 3]: address, bytes of a row and of a head's rows; zeros where
        a layer has no rows of a name. The same array until one of them changes."""
        if self.length + new > self._table_end:
            table, end = np.zeros((len(self.layers), len(self.names), 3), np.int64), self.limit
            for number, layer in enumerate(self.layers):
                for name, part in layer.rows.items():
                    rows = self.rows(number, name, new)
                    table[number, self.names.index(name)] = rows.address, rows.row_bytes, rows.head_bytes
                    end = min(end, part.every * (rows.memory.shape[1] + 1) - 1)
            self._table, self._table_end = table, end  # now: rows that have grown take the one before away
        return self._table

    def put(self, layer: int, name: str, rows: np.ndarray, is_rotated: bool = False) -> None:
        """Writes the rows of this pass, float32 [tokens, heads, width]; of runs of tokens that share one, the last one's.

        is_rotated: they have the rotation of the cache's rows. Where a type in blocks cannot hold a row (NaN, infinity), all of
        it becomes NaN.
        """
        part = self.layers[layer].rows[name]
        target, first = self.rows(layer, name, len(rows)).memory, part.rows_of(self.length)
        rows = rows[-(self.length + 1) % part.every :: part.every]
        n = len(rows)
        values = np.zeros((n * part.heads, part.padded_width), np.float32)
        values[:, : part.width] = rows.reshape(n * part.heads, part.width)
        if not is_rotated:
            rotate(values, part)
        encoded = encode_with_nan(values, part.type).reshape(n, part.heads, part.row_bytes)
        target[:, first : first + n] = encoded.transpose(1, 0, 2)

    def read(self, layer: int, name: str, new: int = 0, at: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Rows of the past and of `new` tokens of this pass, or of them those `at`, float32 [heads, rows, width], without their
        rotation; a view where they are float32 as they are."""
        part = self.layers[layer].rows[name]
        stored = self._stored[layer][name][:, : part.rows_of(self.length + new)][:, at]
        if part.type == "f32" and not part.rotation:
            return stored.view(np.float32)[..., : part.width]
        rows = decode(stored.reshape(-1, part.row_bytes), part.type, part.padded_width)
        rows = rows.copy() if part.type == "f32" else rows  # of which decoding makes a view
        rotate(rows, part)
        return rows.reshape(*stored.shape[:2], part.padded_width)[..., : part.width]

    def commit(self, n: int) -> None:
        self.length += n
        self.history.length = self.length
        if self.state is not None:
            self.state.commit(n)

    def checkpoint(self) -> None:
        """Has `truncate` and `fork` go back to the present length at no cost."""
        if self.state is not None:
            self.state.checkpoint()

    def resumable(self, length: int) -> int:
        """What `length` is after `truncate(length)`: less where a layer's recurrent state is only there for fewer tokens."""
        length = min(length, self.length)
        return length if self.state is None else self.state.resumable(length)

    def truncate(self, length: int) -> None:
        """Drops all tokens from position `resumable(length)` on."""
        self.length = min(self.length, length)
        if self.state is not None:
            self.length = self.state.truncate(self.length)
        self.history.truncate(self.length)

    def fork(self, length: int | None = None) -> KVCache:
        """A copy of the first `resumable(length)` tokens (all if None): for sequences that begin with the same tokens."""
        copy = KVCache((), self.limit)
        copy.layers, copy.names = self.layers, self.names
        copy.length = n = self.length if length is None else self.resumable(length)
        copy.state = None if self.state is None else self.state.fork(n)
        copy.history = self.history.fork(n)
        copy._rows = [{} for _ in self.layers]
        for layer, source in zip(self.layers, self._stored, strict=True):
            copy._stored.append({name: _new(part, part.rows_of(n)) for name, part in layer.rows.items()})
            for name, target in copy._stored[-1].items():
                target[:] = source[name][:, : target.shape[1]]
        return copy

    def dump(self) -> dict[str, np.ndarray]:
        """Copies of the rows of all tokens by layer and name, uint8 [heads, rows, row bytes], and of the recurrent state.

        Raises MillError where functions of the reference backend keep something.
        """
        if self.history.rows:
            raise MillError("the state of ops that the reference backend's functions compute cannot be saved")
        arrays = {
            f"{number}.{name}": self._stored[number][name][:, : part.rows_of(self.length)].copy()
            for number, layer in enumerate(self.layers)
            for name, part in layer.rows.items()
        }
        return arrays if self.state is None else {**arrays, "state": self.state.current.memory.copy()}

    def load(self, arrays: Mapping[str, np.ndarray], length: int) -> bool:
        """Takes what `dump` gave of `length` tokens in place of what it holds. Returns False, and changes nothing, where that
        is not what these layers keep."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{number}.{name}": (part.heads, part.rows_of(length), part.row_bytes)
            for number, layer in enumerate(self.layers)
            for name, part in layer.rows.items()
        }
        if self.state is not None:
            shapes["state"] = (self.state.size,)
        if {name: array.shape for name, array in arrays.items()} != shapes or length > self.limit:
            return False
        for number, layer in enumerate(self.layers):
            for name, part in layer.rows.items():
                self._stored[number][name] = _new(part, part.rows_of(length))
                self._stored[number][name][:] = arrays[f"{number}.{name}"]
        self._rows, self._table_end, self.length = [{} for _ in self.layers], 0, length
        self.history.length = length
        if self.state is not None:
            self.state.restore(arrays["state"], length)
        return True

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in all layers."""
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes taken at present: of rows token_bytes * limit at most."""
        rows = sum(stored.nbytes for layer in self._stored for stored in layer.values())
        return rows + (0 if self.state is None else self.state.nbytes)


def rotate(rows: np.ndarray, part: CachePart) -> None:
    """Rotates rows of a part, or as many of their first runs as they have, in place: C-contiguous float32 [rows, numbers]. Once
    more undoes it."""
    if part.rotation:
        transform_rows(rows, np.array(part.rotation, np.int64))


def _new(part: CachePart, tokens: int) -> np.ndarray:
    """uint8 [heads, tokens, row bytes], not initialised, at a cache line."""
    shape = part.heads, tokens, part.row_bytes
    return aligned_empty(shape, np.uint8) if tokens else np.empty(shape, np.uint8)


def encode_with_nan(rows: np.ndarray, type_name: str) -> np.ndarray:
    """As `encode_unchecked`, but rows with NaN or infinity become rows of NaN: all bits set, NaN in every type's scale."""
    try:
        return encode_unchecked(rows, type_name)
    except NonFiniteError:
        finite: np.ndarray = np.all(np.isfinite(rows), axis=1)
        out = encode_unchecked(np.where(finite[:, None], rows, np.float32(0)), type_name)
        out[~finite] = 0xFF
        return out
