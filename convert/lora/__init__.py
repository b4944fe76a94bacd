"""LoRA adapters (arXiv:2106.09685): read from a folder of peft or a GGUF, converted to GGUF, merged into a model's weights."""

from .adapter import Adapter, AdapterFile, parse_adapter
from .load import load_adapters
from .low_rank import LowRank
from .merge import merge_adapters

__all__ = ["Adapter", "AdapterFile", "LowRank", "load_adapters", "merge_adapters", "parse_adapter"]
