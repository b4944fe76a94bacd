"""Running models: graphs per architecture over any tensor source, tokenizer, perplexity, generation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .evaluate.perplexity import Perplexity, perplexity
    from .generation.generate import Generation, Timings, generate
    from .generation.sampling import Sampler
    from .generation.sampling_options import Sampling
    from .loading import load_model
    from .model import Model, Session
    from .models.architectures import ARCHITECTURES
    from .settings import Settings
    from .text.tokenizer import Tokenizer

__all__ = [
    "ARCHITECTURES",
    "Generation",
    "Model",
    "Perplexity",
    "Sampler",
    "Sampling",
    "Session",
    "Settings",
    "Timings",
    "Tokenizer",
    "generate",
    "load_model",
    "perplexity",
]

_MODULES = {
    "evaluate.perplexity": ("Perplexity", "perplexity"),
    "generation.generate": ("Generation", "Timings", "generate"),
    "generation.sampling": ("Sampler",),
    "generation.sampling_options": ("Sampling",),
    "loading": ("load_model",),
    "model": ("Model", "Session"),
    "models.architectures": ("ARCHITECTURES",),
    "settings": ("Settings",),
    "text.tokenizer": ("Tokenizer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports what is first asked for: memory planning needs no kernels."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value
