"""Compiling the encoder and the decoder of a tensor type before they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from pathlib import Path

import numpy as np

from ..formats import TYPES, TensorType
from ..simd.compile.background import Unit, compile_in_background
from ..simd.compile.kernel_cache import ROOT
from . import codecs
from .plain_rows import can_encode

_COLUMNS = 512


def codec_unit(name: str) -> Unit:
    """What is compiled at once for a type. Its sources are those of its codec's module; of an interleaved type, its plain
    twin's."""
    codec = TYPES[name].codec or TYPES.plain(TYPES[name]).codec
    source = Path(codecs.__path__[0], *(codec or "").split(".")).with_suffix(".py")
    return Unit(__name__, "compile_codec", name, source.relative_to(ROOT).as_posix())


def compile_codec(name: str) -> None:
    """Encodes and decodes a few rows, with importance and without. Does nothing for a type that cannot be encoded."""
    from .encode import decode, encode

    stored = TYPES[name]
    if can_encode(stored):
        columns = lcm(_COLUMNS, stored.block)
        x = np.random.default_rng(0).standard_normal((stored.rows, columns), np.float32)
        for importance in (np.ones(columns, np.float32), None):
            decode(encode(x, name, importance), name, columns)
        codec_unit(name).mark()


def compile_codecs_in_background(types: Iterable[TensorType], urgent: bool = True) -> int:
    """Has other processes compile the codecs of these types that were not compiled before -> how many processes.

    urgent: at once, with the priority of this process, which compiles the first one. `encode` waits for those that were begun.
    """
    units = [codec_unit(each.name) for each in types if can_encode(each)]
    units = [unit for unit in units if not unit.is_marked]
    return compile_in_background(units, urgent) if units[urgent:] else 0
