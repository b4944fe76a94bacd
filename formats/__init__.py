"""File formats: GGUF and safetensors, the table of tensor types, and the interface of tensor sources."""

from ..errors import FormatError, MillError, PlanError
from .gguf import GGUFFile, open_gguf
from .source import SourceTensor, TensorScale, TensorSource
from .tensor_table import TensorInfo
from .types import TYPES, TensorType, dims

__all__ = [
    "TYPES",
    "FormatError",
    "GGUFFile",
    "MillError",
    "PlanError",
    "SourceTensor",
    "TensorInfo",
    "TensorScale",
    "TensorSource",
    "TensorType",
    "dims",
    "open_gguf",
]
