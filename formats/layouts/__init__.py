"""Where the bits of each tensor type lie and what they mean: the one description that decoders, encoders, repacking and the
kernels of the runtime derive from or are checked against.

    layout_of("q4_K").scales    bit addresses of the scale codes, int64 [1, 8, 6]
    decode(q, "q4_K", 4096)     uint8 [rows, row_bytes] -> float32 [rows, 4096], slowly, straight from the description
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoding import decode
    from .description import BlockLayout
    from .table import interleaving_of, layout_of

_MODULES = {"BlockLayout": "description", "decode": "decoding", "interleaving_of": "table", "layout_of": "table"}
__all__ = ["BlockLayout", "decode", "interleaving_of", "layout_of"]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for: building all layouts takes a tenth of the time of a short command."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value
