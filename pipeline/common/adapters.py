"""The LoRA adapters that a recipe names."""

from __future__ import annotations

from pathlib import Path

from ...quantize.recipes.recipe import Recipe


def adapters_of_recipe(recipe: Recipe, folder: Path) -> tuple[str, ...]:
    """[convert] lora, FILE or FILE=SCALE each, with paths relative to `folder`, the recipe's own."""
    names = recipe.stages.get("convert", {}).get("lora", [])
    return tuple(str(folder / name) for name in ([names] if isinstance(names, str) else names))
