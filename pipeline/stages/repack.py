"""The repack stage of a run, before there is anything to repack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import PlanError
from ...formats import TYPES, TensorType
from ...jobs.patterns import NamePattern
from ...quantize.recipes.loader_types import LoaderTypes
from ..requests.rewriting import RepackRequest, repack_patterns


def check_repack(
    where: str, request: RepackRequest, types: Mapping[str, Sequence[TensorType]], program: str | None = None
) -> None:
    """Raises PlanError when no tensor, as one of the types that it may get, could be repacked, or when the program that is to
    load the file does not know interleaved types. types: by tensor name."""
    [pattern] = repack_patterns(request, f"{where} pattern") or [""]  # a recipe has one at most
    search = NamePattern(pattern).search
    if program is not None and not LoaderTypes(program).reads(TYPES["q8_0_r8"]):
        raise PlanError(f"{where} makes types with interleaved rows, which {program} does not know")
    if not any(search(name) and any(type.packed is not None for type in several) for name, several in types.items()):
        raise PlanError(f"{where}: no tensor of a type with an interleaved form has {pattern!r} in its name")
