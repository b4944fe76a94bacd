"""What ops are made of: values, weights, rotary embeddings; and what a layer keeps of a sequence."""

from __future__ import annotations

import numpy as np

from ...data_classes import dataclass
from ...formats.source import LORA_A, LORA_B


@dataclass(frozen=True)
class Value:
    """What an op computes for each token: float32 of this shape. index: unique within its graph."""

    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RoutingValue(Value):
    """The experts of each token: int64 [used] numbers (-1: none) and float32 [used] weights; shape is (used,)."""


@dataclass(frozen=True)
class Weight:
    """A tensor of the model by name; shape in ne order, as GGUF has it: (columns, rows, matrices)."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_of_adapter(self) -> bool:
        """Whether it is a factor of an adapter (see `runtime.adapters`), not of the model itself."""
        return self.name.endswith((LORA_A, LORA_B))


@dataclass(frozen=True, eq=False)
class RotaryEmbedding:
    """Angles of a rotary position embedding (RoFormer, arXiv:2104.09864).

    frequencies  float64 [pairs], radians per position
    magnitude    factor of the rotated elements (YaRN, arXiv:2309.00071)
    interleaved  pairs are (0, 1), (2, 3), ... (ggml's NORM); else (0, d/2), (1, d/2 + 1), ... (NEOX)
    offset       added to positions
    """

    frequencies: np.ndarray
    magnitude: float = 1.0
    interleaved: bool = False
    offset: int = 0

    @property
    def dims(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class Temperature:
    """A factor that grows with the position, 1 + scale * ln(1 + floor((position + offset) / length)): attention temperature
    tuning of Llama 4 and Ministral 3 (Scalable-Softmax, arXiv:2501.19399)."""

    scale: float
    length: int
    offset: int = 0

    def factors(self, positions: np.ndarray) -> np.ndarray:
        """int [n] -> float32 [n]."""
        return (1 + self.scale * np.log1p((positions + self.offset) // self.length)).astype(np.float32)


@dataclass(frozen=True)
class NgramHash:
    """Which rows of a table stand for the n-grams that end at a token (per-layer embeddings of Qwen 4 Exp).

    multipliers    one for the token, one for that before it, and so on: the n-grams are of 2 ... len(multipliers) tokens
    sizes, offsets  of the part of the table that each head has; as many heads for each n, those of the shortest n-grams first
    end            the token that ends a text: what is before it counts as if it were it, as what is before the sequence does
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    @property
    def n_past(self) -> int:
        """Tokens before a token that count."""
        return len(self.multipliers) - 1

    def rows(self, history: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Numbers of rows, int64 [n, heads], of tokens int [n]. history: the n_past tokens before them plus 1, 0: there is
        none."""
        past = history.reshape(-1).astype(np.int64)
        ids = np.concatenate([np.where(past > 0, past - 1, self.end), np.asarray(tokens, np.int64)])
        mixed, ended = ids[self.n_past :] * self.multipliers[0], np.zeros(len(tokens), bool)
        per_length, parts = len(self.sizes) // self.n_past, []
        for distance in range(1, self.n_past + 1):
            before = ids[self.n_past - distance : len(ids) - distance]
            ended |= before == self.end
            mixed = mixed ^ np.where(ended, self.end, before) * self.multipliers[distance]
            heads = slice((distance - 1) * per_length, distance * per_length)
            parts.append(mixed[:, None] % np.array(self.sizes[heads]) + np.array(self.offsets[heads]))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class CacheSpec:
    """What a layer keeps per token: `heads` rows of `width` numbers. name: 'k', 'v', 'latent', 'index_k' or 'entries'.

    every  tokens that share their rows: those of the last one of each run of so many are kept
    """

    layer: int
    name: str
    heads: int
    width: int
    every: int = 1


@dataclass(frozen=True)
class StateSpec:
    """What a layer keeps per sequence, whatever its length: numbers of this shape. name: 'convolution', 'delta', 'scan', ..."""

    layer: int
    name: str
    shape: tuple[int, ...]


def alibi_slopes(heads: int, largest: float) -> np.ndarray:
    """float32 [heads]: 2 ** (-largest * i / n) for i = 1 ... n, where n is the power of two that is at most `heads`; further
    heads have those of 2 n at odd i (arXiv:2108.12409, section 3, and its code for numbers that are no power of two)."""
    n = 1 << (heads.bit_length() - 1)
    first, more = np.arange(1, n + 1) / n, np.arange(1, 2 * (heads - n), 2) / (2 * n)
    return (2.0 ** (-largest * np.concatenate([first, more]))).astype(np.float32)


def segments(tokens: np.ndarray, positions: np.ndarray, separator: int) -> np.ndarray:
    """The segments of a pass's tokens, int64 [n]: 1 behind the first separator of their sequence, else 0.

    positions: int [n], of each token in its sequence; separator: a token id, -1: none.
    """
    found = tokens == separator
    before = np.cumsum(found) - found  # separators in the pass before each token
    starts = np.maximum.accumulate(np.where(positions == 0, np.arange(len(tokens)), 0))
    return (before > before[starts]).astype(np.int64)
