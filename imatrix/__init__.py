"""Importance matrices: collected through the runtime, kept as GGUF or legacy files."""

from .entries import Imatrix
from .files import load

__all__ = ["Imatrix", "load"]
