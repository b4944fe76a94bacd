"""Kernels of this program on NVIDIA's GPUs: the Python functions that the processor runs, translated to PTX, with nothing but
the driver. See simd/README.md."""
