"""What the program that is to load a file decides beside its types."""

from __future__ import annotations

from pathlib import Path

from ...formats.loaders import loader_of
from ...quantize.recipes.recipe import Recipe


def program_of(recipe: Recipe, given: str | None = None) -> str | None:
    """That which is given, else the one that [quantize] of the recipe names; None: any."""
    return given if given is not None else recipe.stages.get("quantize", {}).get("for")


def layout_for(program: str | None, source: str | Path, given: str | None = None) -> str | None:
    """The layout of latent attention: what is given, else what the program reads. A GGUF has the one it has."""
    if given is not None or program is None or Path(str(source)).suffix == ".gguf":
        return given
    return loader_of(program).mla_layout
