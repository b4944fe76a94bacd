"""Compiling and caching kernels; what the processor can do; vectors of lanes and bytes; the team of threads."""
