"""Several files by one recipe: `[quantize] type = [...]` and tables `[[quantize]]` as recipes of one file each."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...formats.file_range import read_text
from ...recipes import find
from .rules import RecipeError
from .shell import rules_from_shell

Stages = dict[str, Any]  # the tables of a recipe
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
# Keys of [quantize] that say something about another table, or where rules are: `plain_tables` puts them there.
_MOVED = ("name", "imatrix", "repack", "recipe")
_TARGET_NAMES = (("target_size", "{}"), ("target_bpw", "{}bpw"), ("max_kld", "kld{}"))


@dataclass(frozen=True)
class RecipeVariant:
    """One file of a recipe. name: what its file name ends in, '' for the only one of a recipe; stages: its own tables."""

    name: str
    stages: Stages


def variants(stages: Stages, path: Path) -> list[RecipeVariant]:
    """The files that a recipe makes: one for each type of each [quantize] table, with one type at most in its tables.

    stages: the tables as read, of which only [quantize] is looked at. Raises RecipeError for files without a name of their own.
    """
    tables = stages.get("quantize")
    if not isinstance(tables, dict | list) or (isinstance(tables, list) and not all(isinstance(t, dict) for t in tables)):
        return [RecipeVariant("", stages)]  # without a name; the check of keys refuses what is no table
    if isinstance(tables, dict) and not isinstance(tables.get("type"), list) and "name" not in tables:
        return [RecipeVariant("", stages)]
    found: list[RecipeVariant] = []
    for number, table in enumerate(tables if isinstance(tables, list) else [tables], 1):
        given = table.get("type")
        kinds: list[Any] = given if isinstance(given, list) else [given]
        if not kinds or (len(kinds) > 1 and "name" in table):
            what = f"has one name for {len(kinds)} types" if kinds else "names no type"
            raise RecipeError(f"{path}: [quantize] table {number} {what}")
        for kind in kinds:
            one = {**table, "type": kind} if given is not None else table
            found.append(RecipeVariant(_name(one, number, path), {**stages, "quantize": one}))
    if not found:
        raise RecipeError(f"{path}: there is no table [[quantize]]")
    if any(_has_target(v) for v in found):  # the others are not searched for
        for variant in found:
            if not _has_target(variant):
                variant.stages.pop("search", None)
    twice = next((name for name, count in Counter(v.name.lower() for v in found).items() if count > 1), None)
    if twice is not None:
        raise RecipeError(f"{path}: two files would be called {twice}; give one of the tables [[quantize]] another name = ...")
    return found


def _has_target(variant: RecipeVariant) -> bool:
    return any(key in variant.stages["quantize"] for key, _ in _TARGET_NAMES)


def _name(table: Mapping[str, Any], number: int, path: Path) -> str:
    """That of the table, else its type, its target, or the file of its rules."""
    if "name" in table:
        name = str(table["name"])
    elif "type" in table:
        name = str(table["type"]).upper()
    elif any(key in table for key, _ in _TARGET_NAMES):
        name = next(form.format(table[key]) for key, form in _TARGET_NAMES if key in table)
    else:
        name = Path(str(table.get("recipe", ""))).stem
    if not _NAME.fullmatch(name):
        wrong = f"{name!r} cannot be part of a file's name" if name else "has nothing to call its file by"
        raise RecipeError(f"{path}: [quantize] table {number}: {wrong}; give name = ... of letters, digits, '.', '-' and '_'")
    return name


def plain_tables(stages: Stages, path: Path) -> Stages:
    """A file's tables, checked, with what [quantize] says about imatrix and repacking in tables of their own.

    Raises RecipeError for a file of rules that cannot be read.
    """
    table = stages.get("quantize", {})
    if not any(key in table for key in _MOVED):
        return stages
    plain = {**stages, "quantize": {key: value for key, value in table.items() if key not in _MOVED}}
    if table.get("imatrix") and "imatrix" not in stages:
        raise RecipeError(f"{path}: [quantize] imatrix = true needs a table [imatrix]")
    if table.get("imatrix") is False:
        plain.pop("imatrix", None)
    if table.get("repack") is False:
        plain.pop("repack", None)
    elif "repack" in table:
        plain["repack"] = {"pattern": table["repack"]} if isinstance(table["repack"], str) else stages.get("repack", {})
    if "recipe" in table:
        plain["quantize"]["rules"] = "\n".join([table.get("rules", ""), _rules_of(table["recipe"], path)]).strip()
    return plain


def _rules_of(name: str, path: Path) -> str:
    """The rules of a text file next to the recipe, or of a bundled one."""
    beside = path.parent / name
    file = beside if beside.exists() else find(name)
    if file.suffix == ".toml":
        raise RecipeError(f"{path}: [quantize] recipe = {name!r} has to be a text of rules, not a TOML recipe")
    try:
        return rules_from_shell(read_text(file, "utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: [quantize] recipe: {file}: {why}") from None


def toml_text(stages: Stages, names: Sequence[str] = ("convert", "quantize")) -> str:
    """These tables as TOML; by default those that decide a file's contents, recorded in it, so that other files' tables do not
    change it."""
    lines: list[str] = []
    for name in names:
        if stages.get(name):
            lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in stages[name].items()), ""]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, str) and "\n" in value and "'''" not in value:
        return f"'''\n{value.strip()}\n'''"
    return json.dumps(value, ensure_ascii=False)
