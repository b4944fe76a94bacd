"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel store it: NAME.qweight, .qzeros, .scales and .g_idx.

A linear layer is kept the other way round than elsewhere: qweight int32 [columns * bits / 32, rows] with the codes of a row
one behind the other down a column, qzeros int32 [groups, rows * bits / 32], scales [groups, rows]. g_idx int32 [columns] is
the group of each column; with desc_act it is in no order. In format v1 the stored zero points are one too small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...formats import FormatError
from ...formats.safetensors import StoredTensor
from ..config import Config
from .integer_weights import SCALES, DecodedWeight, as_float, demand, scale_by_index, share, turned, unpacked, widen_codes
from .stored_weights import Found, beside

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}  # checkpoint_format -> what is added to the stored zero points


class GptqWeight(DecodedWeight):
    """One linear layer."""

    __slots__ = ("_bits", "_index", "_per", "_plus", "_scales", "_zeros")

    def __init__(
        self,
        shape: tuple[int, ...],
        words: StoredTensor,
        zeros: StoredTensor,
        scales: StoredTensor,
        index: StoredTensor | None,
        plus: int,
        group: int | None,
    ):
        """shape: [rows, columns] it has to have; group: columns that share a scale, as far as is known. Raises FormatError."""
        rows, columns = shape if len(shape) == 2 else (0, 0)
        bits = next((b for b in BITS if words.shape == (columns * b // 32, rows) and columns * b % 32 == 0), 0)
        if not bits or words.dtype != "I32":
            raise FormatError(
                f"{words.path}: {words.name} is {words.dtype} {list(words.shape)}; for a weight of {list(shape)} GPTQ has I32"
                f" [columns * bits / 32, rows] with {', '.join(map(str, BITS))} bits"
            )
        groups = scales.shape[0] if scales.shape else 0
        demand(scales, SCALES, (groups, rows))
        demand(zeros, ("I32",), (groups, rows * bits // 32))
        super().__init__(words, shape, f"gptq_{bits}bit")
        self._bits, self._plus, self._scales, self._zeros = bits, plus, scales, zeros
        self._per, self._index = share(groups, columns, group), None
        if index is not None:
            demand(index, ("I32", "I64"), (columns,))
            self._index = index
        elif not self._per:
            raise FormatError(f"{scales.path}: {scales.name} has {groups} groups, which {columns} columns cannot have")

    def _order(self) -> np.ndarray | None:
        """The group of each column, int32 [columns]; None if they are runs of `_per`."""
        if self._index is None:
            return None
        index = np.asarray(self._index.data, np.int32)
        groups = self._scales.shape[0]
        if index.size and (index.min() < 0 or index.max() >= groups):
            raise FormatError(f"{self._index.path}: {self._index.name} has groups beyond the {groups} that there are")
        if self._per and np.array_equal(index, np.arange(self.columns, dtype=np.int32) // self._per):
            return None
        return index

    def run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact."""
        words = turned(self.stored, start, stop)
        scale = np.ascontiguousarray(as_float(self._scales.data[:, start:stop], self._scales.dtype).T)
        base = start - start % 32  # where a word begins with a whole code, whatever the number of bits
        first, last = base * self._bits // 32, -(-stop * self._bits // 32)
        table = unpacked(self._zeros.data[:, first:last], self._bits, (stop - base))[:, start - base :]
        zero = np.ascontiguousarray(table.T).astype(np.float32) + np.float32(self._plus)
        out = np.empty((stop - start, self.columns), np.float32)
        index = self._order()
        codes = words.view(np.uint8).reshape(stop - start, -1)
        if index is None:
            widen_codes(codes, self._bits, np.uint8(0), scale, zero, self._per, out)
        else:
            plain = np.ones((stop - start, 1), np.float32)
            widen_codes(codes, self._bits, np.uint8(0), plain, np.zeros_like(plain), self.columns, out)
            scale_by_index(index, scale, zero, out)
        return out


def finder(config: Config, settings: dict) -> Callable[[str, Mapping[str, StoredTensor], tuple[int, ...]], Found | None]:
    """What finds the weights of a checkpoint with this quantization_config. Raises FormatError for what is not known."""
    bits, form, group = settings.get("bits"), settings.get("checkpoint_format") or "gptq", settings.get("group_size")
    if bits not in BITS:
        raise config.fail(f"quantization_config of quant_method gptq has bits {bits!r}; known are {', '.join(map(str, BITS))}")
    if form not in FORMATS:
        raise config.fail(f"quantization_config has checkpoint_format {form!r}; known are {', '.join(FORMATS)}")
    size = group if type(group) is int and group > 0 else None

    def find(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Found | None:
        parts = beside(name, stored, ("qweight", "qzeros", "scales"), ("g_idx",))
        if parts is None:
            return None
        words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        weight = GptqWeight(shape, words, zeros, scales, parts.get("g_idx"), FORMATS[form], size)
        return weight, list(parts.values())

    return find
