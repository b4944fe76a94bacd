"""Where the bits of each tensor type lie and what they mean: the one description that decoders, encoders, repacking and the
kernels of the runtime derive from or are checked against.

    layout_of("q4_K").scales    bit addresses of the scale codes, int64 [1, 8, 6]
    decode(q, "q4_K", 4096)     uint8 [rows, row_bytes] -> float32 [rows, 4096], slowly, straight from the description
"""

from .decode import decode
from .description import BlockLayout
from .table import interleaving_of, layout_of

__all__ = ["BlockLayout", "decode", "interleaving_of", "layout_of"]
