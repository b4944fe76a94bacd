"""The table of tensor types; GGUF and safetensors files; the planned output file."""

from ..errors import FormatError, MillError, PlanError
from .gguf import GGUFFile, TensorInfo, open_gguf
from .source import SourceTensor, TensorSource
from .types import TYPES, TensorType, dims

__all__ = [
    "TYPES",
    "FormatError",
    "GGUFFile",
    "MillError",
    "PlanError",
    "SourceTensor",
    "TensorInfo",
    "TensorSource",
    "TensorType",
    "dims",
    "open_gguf",
]
