"""Speed of a model: prompts read at once, tokens generated one by one, and both over the depth of the context.

The tests are those of llama-bench and llama-sweep-bench: random tokens, an empty cache before each repetition, the head
computed for the last token of a prompt only, no sampling. Everything runs once before it is measured: kernels are compiled and
weights brought into memory outside of the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

from ...formats import PlanError
from ..backends import Cache
from ..model import Model

SEED = 1234
GENERATION_WARM_UP = 2  # tokens


@dataclass(frozen=True)
class Case:
    """A test: a prompt of n_prompt tokens, then n_gen generated ones; only_gen: the prompt's time does not count."""

    n_prompt: int
    n_gen: int
    only_gen: bool = False

    @property
    def name(self) -> str:
        """As llama-bench names it: pp512, tg128, pp512+tg128, tg128@pp512."""
        prompt, generation = f"pp{self.n_prompt}", f"tg{self.n_gen}"
        if self.only_gen:
            return f"{generation}@{prompt}"
        return "+".join(name for name, n in ((prompt, self.n_prompt), (generation, self.n_gen)) if n)

    @property
    def counted(self) -> int:
        """Tokens that count."""
        return self.n_gen if self.only_gen else self.n_prompt + self.n_gen


@dataclass(frozen=True)
class Speed:
    """Tokens per second of each repetition of a case."""

    case: Case
    samples: list[float]

    @property
    def mean(self) -> float:
        return mean(self.samples)

    @property
    def stddev(self) -> float:
        """0 for a single repetition."""
        return stdev(self.samples) if len(self.samples) > 1 else 0.0


class Runner:
    """Runs cases on a model, its tokens drawn anew but always the same."""

    def __init__(self, model: Model):
        self.model = model
        self._random = np.random.default_rng(SEED)
        self._top = min(model.n_vocab, model.n_embeddings)

    def prompt(self, cache: Cache, n: int) -> None:
        """Reads n tokens and computes the logits after the last."""
        self._read(cache, self._tokens(n))

    def generate(self, cache: Cache, n: int) -> None:
        """n tokens one by one, with the logits after each."""
        tokens = self._tokens(n)
        for i in range(n):
            self._read(cache, tokens[i : i + 1])

    def _tokens(self, n: int) -> np.ndarray:
        return self._random.integers(0, self._top, n)

    def _read(self, cache: Cache, tokens: np.ndarray) -> None:
        self.model.head(self.model.hidden([(cache, tokens)])[0][-1:])

    def seconds(self, case: Case) -> float:
        """One repetition."""
        cache = self.model.new_cache(case.n_prompt + case.n_gen)
        began = time.perf_counter()
        if case.n_prompt:
            self.prompt(cache, case.n_prompt)
        if case.only_gen:
            began = time.perf_counter()
        self.generate(cache, case.n_gen)
        return time.perf_counter() - began

    def warm_up(self, case: Case) -> None:
        """The whole prompt, since other kernels read long ones than short ones, and a few generated tokens."""
        self.seconds(Case(case.n_prompt, min(case.n_gen, GENERATION_WARM_UP)))


def bench(
    model: Model,
    cases: Sequence[Case],
    repetitions: int = 5,
    warm_up: bool = True,
    on_speed: Callable[[Speed], None] | None = None,
) -> list[Speed]:
    """Measures each case after a warm-up. Raises PlanError for one without tokens."""
    for case in cases:
        if case.counted < 1 or min(case.n_prompt, case.n_gen) < 0:
            raise PlanError(f"a test of {case.n_prompt} prompt tokens and {case.n_gen} generated ones measures nothing")
    runner, speeds = Runner(model), []
    for case in cases:
        if warm_up:
            runner.warm_up(case)
        speeds.append(Speed(case, [case.counted / runner.seconds(case) for _ in range(repetitions)]))
        if on_speed is not None:
            on_speed(speeds[-1])
    return speeds


@dataclass(frozen=True)
class Depth:
    """Speeds with n_kv tokens in the cache: seconds for a prompt of pp tokens, and for tg generated ones."""

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float

    @property
    def s_pp(self) -> float:
        return self.pp / self.t_pp

    @property
    def s_tg(self) -> float:
        return self.tg / self.t_tg


def sweep(model: Model, n_ctx: int, pp: int = 512, tg: int | None = None, warm_up: bool = True) -> Iterator[Depth]:
    """Walks through a context of n_ctx tokens in steps of pp: at each depth tg tokens are generated and taken back, then pp are
    read and stay.

    tg: pp / 4 if None. Raises PlanError when not one step fits.
    """
    tg = max(1, pp // 4) if tg is None else tg
    if pp < 1 or tg < 1 or n_ctx < max(pp, tg):
        raise PlanError(f"a context of {n_ctx} tokens has no room for a prompt of {pp} and {tg} generated tokens")
    runner = Runner(model)
    if warm_up:
        runner.warm_up(Case(pp, tg))
    cache = model.new_cache(n_ctx)
    for depth in range(0, n_ctx - max(pp, tg) + 1, pp):
        began = time.perf_counter()
        runner.generate(cache, tg)
        t_tg = time.perf_counter() - began
        cache.truncate(depth)
        began = time.perf_counter()
        runner.prompt(cache, pp)
        yield Depth(pp, tg, depth, time.perf_counter() - began, t_tg)
