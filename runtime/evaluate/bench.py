"""Measures the speed of a model: prompt processing, token generation, and both as a function of the context depth.

The tests are those of llama-bench and llama-sweep-bench: random tokens, an empty KV cache before each repetition, logits only
for the last token of a prompt, no sampling. Everything runs once before it is measured, so that compiling kernels and reading
weights from disk does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev

import numpy as np

from ...data_classes import dataclass
from ...formats import PlanError
from ..backends import Cache
from ..model import Model

SEED = 1234
WARM_UP_GENERATED_TOKENS = 2


@dataclass(frozen=True)
class Case:
    """A test: a prompt of n_prompt tokens, then n_gen generated ones; only_gen: the prompt is not measured."""

    n_prompt: int
    n_gen: int
    only_gen: bool = False

    @property
    def name(self) -> str:
        """The name in llama-bench: pp512, tg128, pp512+tg128, tg128@pp512."""
        prompt, generation = f"pp{self.n_prompt}", f"tg{self.n_gen}"
        if self.only_gen:
            return f"{generation}@{prompt}"
        return "+".join(name for name, n in ((prompt, self.n_prompt), (generation, self.n_gen)) if n)

    @property
    def n_measured(self) -> int:
        """Number of tokens whose time is measured."""
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
        return _stddev(self.samples)


class Runner:
    """Runs cases on a model with random tokens of a fixed seed."""

    def __init__(self, model: Model):
        self.model = model
        self._random = np.random.default_rng(SEED)
        self._n_tokens = min(model.n_vocab, model.n_embeddings)  # number of valid token ids

    def prompt(self, cache: Cache, n: int) -> None:
        """Runs n tokens in one pass and computes the logits of the last. Short prompts are read as `generate` does it."""
        self._run(cache, self._tokens(n), cache.length == 0 and n <= self.model.short_prompt)

    def generate(self, cache: Cache, n: int) -> None:
        """Runs n tokens one by one and computes the logits of each."""
        tokens = self._tokens(n)
        for i in range(n):
            self._run(cache, tokens[i : i + 1], True)

    def _tokens(self, n: int) -> np.ndarray:
        return self._random.integers(0, self._n_tokens, n)

    def _run(self, cache: Cache, tokens: np.ndarray, generated: bool = False) -> None:
        self.model.head(self.model.hidden([(cache, tokens)], [1], generated=generated)[0])

    def seconds(self, case: Case) -> float:
        """Runs one repetition of a case. Returns the measured seconds."""
        cache = self.model.new_cache(case.n_prompt + case.n_gen)
        start = time.perf_counter()
        if case.n_prompt:
            self.prompt(cache, case.n_prompt)
        if case.only_gen:
            start = time.perf_counter()
        self.generate(cache, case.n_gen)
        return time.perf_counter() - start

    def warm_up(self, case: Case) -> None:
        """Runs the whole prompt, as long prompts use other kernels than short ones, and a few generated tokens."""
        self.seconds(Case(case.n_prompt, min(case.n_gen, WARM_UP_GENERATED_TOKENS)))


def bench(
    model: Model,
    cases: Sequence[Case],
    repetitions: int = 5,
    warm_up: bool = True,
    on_speed: Callable[[Speed], None] | None = None,
) -> list[Speed]:
    """Measures each case, after a warm-up. on_speed: called with each result. Raises PlanError for a case without tokens."""
    for case in cases:
        if case.n_measured < 1 or min(case.n_prompt, case.n_gen) < 0:
            raise PlanError(f"a test of {case.n_prompt} prompt tokens and {case.n_gen} generated ones measures nothing")
    runner, speeds = Runner(model), []
    for case in cases:
        if warm_up:
            runner.warm_up(case)
        speeds.append(Speed(case, [case.n_measured / runner.seconds(case) for _ in range(repetitions)]))
        if on_speed is not None:
            on_speed(speeds[-1])
    return speeds


@dataclass(frozen=True)
class Depth:
    """Speeds with n_kv tokens in the KV cache; the fields are the columns of llama-sweep-bench.

    t_pp: seconds for a prompt of pp tokens; t_tg: seconds for tg generated tokens; s_pp, s_tg: tokens per second; all means of
    the repetitions. stddev_pp, stddev_tg: standard deviations of the speeds between them; 0 of a single one.
    """

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float
    stddev_pp: float = 0.0
    stddev_tg: float = 0.0

    @property
    def s_pp(self) -> float:
        return self.pp / self.t_pp

    @property
    def s_tg(self) -> float:
        return self.tg / self.t_tg


def sweep(
    model: Model, n_ctx: int, pp: int = 512, tg: int | None = None, warm_up: bool = True, repetitions: int = 1
) -> Iterator[Depth]:
    """Fills a context of n_ctx tokens in steps of pp tokens and measures both speeds at each depth.

    At each depth tg tokens are generated and removed from the cache again, then a prompt of pp tokens is run, which stays;
    both that many times. tg: pp / 4 if None. Raises PlanError when not one step fits.
    """
    tg = max(1, pp // 4) if tg is None else tg
    if pp < 1 or tg < 1 or n_ctx < max(pp, tg):
        raise PlanError(f"a context of {n_ctx} tokens has no room for a prompt of {pp} and {tg} generated tokens")
    runner = Runner(model)
    if warm_up:
        runner.warm_up(Case(pp, tg))
    cache = model.new_cache(n_ctx)
    for depth in range(0, n_ctx - max(pp, tg) + 1, pp):
        prompts: list[float] = []
        generations: list[float] = []
        for _ in range(repetitions):
            if prompts:
                cache.truncate(depth)
            cache.checkpoint()
            start = time.perf_counter()
            runner.generate(cache, tg)
            generations.append(time.perf_counter() - start)
            cache.truncate(depth)
            start = time.perf_counter()
            runner.prompt(cache, pp)
            prompts.append(time.perf_counter() - start)
        spread = (_stddev([n / t for t in times]) for n, times in ((pp, prompts), (tg, generations)))
        yield Depth(pp, tg, depth, mean(prompts), mean(generations), *spread)


def _stddev(values: Sequence[float]) -> float:
    """0 of a single value."""
    return stdev(values) if len(values) > 1 else 0.0
