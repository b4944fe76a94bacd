"""Which rule gave the tensors of a file their types, as far as its metadata tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...convert import open_source
from ...errors import MillError
from ...formats import TensorType
from ...formats.gguf import GGUFFile
from ...quantize.recipes.mixes import file_type_id, file_types
from ...quantize.recipes.recipe import parse_recipe
from ...quantize.recipes.rules import Rule
from ...quantize.recipes.type_selection import UNCHANGED, Selection, TypeOverrides, TypeSelector

_MOST = 100_000  # tensors that are gone through: no model has more
_PROVENANCE = ("quantize.imatrix.file", "quantize.covariance.file")  # where importance was given


def type_rules(opened: GGUFFile) -> dict[str, Selection]:
    """Name -> what the file's recipe (`ggufmill.recipe`), or the stock mix that general.file_type names, gives a tensor, of the
    tensors that have this type. Others got theirs by an option, or from a program that follows other rules."""
    found: dict[str, Selection] = {}
    kept: dict[str, Selection] = {}  # if nothing else has decided
    if len(opened.tensors) > _MOST:
        return found
    has_importance = any(key in opened.metadata for key in _PROVENANCE)
    try:
        source = open_source(opened.paths[0])
        for default, rules in _guesses(opened.metadata):
            selector = TypeSelector(source, default, rules, TypeOverrides(), has_importance)
            for name, tensor in source.tensors.items():
                selection = selector.select(tensor)
                if selection.type is opened.tensors[name].type:
                    (kept if selection.rule == UNCHANGED else found).setdefault(name, selection)
    except MillError:  # a file that no program has made so: nothing more can be said
        pass
    return kept | found


def _guesses(metadata: Mapping[str, Any]) -> Iterator[tuple[TensorType | str | None, Sequence[Rule]]]:
    """(default type or file type, rules) that may have decided the types of a file, the likeliest first."""
    text, number = metadata.get("ggufmill.recipe"), metadata.get("general.file_type")
    rules: Sequence[Rule] = ()
    if isinstance(text, str) and text:
        recipe = parse_recipe(text, Path("recipe"), is_toml=re.search(r"^\s*\[\w+\]\s*$", text, re.M) is not None)
        rules = recipe.rules
        yield recipe.type, rules
    if isinstance(number, int | np.integer):
        for name in file_types():
            if file_type_id(name) == int(number):
                yield name, rules
