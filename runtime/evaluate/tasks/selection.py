"""Which tasks llama-perplexity takes when it takes some of them at random: the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from .files import ChoiceTask

T = TypeVar("T")
_SEED, _RANGE = 1, 1 << 32


def choose_tasks(kind: str, tasks: Sequence[ChoiceTask], count: int | None) -> list[ChoiceTask]:
    """count: how many; None or more than there are: all of them."""
    if count is None or count >= len(tasks):
        return list(tasks)
    return (_select_evenly if kind == "hellaswag" else _select_scaled)(tasks, count)


def _select_evenly(tasks: Sequence[T], count: int) -> list[T]:
    """Draws as libstdc++'s uniform_int_distribution does (since GCC 11, after Lemire 2019), out of the tasks that are left."""
    left, numbers, chosen = list(tasks), _random_numbers(), []
    for _ in range(count):
        product = next(numbers) * len(left)
        while product % _RANGE < _RANGE % len(left):
            product = next(numbers) * len(left)
        chosen.append(left.pop(product // _RANGE))
    return chosen


def _select_scaled(tasks: Sequence[T], count: int) -> list[T]:
    """Draws with single-precision products; the last one that is left takes the place of the one that is drawn."""
    left, numbers, chosen = list(tasks), _random_numbers(), []
    for _ in range(count):
        scaled = np.float32(1 / _RANGE) * np.float32(next(numbers)) * np.float32(len(left))
        at = min(int(scaled), len(left) - 1)
        chosen.append(left[at])
        left[at] = left[-1]
        left.pop()
    return chosen


def _random_numbers() -> Iterator[int]:
    """Those of std::mt19937 with seed 1."""
    random = np.random.RandomState(_SEED)
    while True:
        yield int(random.randint(0, _RANGE, dtype=np.uint32))
