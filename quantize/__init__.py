"""Codecs for every tensor type, recipes, and the planning of quantise jobs."""

from .codecs.registry import can_encode, decode, encode
from .gguf_source import gguf_source

__all__ = ["can_encode", "decode", "encode", "gguf_source"]
