"""The repack stage of a run, before there is anything to repack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import PlanError
from ...formats import TYPES, TensorType
from ...jobs.patterns import compile_pattern
from ...quantize.recipes.loader_types import LoaderTypes
from ...quantize.recipes.recipe import Recipe


def check_repack(recipe: Recipe, types: Mapping[str, Sequence[TensorType]], program: str | None = None) -> None:
    """Raises PlanError when no tensor, as one of the types that it may get, could be repacked, or when the program that is to
    load the file does not know interleaved types. types: by tensor name."""
    where, pattern = f"{recipe.name}, [repack]", recipe.stages["repack"].get("pattern", "")
    search = compile_pattern(pattern, f"{where} pattern").search
    if program is not None and not LoaderTypes(program).reads(TYPES["q8_0_r8"]):
        raise PlanError(f"{where} makes types with interleaved rows, which {program} does not know")
    if not any(search(name) and any(type.packed is not None for type in several) for name, several in types.items()):
        raise PlanError(f"{where}: no tensor of a type with an interleaved form has {pattern!r} in its name")
