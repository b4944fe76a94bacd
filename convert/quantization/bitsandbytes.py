"""bitsandbytes (arXiv:2305.14314, 2208.07339) as transformers saves it: nf4 and fp4 with scales of blocks, and int8 by rows.

Four bits: NAME.weight uint8 [elements / 2, 1], the first of two codes in the high four bits; NAME.weight.absmax, one scale for
each run of `blocksize` elements of the flattened matrix; NAME.weight.quant_map, what the codes stand for; and
NAME.weight.quant_state.bitsandbytes__TYPE, a JSON object in bytes. With double quantisation absmax is uint8, codes of
nested_quant_map times nested_absmax of `nested_blocksize` neighbours, plus nested_offset.
Eight bits: NAME.weight int8 [rows, columns], times NAME.SCB float32 [rows], the largest magnitude of each row, over 127.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from ...formats import FormatError
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from .integer_weights import DecodedWeight, check_tensor
from .stored_weights import WeightTensors, sibling_tensors

TYPES_OF_FOUR_BITS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_LARGEST_STATE = 1 << 16  # bytes


@kernel
def _dequantise(packed, first, values, scales, first_scale, block, out):
    """packed uint8 [bytes], from element `first` - first % 2 on -> out float32 [elements]. scales float32, of blocks from
    `first_scale` on; values float32 [16]."""
    for i in range(out.size):
        element = first + np.int64(i)
        byte = np.int64(packed[(element >> 1) - (first >> 1)])
        code = byte & 15 if element & 1 else byte >> 4
        out[i] = values[code] * scales[element // block - first_scale]


class FourBitWeight(DecodedWeight):
    """nf4 or fp4."""

    __slots__ = ("_block", "_nested", "_tensors")

    def __init__(self, shape: tuple[int, ...], kind: str, tensors: dict[str, StoredTensor]):
        """tensors: by what follows NAME.weight. Raises FormatError if they do not fit together or the shape."""
        codes, state = tensors[""], _state_of(tensors[f"{_STATE}{kind}"])
        self._block, self._nested = (_size(state.get(key)) for key in ("blocksize", "nested_blocksize"))
        stored_shape = state.get("shape")
        elements = prod(shape)
        if not self._block or not isinstance(stored_shape, list):
            raise FormatError(f"{codes.path}: {codes.name}{_STATE}{kind} lacks blocksize and shape")
        if tuple(stored_shape) != shape:
            raise FormatError(
                f"{codes.path}: {codes.name} is {stored_shape}, not {list(shape)}, the shape according to config.json"
            )
        check_tensor(codes, ("U8",), (-(-elements // 2), 1))
        blocks, absmax = -(-elements // self._block), tensors[".absmax"]
        is_nested = absmax.dtype == "U8"
        check_tensor(absmax, ("U8", "F32"), (blocks,))
        check_tensor(tensors[".quant_map"], ("F32",), (16,))
        if is_nested:
            missing = [part for part in (".nested_absmax", ".nested_quant_map") if part not in tensors]
            if missing or not self._nested:
                raise FormatError(
                    f"{codes.path}: {codes.name} has nested scales, but no {codes.name}{(missing or [_STATE + kind])[0]}"
                )
            check_tensor(tensors[".nested_absmax"], ("F32",), (-(-blocks // self._nested),))
            check_tensor(tensors[".nested_quant_map"], ("F32",), (256,))
        super().__init__(codes, shape, f"bnb_{kind}")
        self._tensors = tensors | {_STATE: tensors[f"{_STATE}{kind}"]}

    def _scales(self, first: int, stop: int) -> np.ndarray:
        """float32 [stop - first]: of these blocks."""
        absmax = np.asarray(self._tensors[".absmax"].data[first:stop])
        if absmax.dtype != np.uint8:
            return np.ascontiguousarray(absmax, np.float32)
        nested = np.asarray(self._tensors[".nested_absmax"].data, np.float32)[np.arange(first, stop) // self._nested]
        offset = np.float32(_state_of(self._tensors[_STATE]).get("nested_offset", 0.0))
        return np.asarray(self._tensors[".nested_quant_map"].data, np.float32)[absmax] * nested + offset

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact but for the rounding of products."""
        first, end = start * self.columns, stop * self.columns
        packed = np.ascontiguousarray(self.stored.rows(first // 2, -(-end // 2))).reshape(-1)
        first_scale, last_scale = first // self._block, -(-end // self._block)
        out = np.empty((stop - start, self.columns), np.float32)
        values = np.array(self._tensors[".quant_map"].data, np.float32)
        _dequantise(packed, first, values, self._scales(first_scale, last_scale), first_scale, self._block, out.reshape(-1))
        return out


class EightBitWeight(DecodedWeight):
    """int8 with the largest magnitude of each row."""

    __slots__ = ("_largest",)

    def __init__(self, shape: tuple[int, ...], codes: StoredTensor, largest: StoredTensor):
        check_tensor(codes, ("I8",), shape)
        check_tensor(largest, ("F32",), shape[:-1])
        super().__init__(codes, shape, "bnb_int8")
        self._largest = largest

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact but for the rounding of products."""
        factors = np.asarray(self._largest.data, np.float32).reshape(-1)[start:stop] / np.float32(127)
        return self._matrix.rows(start, stop).astype(np.float32) * factors[:, None]


def _size(value: object) -> int:
    """A whole number above 0; 0 for anything else."""
    return value if type(value) is int and value > 0 else 0


def _state_of(stored: StoredTensor) -> dict[str, Any]:
    """The JSON object in the bytes of a tensor. Raises FormatError for anything else."""
    try:
        if stored.dtype != "U8" or stored.nbytes > _LARGEST_STATE:
            raise ValueError
        state = json.loads(np.asarray(stored.data, np.uint8).tobytes())
    except ValueError:
        raise FormatError(f"{stored.path}: {stored.name} is no JSON object in bytes") from None
    if not isinstance(state, dict):
        raise FormatError(f"{stored.path}: {stored.name} is no JSON object in bytes")
    return state


def find_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
    """A weight in nf4, fp4 or int8; None if there is none of this name. Raises FormatError for tensors that do not fit."""
    if name not in stored:
        return None
    kind = next((kind for kind in TYPES_OF_FOUR_BITS if f"{name}{_STATE}{kind}" in stored), None)
    if kind is not None:
        parts = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", f"{_STATE}{kind}")
        tensors = {part: stored[name + part] for part in parts if name + part in stored}
        missing = [part for part in parts[:3] if part not in tensors]
        if missing:
            raise FormatError(f"{stored[name].path}: {name}{missing[0]} is missing, which {name} needs")
        return FourBitWeight(shape, kind, tensors), list(tensors.values())
    if stored[name].dtype != "I8":
        return None
    siblings = sibling_tensors(name, stored, ("weight", "SCB"), ("weight_format",))
    if siblings is None:
        return None
    return EightBitWeight(shape, siblings["weight"], siblings["SCB"]), list(siblings.values())
