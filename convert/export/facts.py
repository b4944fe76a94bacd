"""What a GGUF says about its model: hyperparameters, tensors, kinds of layers, as candidates for keys of a config.json."""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import TensorSource

_OTHERS = ("general.", "tokenizer.", "split.", "quantize.", "ggufmill.")  # keys that say nothing about the model's shape
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


class Facts:
    """The metadata without general.* and tokenizer.*, and the tensors of a GGUF.

    folder        where the files beside config.json are that the conversion reads
    architecture  general.architecture
    n_draft       draft layers after the others
    n_layers      the others
    """

    def __init__(self, source: TensorSource, folder: Path):
        self.folder = folder
        self.source, self.architecture = source, source.architecture
        self.metadata = {key: value for key, value in source.metadata.items() if not key.startswith(_OTHERS)}
        self.n_draft = int(self.key("nextn_predict_layers") or 0)
        self.n_layers = int(self.key("block_count") or 0) - self.n_draft

    def key(self, suffix: str) -> Any:
        """The value of a key without the architecture, as JSON has it; numbers in float32 as the shortest text that gives them
        again; None where there is none."""
        return plain(self.metadata.get(f"{self.architecture}.{suffix}"))

    def numbers(self, suffix: str) -> list[Any]:
        """Candidates for a number that the key says: of a list with a value for each layer those of the layers that have any,
        the most frequent one first, and the list."""
        value = self.key(suffix)
        if not isinstance(value, list):
            return [] if value is None else [value]
        of_layers = value[: self.n_layers]
        found = sorted({v for v in of_layers if v}, key=lambda v: (-of_layers.count(v), v))
        return [*found, of_layers] if found else [of_layers]

    @cached_property
    def layers(self) -> list[set[str]]:
        """For each layer the names of its tensors, without blk.N."""
        layers: list[set[str]] = [set() for _ in range(self.n_layers + self.n_draft)]
        for name in self.source.tensors:
            match = _BLOCK.fullmatch(name)
            if match and int(match[1]) < len(layers):
                layers[int(match[1])].add(match[2])
        return layers

    def has(self, layer: int, *names: str) -> bool:
        """Whether a layer has a tensor whose name begins with one of these."""
        return any(name.startswith(names) for name in self.layers[layer])

    def rows(self, name: str) -> int | None:
        """Rows of a matrix, elements of a vector; None without such a tensor."""
        tensor = self.source.tensors.get(name)
        return None if tensor is None else tensor.shape[min(1, len(tensor.shape) - 1)]

    def values(self, name: str) -> np.ndarray | None:
        """float32 [elements] of a small tensor; None without it."""
        tensor = self.source.tensors.get(name)
        return None if tensor is None else tensor.read(0, tensor.n_rows).reshape(-1)

    @property
    def head_dim(self) -> int:
        """Elements of a head's keys; 0 where the file does not say it."""
        heads = next(iter(self.numbers("attention.head_count")), 0)
        size = self.key("embedding_length") or 0
        return int(self.key("attention.key_length") or (size // heads if heads else 0))


def plain(value: Any) -> Any:
    """A value of the metadata as JSON has it."""
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value]
    if isinstance(value, np.floating) and value.dtype == np.float32:
        return shortest(value)
    return value.item() if isinstance(value, np.generic) else value


def shortest(value: float | np.floating) -> float:
    """The float with the fewest decimals that is this float32."""
    return float(str(np.float32(value)))


def part_of(count: int, whole: int) -> float:
    """The fraction of which readers make `count` again when they multiply it by the whole and round down."""
    fraction = count / whole
    return fraction if int(fraction * whole) == count else math.nextafter(fraction, 1.0)
