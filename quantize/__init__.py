"""Codecs for every tensor type, recipes, and the planning of quantise jobs."""

from .codec import can_encode, decode, encode
from .source import gguf_source

__all__ = ["can_encode", "decode", "encode", "gguf_source"]
