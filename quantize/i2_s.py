"""Reading i2_s, the type of Microsoft's BitNet files: 128 two-bit codes in 32 bytes, one scale after a tensor's last code.

Byte j of a block has the codes of elements j, j + 32, j + 64 and j + 96, the first in its highest bits; a code stands for
itself less one. The scale of all weights, a float32, follows the codes, so that no row can be decoded from its own bytes: the
type is not in the table of types.
(ik_llama.cpp, dequantize_row_ms_i2s)
"""

from __future__ import annotations

import numpy as np

from ..formats import FormatError, SourceTensor, TensorInfo

TYPE_ID, NAME = 36, "i2_s"
_BLOCK, _BYTES = 128, 32
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]


def i2_s_tensor(info: TensorInfo) -> SourceTensor:
    """A tensor of a GGUF file in i2_s as a source tensor, which reads as float32.

    Raises FormatError for rows that are no whole blocks, and for a tensor without its scale.
    """
    columns, codes = info.shape[0], info.n_rows * info.shape[0] // 4
    if columns % _BLOCK or info.nbytes < codes + 4:
        raise FormatError(
            f"{info.path}: tensor {info.name} is i2_s of {columns} columns in {info.nbytes} bytes; known are rows of a multiple"
            f" of {_BLOCK} columns in {codes + 4} bytes or more"
        )

    def read(start: int, stop: int) -> np.ndarray:
        data = info.data.reshape(-1)
        scale = np.ascontiguousarray(data[codes : codes + 4]).view("<f4")[0].astype(np.float32)
        packed = data[start * columns // 4 : stop * columns // 4].reshape(-1, 1, _BYTES)
        values = (packed >> _SHIFTS & 3).astype(np.float32) - np.float32(1)
        return scale * values.reshape(stop - start, columns)

    return SourceTensor(info.name, info.shape, NAME, read, files=(info.path,))
