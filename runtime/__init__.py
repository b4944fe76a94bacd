"""Running models: graphs per architecture over any tensor source, tokenizer, perplexity, generation."""

from .decoder import Settings
from .generate import Generation, Timings, generate
from .model import GRAPHS, Model, Session, load_model
from .perplexity import Perplexity, perplexity
from .sampling import Sampler, Sampling
from .tokenizer import Tokenizer

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
