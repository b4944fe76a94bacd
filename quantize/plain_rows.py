"""Rows of plain types by their codecs, on the processor or a device of torch: `encode` before it checks rows and packs them."""

# What imports numba is imported where it is needed: most commands only ask for types here, and take less time than that import.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..formats import TYPES, PlanError, TensorType
from ..simd.compile import import_kernels
from .torch_encoders.encode_on_device import TYPES_ON_DEVICES, encode_on_device

if TYPE_CHECKING:
    from .codecs.codec import Codec

# Block size -> repacked types whose encoders guard importance (docs/formats/encoders.md, imatrix sanitising) while those of
# their base types do not: their bytes are not always those of the repacked base type.
_GUARDED_PACKED_TYPES = {
    32: ("iq4_nl_r4", "q4_0_r8", "q6_0_r4", "iq4_xs_r8", "q4_k_r4", "q5_k_r4", "iq2_xxs_r4", "iq3_xxs_r4"),
    16: ("q2_k_r4", "q3_k_r4", "q6_k_r4", "iq2_xs_r4", "iq2_s_r4", "iq3_s_r4"),
}
_GUARD_BLOCK_OF = {name: block for block, names in _GUARDED_PACKED_TYPES.items() for name in names}


def can_encode(tensor_type: TensorType) -> bool:
    """Whether `encode` and `decode` support this type."""
    return tensor_type.has_codec


@cache
def codec_of(name: str) -> Codec:
    """The codec of a type that has one of its own. Raises PlanError if it has none."""
    module = TYPES[name].codec
    if module is None:
        raise PlanError(f"tensor type {name} cannot be encoded or decoded yet")
    return import_kernels(f".codecs.{module}", __package__).CODECS[name.lower()]


@dataclass(frozen=True)
class PlainRows:
    """Encodes rows that will be stored as `target`, see `plain_rows`.

    type    whose codec is used: the target itself, or the plain type whose bits it permutes
    device  of torch, which encodes the types that `torch_encoders` knows; None: the processor
    """

    target: TensorType
    type: TensorType
    codec: Codec
    device: str | None

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        """C-contiguous float32 [rows, n], all of it finite, importance float32 [n] or None -> uint8 [rows, row_bytes]."""
        block = _GUARD_BLOCK_OF.get(self.target.name.lower()) if importance is not None else None
        if importance is not None and block is not None:
            from .codecs.importance import guard_importance

            importance = guard_importance(x, importance, block)
        if self.device is not None and self.type.name in TYPES_ON_DEVICES:
            return encode_on_device(x, importance, self.type.name, self.device)
        return self.codec.encode(x, importance)

    def decode(self, q: np.ndarray, n: int) -> np.ndarray:
        """uint8 [rows, row_bytes] of `type` -> float32 [rows, n]."""
        return self.codec.decode(np.ascontiguousarray(q), n)


@cache
def plain_rows(target: TensorType, device: str | None = None) -> PlainRows:
    """What encodes rows to a type. Raises PlanError for a type without a codec."""
    plain = target if target.codec is not None else TYPES.plain(target)
    return PlainRows(target, plain, codec_of(plain.name), device)
