"""Encoding and decoding tensors of every type, recipes, planning of quantise jobs, and the search for a recipe of a given size.

Stable names, for use as a library:

    encode(x, type, importance=None)   float32 [rows, n] -> uint8 [rows, row_bytes]
    decode(q, type, n)                 uint8 [rows, row_bytes] -> float32 [rows, n]
    can_encode(tensor_type)            whether the two know a type
    gguf_source(path)                  a GGUF file as a source of float32 tensors

`planning.plan_quantize` plans a whole file; `jobs.execute.execute` writes it.
"""

from .codecs.codec import NonFiniteError
from .encode import can_encode, decode, encode, encode_unchecked
from .gguf_source import gguf_source

__all__ = ["NonFiniteError", "can_encode", "decode", "encode", "encode_unchecked", "gguf_source"]
