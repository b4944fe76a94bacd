"""The quantisation functions of ggml shared libraries through ctypes: of the ik_llama.cpp fork, and of mainline llama.cpp."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import numpy as np

from ggufmill.formats import TensorType


class _Traits(c.Structure):
    """What ggml knows about a type. Only the first fields are read, the same in both; `rest` stands for the others."""

    _fields_ = (
        ("name", c.c_char_p),
        ("block", c.c_int64),
        ("interleave", c.c_int64),
        ("block_bytes", c.c_size_t),
        ("is_quantized", c.c_bool),
        ("to_float", c.c_void_p),
        ("rest", c.c_void_p * 10),
    )


class _InitParams(c.Structure):
    _fields_ = (("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool))


class _Options(c.Structure):
    """Options of the encoders, all off as llama-quantize passes them by default."""

    _fields_ = (("symmetric_q4_0", c.c_bool), ("slow_iq2_ks", c.c_bool))


class Library:
    """A loaded library; everything runs on the calling thread. Raises OSError or AttributeError if it is no such library."""

    _to_float = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)

    def __init__(self, path: Path):
        self._ggml = ggml = c.CDLL(str(path))
        ggml.ggml_internal_get_type_traits.restype = _Traits
        ggml.ggml_internal_get_type_traits.argtypes = (c.c_int,)
        ggml.ggml_quantize_init.argtypes = (c.c_int,)
        ggml.ggml_quantize_requires_imatrix.restype = c.c_bool
        ggml.ggml_quantize_requires_imatrix.argtypes = (c.c_int,)
        ggml.ggml_quantize_chunk.restype = c.c_size_t
        ggml.ggml_quantize_chunk.argtypes = (
            *(c.c_int, c.c_void_p, c.c_void_p),
            *(c.c_int64, c.c_int64, c.c_int64),
            *(c.c_void_p, c.POINTER(_Options)),
        )
        ggml.ggml_init.restype = c.c_void_p
        ggml.ggml_init.argtypes = (_InitParams,)
        ggml.ggml_init(_InitParams(1 << 20, None, False))  # fills its tables of float16 numbers

    def has(self, tensor_type: TensorType) -> bool:
        """Whether the library knows the type, under the same id and with blocks of the same size."""
        traits = self._ggml.ggml_internal_get_type_traits(tensor_type.id)
        same_name = (traits.name or b"").decode().lower() == tensor_type.name.lower()
        return same_name and (traits.block, traits.block_bytes) == (tensor_type.block, tensor_type.block_bytes)

    def encodes(self, tensor_type: TensorType, importance: np.ndarray | None) -> bool:
        """Whether it can encode the type: some only with importance."""
        return importance is not None or not self._ggml.ggml_quantize_requires_imatrix(tensor_type.id)

    def encode(self, x: np.ndarray, tensor_type: TensorType, importance: np.ndarray | None) -> np.ndarray:
        """As ggufmill.quantize.encode; x and importance C-contiguous float32."""
        rows, n = x.shape
        out = np.zeros((rows, tensor_type.row_bytes(n)), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        self._ggml.ggml_quantize_init(tensor_type.id)
        arguments = x.ctypes.data, out.ctypes.data, 0, rows, n, weights, c.byref(_Options())
        size = self._ggml.ggml_quantize_chunk(tensor_type.id, *arguments)
        if size != out.nbytes:
            raise ValueError(f"{tensor_type.name}: {size} bytes were expected to be {out.nbytes}")
        return out

    def decodes(self, tensor_type: TensorType) -> bool:
        """Whether it can decode rows of the type one by one."""
        return tensor_type.rows == 1 and bool(self._ggml.ggml_internal_get_type_traits(tensor_type.id).to_float)

    def decode(self, q: np.ndarray, tensor_type: TensorType, n: int) -> np.ndarray:
        """As ggufmill.quantize.decode; q C-contiguous."""
        to_float = self._to_float(self._ggml.ggml_internal_get_type_traits(tensor_type.id).to_float)
        rows, out = len(q), np.empty((len(q), n), np.float32)
        start, end = q.ctypes.data, out.ctypes.data
        if tensor_type.row_meta == 0:  # then rows are blocks and nothing else
            rows, n = 1, rows * n
        for row in range(rows):
            to_float(start + row * q.shape[1], end + row * out.shape[1] * 4, n)
        return out


class Mainline(Library):
    """llama.cpp's libggml-base.so, which llama-cpp-python brings along."""

    def __init__(self, path: Path):
        self._ggml = ggml = c.CDLL(str(path))
        ggml.ggml_get_type_traits.restype = c.POINTER(_Traits)
        ggml.ggml_get_type_traits.argtypes = (c.c_int,)
        ggml.ggml_quantize_init.argtypes = (c.c_int,)
        ggml.ggml_quantize_requires_imatrix.restype = c.c_bool
        ggml.ggml_quantize_requires_imatrix.argtypes = (c.c_int,)
        ggml.ggml_quantize_chunk.restype = c.c_size_t
        ggml.ggml_quantize_chunk.argtypes = (c.c_int, c.c_void_p, c.c_void_p, c.c_int64, c.c_int64, c.c_int64, c.c_void_p)
        ggml.ggml_init.restype = c.c_void_p
        ggml.ggml_init.argtypes = (_InitParams,)
        ggml.ggml_init(_InitParams(1 << 20, None, False))

    def _traits(self, tensor_type: TensorType) -> _Traits:
        return self._ggml.ggml_get_type_traits(tensor_type.id).contents

    def has(self, tensor_type: TensorType) -> bool:
        if tensor_type.id > 41:  # ids beyond its own are the fork's, and it looks none of them up
            return False
        traits = self._traits(tensor_type)
        same_name = (traits.name or b"").decode().lower() == tensor_type.name.lower()
        return same_name and (traits.block, traits.block_bytes) == (tensor_type.block, tensor_type.block_bytes)

    def encode(self, x: np.ndarray, tensor_type: TensorType, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.zeros((rows, tensor_type.row_bytes(n)), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        self._ggml.ggml_quantize_init(tensor_type.id)
        self._ggml.ggml_quantize_chunk(tensor_type.id, x.ctypes.data, out.ctypes.data, 0, rows, n, weights)
        return out

    def decodes(self, tensor_type: TensorType) -> bool:
        return bool(self._traits(tensor_type).to_float)

    def decode(self, q: np.ndarray, tensor_type: TensorType, n: int) -> np.ndarray:
        out = np.empty((len(q), n), np.float32)
        self._to_float(self._traits(tensor_type).to_float)(q.ctypes.data, out.ctypes.data, out.size)
        return out
