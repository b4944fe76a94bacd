"""`Codec`, the encoder and decoder of one tensor type, and what those of several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ...data_classes import dataclass
from ...formats import MillError


class ItemEncoder(NamedTuple):
    """How a GPU encodes rows of a type.

    encode   as `Codec.encode`, with the same bytes, of rows that need no care, and with importance [n] or None. Only kernels
             with work items (`simd.cuda.work_items`) touch x and the result: both may stand for memory elsewhere
    guarded  elements of the blocks whose importance `guard_importance` looks at; 0: it is not called
    scaled   elements of the runs that `normalise_rows` scales by powers of two, and its exponents; None: it is not called
    importance  float32 [n] -> of as many, as `encode` takes it
    """

    encode: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    guarded: int = 0
    scaled: tuple[int, tuple[int, int]] | None = None
    importance: Callable[[np.ndarray], np.ndarray] = np.asarray


Encoded = tuple[np.ndarray, np.ndarray | None, tuple[float, float]]
EncodeWithAmax = Callable[[np.ndarray, np.ndarray | None], Encoded]


@dataclass(frozen=True)
class Codec:
    """The encoder and decoder of one tensor type.

    encode         (x float32 [rows, n], importance) -> uint8 [rows, row_bytes]. importance: None, float32 [n] for all rows or
                   [rows, n]. x has at least one row and only finite values.
    decode         (q uint8 [rows, row_bytes], n) -> float32 [rows, n]
    encode_with_amax  what `encode` returns, the largest magnitude of each row, float32 [rows], or None where only few callers
                   need them, and the least and the largest of these: of a codec that looks at all of x anyway, so that x need
                   not be scanned before. Where the last is not finite, x is not
    rounds         every weight becomes the nearest of values among which 0 is: no row within the range of the type's scales is
                   farther from its weights than zeros are
    items          how a GPU encodes; None: not at all
    rounds_without_importance  the same where there is no importance, of values with a float16 scale and minimum

    All arrays are C-contiguous. A repacked type needs no codec: `pack` makes it from its base type. An interleaved type without
    a base (q8_k_r8), or whose repacking would take longer than encoding (q8_KV_r8, bf16_r16), has a codec that is given whole
    groups of rows.
    """

    encode: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    decode: Callable[[np.ndarray, int], np.ndarray]
    encode_with_amax: EncodeWithAmax | None = None
    rounds: bool = False
    rounds_without_importance: bool = False
    items: ItemEncoder | None = None


def codec_with_amax(encode_with_amax: EncodeWithAmax, decode: Callable[[np.ndarray, int], np.ndarray], **options: Any) -> Codec:
    """The codec of an encoder that finds the largest magnitude of each row; options as the other fields of `Codec`."""

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        return encode_with_amax(x, importance)[0]

    return Codec(encode, decode, encode_with_amax, **options)


class NonFiniteError(MillError):
    """A weight is NaN or infinite. row, column: its place in the array that was to be encoded; value: the weight."""

    def __init__(self, row: int, column: int, value: float):
        super().__init__(f"the weight at row {row}, column {column} is {value}")
        self.row, self.column, self.value = row, column, value


def raise_nonfinite(x: np.ndarray) -> NoReturn:
    """Raises NonFiniteError for the first NaN or infinite value of [rows, columns]; there must be one."""
    row, column = map(int, np.argwhere(~np.isfinite(x))[0])
    raise NonFiniteError(row, column, float(x[row, column]))
