"""AWQ (arXiv:2306.00978) as AutoAWQ's "gemm" version packs it: NAME.qweight, .qzeros and .scales, four bits.

qweight int32 [columns, rows / 8], qzeros int32 [groups, rows / 8], scales [groups, rows]. The eight codes of a word are those
of rows 8 w + 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...formats import FormatError
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from ..config import Config
from .integer_weights import (
    SCALE_DTYPES,
    DecodedWeight,
    check_tensor,
    columns_per_group,
    to_float32,
    transposed_words,
)
from .stored_weights import WeightTensors, sibling_tensors

ROWS_PER_WORD = 8
SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)  # of the code of each row in a word


@kernel
def _dequantise(words, shifts, scale, zero, group_size, first, out):
    """words uint32 [n, columns], scale and zero float32 [rows, groups] -> out float32 [rows, columns].

    first: number of out's row 0 among the 8 rows of words[0].
    """
    for r in range(out.shape[0]):
        word, shift = words[(first + r) // 8], shifts[(first + r) % 8]
        for g in range(scale.shape[1]):
            s, z = scale[r, g], zero[r, g]
            codes, values = word[g * group_size : (g + 1) * group_size], out[r, g * group_size : (g + 1) * group_size]
            for i in range(values.size):
                values[i] = (np.float32(np.int32((codes[i] >> shift) & np.uint32(15))) - z) * s


class AwqWeight(DecodedWeight):
    """The weight of one linear layer."""

    __slots__ = ("_group_size", "_scales", "_zeros")

    def __init__(
        self, shape: tuple[int, ...], words: StoredTensor, zeros: StoredTensor, scales: StoredTensor, group_size: int | None
    ):
        """shape: [rows, columns] that it must have. Raises FormatError if the tensors do not fit it."""
        rows, columns = shape if len(shape) == 2 else (0, 0)
        check_tensor(words, ("I32",), (columns, rows // ROWS_PER_WORD))
        groups = scales.shape[0] if scales.shape else 0
        check_tensor(scales, SCALE_DTYPES, (groups, rows))
        check_tensor(zeros, ("I32",), (groups, rows // ROWS_PER_WORD))
        self._group_size = columns_per_group(groups, columns, group_size)
        if not self._group_size or rows % ROWS_PER_WORD:
            raise FormatError(f"{scales.path}: {scales.name} has {groups} groups for a weight of {rows} x {columns}")
        super().__init__(words, shape, "awq_4bit")
        self._scales, self._zeros = scales, zeros

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact."""
        first_word, last_word = start // ROWS_PER_WORD, -(-stop // ROWS_PER_WORD)
        words = transposed_words(self.stored, first_word, last_word)
        scale = np.ascontiguousarray(to_float32(self._scales.data[:, start:stop], self._scales.dtype).T)
        packed = self._zeros.data[:, first_word:last_word].view(np.uint32)
        zeros = (packed[:, :, None] >> SHIFTS & np.uint32(15)).reshape(len(packed), -1)
        first = start - first_word * ROWS_PER_WORD
        zero = np.ascontiguousarray(zeros[:, first : first + stop - start].T.astype(np.float32))
        out = np.empty((stop - start, self.columns), np.float32)
        _dequantise(words, SHIFTS, scale, zero, self._group_size, first, out)
        return out


def weight_finder(
    config: Config, settings: dict
) -> Callable[[str, Mapping[str, StoredTensor], tuple[int, ...]], WeightTensors | None]:
    """The finder for a checkpoint with this quantization_config. Raises FormatError for unsupported settings."""
    bits, version = settings.get("bits", settings.get("w_bit")), settings.get("version") or "gemm"
    if bits != 4:
        raise config.error(f"quantization_config of quant_method awq has bits {bits!r}; only 4 is known")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise config.error(f"quantization_config of quant_method awq has version {version!r}; only gemm is known")
    group = settings.get("group_size", settings.get("q_group_size"))
    group_size = group if type(group) is int and group > 0 else None

    def find_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
        tensors = sibling_tensors(name, stored, ("qweight", "qzeros", "scales"))
        if tensors is None:
            return None
        weight = AwqWeight(shape, tensors["qweight"], tensors["qzeros"], tensors["scales"], group_size)
        return weight, list(tensors.values())

    return find_weight
