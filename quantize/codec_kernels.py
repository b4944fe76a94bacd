"""What is compiled for encoding and decoding a tensor type, and processes that do so before it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..formats import TYPES, TensorType
from ..simd.compile.background import Unit, compile_in_background
from ..simd.compile.kernel_cache import ROOT
from . import codecs
from .plain_rows import can_encode

# Codecs whose encoder is one kernel for all their types, but for these.
_ONE_KERNEL = {"iqk.iq_k_ks": "", "trellis.iq_kt": "", "kquants.asymmetric": "q2_K"}
_BY_IMPORTANCE = ("kquants.asymmetric",)  # codecs with an encoder for rows without importance, and one for rows with it


def codec_unit(name: str, weighted: bool = False) -> Unit:
    """What is compiled at once for a type: the codec of its rows, which of an interleaved type are those of its plain twin, and
    of types that share an encoder those of the first. weighted: for rows with importance. Its sources are those of the codec's
    module."""
    encoded = TYPES[name] if TYPES[name].codec is not None else TYPES.plain(TYPES[name])
    if (other := _ONE_KERNEL.get(encoded.codec or "", encoded.name)) != encoded.name:
        encoded = next(each for each in TYPES.values() if each.codec == encoded.codec and each.name != other)
    source = Path(codecs.__path__[0], *(encoded.codec or "").split(".")).with_suffix(".py")
    compiles = "compile_weighted_codec" if weighted and encoded.codec in _BY_IMPORTANCE else "compile_plain_codec"
    return Unit(f"{__package__}.encode", compiles, encoded.name, source.relative_to(ROOT).as_posix())


def compile_codecs_in_background(types: Iterable[tuple[TensorType, bool]], urgent: bool = True) -> int:
    """Has other processes compile the codecs of these types, for rows with importance or without, that were not compiled before
    -> how many processes.

    urgent: at once, with the priority of this process, which compiles the first one. `encode` waits for those that were begun.
    """
    wanted = dict.fromkeys(codec_unit(each.name, weighted) for each, weighted in types if can_encode(each))
    units = [unit for unit in wanted if not unit.is_marked]
    return compile_in_background(units, urgent) if units[urgent:] else 0
