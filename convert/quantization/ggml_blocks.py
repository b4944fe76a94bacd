"""Weights that modelopt stores as blocks of ggml's iq1_s and iq2_xs: copied as they are.

A weight is uint8 [..., rows, blocks, bytes of a block], without a tensor for scales or for the shape; the bytes of a block tell
the type (Model-Optimizer's "Unified HuggingFace Checkpoint", IQ weight representation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...formats import TYPES, TensorType
from ...formats.safetensors import StoredTensor
from ...quantize import decode
from .stored_weights import Rows, StoredWeight, WeightTensors

_BY_BLOCK_BYTES = {TYPES[name].block_bytes: TYPES[name] for name in ("iq1_s", "iq2_xs")}


class GgmlBlocksWeight(StoredWeight):
    """A matrix, or a stack of matrices. `raw` gives the stored bytes."""

    __slots__ = ()

    def __init__(self, stored: StoredTensor, kind: TensorType):
        lead, blocks, nbytes = stored.shape[:-2], stored.shape[-2], stored.shape[-1]
        flat = replace(stored, shape=(*lead, blocks * nbytes))
        self._describe(flat, (*lead, blocks * kind.block), kind.name)
        self.ggml_type = kind

    def read(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, columns], exact."""
        assert self.ggml_type is not None
        return decode(self.raw(rows), self.ggml_type.name, self.columns)


def find_blocks_weight(name: str, stored: Mapping[str, StoredTensor]) -> WeightTensors | None:
    """A weight NAME in blocks; None if NAME is something else. No row of codes of NVFP4, which are U8 too, has that length."""
    tensor = stored.get(name)
    if tensor is None or tensor.dtype != "U8" or len(tensor.shape) < 3 or tensor.shape[-1] not in _BY_BLOCK_BYTES:
        return None
    return GgmlBlocksWeight(tensor, _BY_BLOCK_BYTES[tensor.shape[-1]]), [tensor]
