"""Compiling kernels (`kernels`), storing them (`kernel_cache`), and how long it takes (`compile_time`)."""

from .kernels import Kernel, import_kernels, intrinsic, kernel, native_entry

__all__ = ["Kernel", "import_kernels", "intrinsic", "kernel", "native_entry"]
