"""What a recipe says where a request does not: arguments, recipe and defaults become one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ...data_classes import dataclass
from ...errors import PlanError
from ...quantize.recipes.recipe import Recipe, load_recipe
from ...quantize.recipes.rules import Rule, parse_rules
from ...recipes import find, find_text
from ...request_fields import Field, fields_of

Q = TypeVar("Q")


@dataclass(frozen=True)
class GivenRecipe:
    """A recipe (an empty one if there is none) with the path it was read from, and the rules that come before its own.

    text: of all together, with the recipe's other tables; rules_text: of the rules alone.
    """

    path: Path | None
    recipe: Recipe
    custom: Sequence[Rule] = ()
    text: str = ""
    rules_text: str = ""

    @property
    def folder(self) -> Path:
        """What paths in the recipe are relative to."""
        return self.path.parent if self.path is not None else Path()


def given_recipe(recipe: str | Path | None, custom_q: str | Sequence[str] = ()) -> GivenRecipe:
    """The recipe of this path or name, after rules. Raises RecipeError for what cannot be read."""
    path = find(recipe) if recipe is not None else None
    loaded = load_recipe(path) if path is not None else Recipe("", [], "")
    texts = [custom_q] if isinstance(custom_q, str) else list(custom_q)
    custom = parse_rules("\n".join(texts), "--custom-q")
    text = "\n".join([*texts, loaded.text]).strip() if texts and path is not None else "\n".join(texts) or loaded.text
    return GivenRecipe(path, loaded, custom, text, "\n".join([*texts, loaded.rules_text]))


def merged(request: Q, given: GivenRecipe) -> Q:
    """The request with what a recipe says in the fields that have their defaults.

    Raises PlanError for a file that the recipe names and that does not exist.
    """
    fields = fields_of(type(request))
    asked = {field.name for field in fields if getattr(request, field.name) != field.default}
    decided = {field.option.one_of for field in fields if field.name in asked} - {""}
    found: dict[str, Any] = {}
    for field in fields:
        if field.name not in asked and field.option.one_of not in decided and (value := said(given, field)) is not None:
            found[field.name] = value
    return replace(request, **found)  # type: ignore[type-var]


def said(given: GivenRecipe, field: Field) -> Any:
    """What a recipe says of a field: paths are relative to the recipe's folder. None: nothing."""
    stage, _, key = field.option.key.partition(".")
    value = given.recipe.stages.get(stage, {}).get(key)
    if value is None:
        return None
    if field.option.travel == "adapters":
        return tuple(str(given.folder / name) for name in ([value] if isinstance(value, str) else value))
    where = f"{given.recipe.name}, [{stage}] {key}"
    if field.option.kind == "weighted_texts":
        return tuple(_weighted_text(name, given.folder, where) for name in ([value] if isinstance(value, str) else value))
    if field.option.kind in ("file", "text", "calibration_text"):
        is_text = field.option.kind == "calibration_text"
        return _existing(find_text(value, given.folder) if is_text else given.folder / value, where)
    if field.option.kind == "out_file":  # true: the folder of results has it
        return given.folder / value if isinstance(value, str) else value or None
    return value


def _weighted_text(name: str, folder: Path, where: str) -> str:
    """PATH or PATH:WEIGHT of a recipe, with the path to the file."""
    path, _, weight = name.rpartition(":")
    is_weighted = bool(path) and weight.isdecimal() and int(weight) > 0 and not (folder / name).exists()
    found = _existing(find_text(path if is_weighted else name, folder), where)
    return f"{found}:{weight}" if is_weighted else str(found)


def _existing(path: Path, where: str) -> Path:
    if not path.is_file():
        problem = "is a folder; give a file" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise PlanError(f"{where}: {path} {problem}")
    return path
