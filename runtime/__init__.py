"""Running models: graphs per architecture over any tensor source, tokenizer, perplexity, generation."""

from .evaluate.perplexity import Perplexity, perplexity
from .generation.generate import Generation, Timings, generate
from .generation.sampling import Sampler, Sampling
from .model import Model, Session, load_model
from .models import ARCHITECTURES
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
