"""Running models: graphs per architecture over any tensor source, tokenizer, perplexity, generation."""

from .backends.cpu.decoder import Settings
from .evaluate.perplexity import Perplexity, perplexity
from .generation.generate import Generation, Timings, generate
from .generation.sampling import Sampler, Sampling
from .model import GRAPHS, Model, Session, load_model
from .text.tokenizer import Tokenizer

__all__ = [
    "GRAPHS",
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
