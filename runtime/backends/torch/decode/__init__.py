"""Weights that stay packed on a device of torch and are decoded there, tile by tile."""

from .matrix import PackedMatrix, packed

__all__ = ["PackedMatrix", "packed"]
