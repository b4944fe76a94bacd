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
# Types of those with a search of their own, which their encoder calls by its address.
_SEARCHES = {
    name: Unit(f"{codecs.__name__}.iqk.{module}", search)
    for module, search, *names in (
        ("boundary_search", "search_of_boundaries", "iq2_k", "iq2_ks"),
        ("table_search", "search_of_three", "iq6_k"),
    )
    for name in names
}
_BY_IMPORTANCE = ("kquants.asymmetric",)  # codecs with an encoder for rows without importance, and one for rows with it


def codec_unit(name: str, weighted: bool = False) -> Unit:
    """What is compiled at once for a type: the codec of its rows, which of an interleaved type are those of its plain twin, and
    of types that share an encoder those of the first without a search of its own. weighted: for rows with importance. Its
    sources are those of the codec's module."""
    encoded = _encoded(name)
    if (other := _ONE_KERNEL.get(encoded.codec or "", encoded.name)) != encoded.name:
        shared = (each for each in TYPES.values() if each.codec == encoded.codec and each.name not in _SEARCHES)
        encoded = next(each for each in shared if each.name != other)
    source = Path(codecs.__path__[0], *(encoded.codec or "").split(".")).with_suffix(".py")
    compiles = "compile_weighted_codec" if weighted and encoded.codec in _BY_IMPORTANCE else "compile_plain_codec"
    return Unit(f"{__package__}.encode", compiles, encoded.name, source.relative_to(ROOT).as_posix())


def _encoded(name: str) -> TensorType:
    """The type that rows of a type are encoded as."""
    return TYPES[name] if TYPES[name].codec is not None else TYPES.plain(TYPES[name])


def compile_codecs_in_background(types: Iterable[tuple[TensorType, bool]], urgent: bool = True) -> int:
    """Has other processes compile the codecs of these types, for rows with importance or without, that were not compiled before
    -> how many processes.

    urgent: at once, with the priority of this process, which compiles the first one. `encode` waits for those that were begun.
    """
    encoded = [(each.name, weighted) for each, weighted in types if can_encode(each)]
    wanted = [codec_unit(name, weighted) for name, weighted in encoded]
    wanted += [_SEARCHES[plain] for name, _ in encoded if (plain := _encoded(name).name) in _SEARCHES]
    units = [unit for unit in dict.fromkeys(wanted) if not unit.is_marked]
    return compile_in_background(units, urgent) if units[urgent:] else 0
