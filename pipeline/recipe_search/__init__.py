"""Searching for a recipe: the target, measured errors and sensitivities, the recipe that comes of them."""
