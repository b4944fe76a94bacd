"""Importance matrices: collecting them with the runtime, their files (GGUF and legacy .dat), coverage and statistics."""

from .entries import Imatrix, load

__all__ = ["Imatrix", "load"]
