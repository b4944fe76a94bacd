"""What a search is asked for: the target, and how to look for it, from a command line or a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..formats import PlanError, TensorType
from ..jobs.plan import parse_size
from ..quantize.recipes.recipe import TARGETS, Recipe
from ..quantize.recipes.rules import parse_type
from ..quantize.search.quant_error import DEFAULT_TYPES


@dataclass(frozen=True)
class Target:
    """What to reach, one of: bytes of the file, bits per weight of its tensors, divergence in nats.

    gpu: tensors with a budget of their own, of gpu_bytes.
    """

    size: int | None = None
    bits: float | None = None
    divergence: float | None = None
    gpu: re.Pattern[str] | None = None
    gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.size, self.bits, self.divergence) if value is not None]
        if len(given) != 1:
            raise PlanError("a search needs one target: --target-size, --target-bpw or --max-kld")
        if not given[0] > 0:
            raise PlanError(f"a target of {given[0]} cannot be reached: it has to be above 0")
        if self.gpu_bytes is not None and (self.gpu is None or self.divergence is not None):
            raise PlanError("--gpu-size needs --gpu REGEX beside it, and --target-size or --target-bpw")

    @property
    def text(self) -> str:
        if self.size is not None:
            return f"{self.size:,} bytes"
        return f"{self.bits:g} bits per weight" if self.bits is not None else f"a KL divergence of {self.divergence:g}"


@dataclass(frozen=True)
class Wishes:
    """How to search. text: what sensitivity is measured on; None: every tensor's relative error counts alike.

    rows, seed    of the sample that errors are worked out on
    measurements  about the most groups of tensors whose sensitivity is measured one by one
    refine        rounds of measuring once more around what was found
    """

    types: tuple[TensorType, ...]
    repacked: bool = False
    text: Path | None = None
    n_ctx: int = 512
    chunks: int = 8
    rows: int = 64
    seed: int = 0
    measurements: int = 128
    refine: int = 0
    threads: int | None = None


def parse_types(text: str | None, where: str = "--types") -> tuple[TensorType, ...]:
    """'iq2_k,iq3_k,default': names of types, `default` for the usual set, which None stands for too. Raises RecipeError."""
    names = [part.strip() for part in (text or "default").split(",") if part.strip()]
    found: dict[str, TensorType] = {}
    for name in names:
        for one in DEFAULT_TYPES if name.lower() == "default" else [name]:
            kind = parse_type(one, where)
            found[kind.name] = kind
    return tuple(found.values())


def recipe_target(
    recipe: Recipe, size: int | None = None, bits: float | None = None, divergence: float | None = None
) -> Target | None:
    """What the command line asks for, else what the recipe does under [quantize]; None if neither does."""
    said, search = recipe.stages.get("quantize", {}), recipe.stages.get("search", {})
    if size is None and bits is None and divergence is None:
        if not set(TARGETS) & set(said):
            return None
        size, bits, divergence = _bytes(said.get("target_size")), said.get("target_bpw"), said.get("max_kld")
    gpu = search.get("gpu")
    return Target(size, bits, divergence, re.compile(gpu) if gpu else None, _bytes(search.get("gpu_size")))


def _bytes(size: str | int | None) -> int | None:
    return parse_size(size) if isinstance(size, str) else size


# Keys of [search] that are fields of Wishes by another name, or by the same.
_FIELDS = {"ctx": "n_ctx", **{name: name for name in ("repacked", "chunks", "rows", "seed", "measurements", "refine")}}


def recipe_wishes(
    recipe: Recipe, folder: Path, *, types: str | None = None, text: Path | None = None, threads: int | None = None
) -> Wishes:
    """What the recipe says under [search], its text counting from `folder`; types and text beat it. Raises RecipeError for
    types that there are not, and PlanError for a text that is not there."""
    said = recipe.stages.get("search", {})
    allowed = parse_types(said.get("types"), f"{recipe.name}, [search] types") if types is None else parse_types(types)
    values: dict[str, Any] = {_FIELDS[key]: value for key, value in said.items() if key in _FIELDS}
    if text is None and "text" in said:
        named: Path = folder / said["text"]
        if not named.is_file():
            raise PlanError(f"{recipe.name}, [search] text: {named} {'is no file' if named.exists() else 'does not exist'}")
        text = named
    return Wishes(allowed, text=text, threads=threads, **values)
