"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel store it: NAME.qweight, .qzeros, .scales and .g_idx.

A linear layer's weight is transposed: qweight int32 [columns * bits / 32, rows] has the codes of a row one after the other
down a column, qzeros int32 [groups, rows * bits / 32], scales [groups, rows]. g_idx int32 [columns] is the group of each
column; with desc_act groups are not contiguous. In format v1 the stored zero points are one too small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...formats import FormatError
from ...formats.safetensors import StoredTensor
from ..config import Config
from .integer_weights import (
    SCALE_DTYPES,
    DecodedWeight,
    check_tensor,
    columns_per_group,
    dequantise,
    scale_by_index,
    to_float32,
    transposed_words,
    unpack_codes,
)
from .stored_weights import WeightTensors, sibling_tensors

BITS = (2, 3, 4, 8)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # checkpoint_format -> what is added to the stored zero points


class GptqWeight(DecodedWeight):
    """The weight of one linear layer."""

    __slots__ = ("_bits", "_group_size", "_index", "_scales", "_zero_offset", "_zeros")

    def __init__(
        self,
        shape: tuple[int, ...],
        words: StoredTensor,
        zeros: StoredTensor,
        scales: StoredTensor,
        index: StoredTensor | None,
        zero_offset: int,
        group_size: int | None,
    ):
        """shape: [rows, columns] that it must have; group_size: None if unknown. Raises FormatError."""
        rows, columns = shape if len(shape) == 2 else (0, 0)
        bits = next((b for b in BITS if words.shape == (columns * b // 32, rows) and columns * b % 32 == 0), 0)
        if not bits or words.dtype != "I32":
            raise FormatError(
                f"{words.path}: {words.name} is {words.dtype} {list(words.shape)}; for a weight of {list(shape)} GPTQ has I32"
                f" [columns * bits / 32, rows] with {', '.join(map(str, BITS))} bits"
            )
        groups = scales.shape[0] if scales.shape else 0
        check_tensor(scales, SCALE_DTYPES, (groups, rows))
        check_tensor(zeros, ("I32",), (groups, rows * bits // 32))
        super().__init__(words, shape, f"gptq_{bits}bit")
        self._bits, self._zero_offset, self._scales, self._zeros = bits, zero_offset, scales, zeros
        self._group_size, self._index = columns_per_group(groups, columns, group_size), None
        if index is not None:
            check_tensor(index, ("I32", "I64"), (columns,))
            self._index = index
        elif not self._group_size:
            raise FormatError(f"{scales.path}: {scales.name} has {groups} groups, which {columns} columns cannot have")

    def _group_index(self) -> np.ndarray | None:
        """The group of each column, int32 [columns]; None if groups are runs of `_group_size` columns."""
        if self._index is None:
            return None
        index = np.asarray(self._index.data, np.int32)
        groups = self._scales.shape[0]
        if index.size and (index.min() < 0 or index.max() >= groups):
            raise FormatError(f"{self._index.path}: {self._index.name} has groups beyond the {groups} that there are")
        if self._group_size and np.array_equal(index, np.arange(self.columns, dtype=np.int32) // self._group_size):
            return None
        return index

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact."""
        words = transposed_words(self.stored, start, stop)
        scale = np.ascontiguousarray(to_float32(self._scales.data[:, start:stop], self._scales.dtype).T)
        base = start - start % 32  # a row whose code starts a word, whatever the number of bits
        first_word, last_word = base * self._bits // 32, -(-stop * self._bits // 32)
        zeros = unpack_codes(self._zeros.data[:, first_word:last_word], self._bits, stop - base)[:, start - base :]
        zero = np.ascontiguousarray(zeros.T).astype(np.float32) + np.float32(self._zero_offset)
        out = np.empty((stop - start, self.columns), np.float32)
        index = self._group_index()
        codes = words.view(np.uint8).reshape(stop - start, -1)
        if index is None:
            dequantise(codes, self._bits, np.uint8(0), scale, zero, self._group_size, out)
        else:
            ones = np.ones((stop - start, 1), np.float32)
            dequantise(codes, self._bits, np.uint8(0), ones, np.zeros_like(ones), self.columns, out)
            scale_by_index(index, scale, zero, out)
        return out


def weight_finder(
    config: Config, settings: dict
) -> Callable[[str, Mapping[str, StoredTensor], tuple[int, ...]], WeightTensors | None]:
    """The finder for a checkpoint with this quantization_config. Raises FormatError for unsupported settings."""
    bits, form, group = settings.get("bits"), settings.get("checkpoint_format") or "gptq", settings.get("group_size")
    if bits not in BITS:
        raise config.error(f"quantization_config of quant_method gptq has bits {bits!r}; known are {', '.join(map(str, BITS))}")
    if form not in ZERO_OFFSETS:
        raise config.error(f"quantization_config has checkpoint_format {form!r}; known are {', '.join(ZERO_OFFSETS)}")
    group_size = group if type(group) is int and group > 0 else None

    def find_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
        tensors = sibling_tensors(name, stored, ("qweight", "qzeros", "scales"), ("g_idx",))
        if tensors is None:
            return None
        words, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
        weight = GptqWeight(shape, words, zeros, scales, tensors.get("g_idx"), ZERO_OFFSETS[form], group_size)
        return weight, list(tensors.values())

    return find_weight
