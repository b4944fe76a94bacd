"""The repack stage of a run, before there is anything to repack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import PlanError
from ...formats import TensorType
from ...jobs.patterns import NamePattern, PatternError
from ...quantize.recipes.recipe import Recipe


def check_repack(recipe: Recipe, types: Mapping[str, Sequence[TensorType]]) -> None:
    """Raises PlanError when no tensor, as one of the types that it may get, could be repacked. types: by tensor name."""
    where, pattern = f"{recipe.name}, [repack]", recipe.stages["repack"].get("pattern", "")
    try:
        search = NamePattern(pattern).search
    except PatternError as error:
        raise PlanError(f"{where} pattern: {pattern!r} is no regular expression: {error}") from None
    if not any(search(name) and any(type.packed is not None for type in several) for name, several in types.items()):
        raise PlanError(f"{where}: no tensor of a type with an interleaved form has {pattern!r} in its name")
