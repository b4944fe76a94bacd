"""Rows of plain types by their codecs, on the processor or a device of torch: `encode` before it checks rows and packs them."""

# What imports numba is imported where it is needed: most commands only ask for types here, and take less time than that import.

from __future__ import annotations

from functools import cache
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ..data_classes import dataclass
from ..formats import TYPES, PlanError, TensorType
from ..simd.compile import import_kernels
from .codecs.codec import raise_nonfinite

if TYPE_CHECKING:
    from .codecs.codec import Codec, Encoded

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


@cache
def float_range() -> ModuleType:
    """The module of this name: an `import` at each call would take as long as a short row."""
    return import_kernels(".codecs.float_range", __package__)


# Plain types that GPUs of NVIDIA encode (their codecs have `items`): the same bytes as the processor's.
GPU_TYPES = frozenset({
    "q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs",
    "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k",
})  # fmt: skip
GPU_ELEMENTS = 1 << 23  # of rows that jobs have encoded by one call, for several threads (`torch_encoders.threads`)


@dataclass(frozen=True, eq=False)
class PlainRows:
    """Encodes rows that will be stored as `target`, see `plain_rows`.

    type    whose codec is used: the target itself, or the plain type whose bits it permutes
    device  as torch names it; see `is_on_gpu`
    guard_block  elements of the blocks whose importance is guarded for this target alone; None: none
    """

    target: TensorType
    type: TensorType
    codec: Codec
    device: str | None
    guard_block: int | None

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        """C-contiguous float32 [rows, n], all of it finite, importance float32 [n] or None -> uint8 [rows, row_bytes]."""
        return self.codec.encode(x, self._guarded_importance(x, importance))

    def encode_with_amax(self, x: np.ndarray, importance: np.ndarray | None) -> Encoded:
        """As `Codec.encode_with_amax`, of any codec. Raises NonFiniteError for NaN or infinity in x."""
        encode_with_amax = self.codec.encode_with_amax
        if encode_with_amax is None:
            amax, range_ = float_range().finite_amax(x)
            return self.encode(x, importance), amax, range_
        if self.guard_block is not None:
            importance = self._guarded_importance(x, importance)
        q, amax, range_ = encode_with_amax(x, importance)
        if not range_[1] < inf:
            raise_nonfinite(x)
        return q, amax, range_

    def _guarded_importance(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray | None:
        if importance is None or self.guard_block is None:
            return importance
        from .codecs.importance import guard_importance

        return guard_importance(x, importance, self.guard_block)

    @property
    def guarded(self) -> int:
        """Elements of the blocks whose importance `guard_importance` looks at; 0: it is not called."""
        assert self.codec.items is not None
        return self.guard_block or self.codec.items.guarded

    def is_on_gpu(self, is_weighted: bool) -> bool:
        """Whether the device is a GPU that encodes rows of this type, with importance or without."""
        knows = self.type.name in GPU_TYPES and (is_weighted or not self.codec.rounds_without_importance)
        return knows and is_gpu(self.device)

    def decode(self, q: np.ndarray, n: int) -> np.ndarray:
        """uint8 [rows, row_bytes] of `type` -> float32 [rows, n]."""
        return self.codec.decode(np.ascontiguousarray(q), n)


@cache
def is_gpu(device: str | None) -> bool:
    """Whether this is a device that the driver of NVIDIA's knows."""
    if device is None or device.partition(":")[0] != "cuda":
        return False
    from ..operating_system.nvidia import is_here

    return is_here()


@cache
def plain_rows(target: TensorType, device: str | None = None) -> PlainRows:
    """What encodes rows to a type. Raises PlanError for a type without a codec."""
    plain = target if target.codec is not None else TYPES.plain(target)
    return PlainRows(target, plain, codec_of(plain.name), device, _GUARD_BLOCK_OF.get(target.name.lower()))
