"""AWQ (arXiv:2306.00978) in AutoAWQ's packing "gemm": NAME.qweight, .qzeros and .scales, four bits.

qweight int32 [columns, rows / 8], qzeros int32 [groups, rows / 8], scales [groups, rows]. The eight codes of a word belong to
rows 8 w + 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...formats import FormatError
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from ..config import Config
from .integer_weights import SCALES, DecodedWeight, as_float, demand, share, turned
from .stored_weights import Found, beside

ROWS = 8  # of which a word has one code each
SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)  # where the code of each of them lies


@kernel
def _widen(words, shifts, scale, zero, per, first, out):
    """words uint32 [n, columns], scale and zero float32 [rows, groups] -> out [rows, columns]; its row 0 is `first` of 8."""
    for r in range(out.shape[0]):
        word, shift = words[(first + r) // 8], shifts[(first + r) % 8]
        for g in range(scale.shape[1]):
            s, z = scale[r, g], zero[r, g]
            part, to = word[g * per : (g + 1) * per], out[r, g * per : (g + 1) * per]
            for i in range(to.size):
                to[i] = (np.float32(np.int32((part[i] >> shift) & np.uint32(15))) - z) * s


class AwqWeight(DecodedWeight):
    """One linear layer."""

    __slots__ = ("_per", "_scales", "_zeros")

    def __init__(
        self, shape: tuple[int, ...], words: StoredTensor, zeros: StoredTensor, scales: StoredTensor, group: int | None
    ):
        """shape: [rows, columns] it has to have; group: columns that share a scale. Raises FormatError."""
        rows, columns = shape if len(shape) == 2 else (0, 0)
        demand(words, ("I32",), (columns, rows // ROWS))
        groups = scales.shape[0] if scales.shape else 0
        demand(scales, SCALES, (groups, rows))
        demand(zeros, ("I32",), (groups, rows // ROWS))
        self._per = share(groups, columns, group)
        if not self._per or rows % ROWS:
            raise FormatError(f"{scales.path}: {scales.name} has {groups} groups for a weight of {rows} x {columns}")
        super().__init__(words, shape, "awq_4bit")
        self._scales, self._zeros = scales, zeros

    def run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact."""
        first, last = start // ROWS, -(-stop // ROWS)
        words = turned(self.stored, first, last)
        scale = np.ascontiguousarray(as_float(self._scales.data[:, start:stop], self._scales.dtype).T)
        packed = self._zeros.data[:, first:last].view(np.uint32)
        table = (packed[:, :, None] >> SHIFTS & np.uint32(15)).reshape(len(packed), -1)
        at = start - first * ROWS
        zero = np.ascontiguousarray(table[:, at : at + stop - start].T.astype(np.float32))
        out = np.empty((stop - start, self.columns), np.float32)
        _widen(words, SHIFTS, scale, zero, self._per, at, out)
        return out


def finder(config: Config, settings: dict) -> Callable[[str, Mapping[str, StoredTensor], tuple[int, ...]], Found | None]:
    """What finds the weights of a checkpoint with this quantization_config. Raises FormatError for what is not known."""
    bits, version = settings.get("bits", settings.get("w_bit")), settings.get("version") or "gemm"
    if bits != 4:
        raise config.fail(f"quantization_config of quant_method awq has bits {bits!r}; only 4 is known")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise config.fail(f"quantization_config of quant_method awq has version {version!r}; only gemm is known")
    group = settings.get("group_size", settings.get("q_group_size"))
    size = group if type(group) is int and group > 0 else None

    def find(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Found | None:
        parts = beside(name, stored, ("qweight", "qzeros", "scales"))
        if parts is None:
            return None
        return AwqWeight(shape, parts["qweight"], parts["qzeros"], parts["scales"], size), list(parts.values())

    return find
