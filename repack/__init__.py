"""Interleaved row layouts: pack and unpack."""

from .interleave import pack, unpack

__all__ = ["pack", "unpack"]
