import math

import numpy as np
import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.bench import Case, Runner, Speed, bench, sweep


class Counting:
    """A model that records its passes: (tokens, tokens in the cache before, rows of which logits are computed)."""

    def __init__(self, model):
        self.model, self.passes, self.generated = model, [], []
        self.short_prompt = model.short_prompt
        self.n_embeddings, self.n_vocab, self.new_cache = model.n_embeddings, model.n_vocab, model.new_cache

    def hidden(self, batch, last, generated=False):
        ((cache, tokens),) = batch
        assert np.asarray(tokens).max() < self.n_vocab
        self.passes.append([len(tokens), cache.length, 0])
        self.generated.append(generated)
        return self.model.hidden(batch, last)

    def head(self, hidden):
        self.passes[-1][2] += len(hidden)
        return self.model.head(hidden)


@pytest.fixture
def counting(tiny):
    return Counting(load_model(tiny, threads=1))


def test_names_are_those_of_llama_bench():
    assert [t.name for t in (Case(512, 0), Case(0, 128), Case(512, 128), Case(512, 64, only_gen=True))] == [
        "pp512",
        "tg128",
        "pp512+tg128",
        "tg64@pp512",
    ]


def test_passes_of_a_benchmark(counting):
    speeds = bench(counting, [Case(8, 0), Case(0, 3), Case(8, 2, only_gen=True)], repetitions=1)
    prompt, generated = [8, 0, 1], [[1, i, 1] for i in range(3)]
    after_prompt = [[1, 8, 1], [1, 9, 1]]
    # Each case once for the warm-up (at most 2 generated tokens) and once for the measurement
    assert counting.passes == [
        *(prompt, prompt),
        *(*generated[:2], *generated),
        *(prompt, *after_prompt, prompt, *after_prompt),
    ]
    assert [len(s.samples) for s in speeds] == [1, 1, 1]
    assert all(s.mean > 0 and s.stddev == 0 for s in speeds)


def test_short_prompts_are_read_as_a_generation_does(counting):
    few = counting.short_prompt
    bench(counting, [Case(few, 0), Case(few + 1, 1)], repetitions=1, warm_up=False)
    assert [n for n, *_ in counting.passes] == [few, few + 1, 1]
    assert counting.generated == [True, False, True]


def test_mean_and_deviation():
    speed = Speed(Case(1, 0), [1.0, 2.0, 6.0])
    assert speed.mean == 3
    assert speed.stddev == pytest.approx(math.sqrt(7))


def test_only_measured_tokens_are_timed(counting, monkeypatch):
    Runner(counting).seconds(Case(4, 2))  # loads kernels, which looks at the clock
    clock = iter(range(100))
    monkeypatch.setattr("ggufmill.runtime.evaluate.bench.time.perf_counter", lambda: next(clock))
    runner = Runner(counting)
    assert runner.seconds(Case(4, 2)) == 1
    assert runner.seconds(Case(4, 2, only_gen=True)) == 1
    assert bench(counting, [Case(4, 2)], 2, warm_up=False)[0].samples == [6, 6]
    assert bench(counting, [Case(4, 2, only_gen=True)], 1, warm_up=False)[0].samples == [2]


def test_a_case_without_tokens_is_refused(counting):
    for case in (Case(0, 0), Case(4, 0, only_gen=True), Case(-1, 5)):
        with pytest.raises(PlanError, match="measures nothing"):
            bench(counting, [case], 1)


def test_passes_of_a_sweep(counting):
    rows = list(sweep(counting, 35, pp=8, warm_up=False))
    assert [(r.pp, r.tg, r.n_kv) for r in rows] == [(8, 2, depth) for depth in (0, 8, 16, 24)]
    expected = [p for depth in (0, 8, 16, 24) for p in ([1, depth, 1], [1, depth + 1, 1], [8, depth, 1])]
    assert counting.passes == expected
    assert all(r.s_pp == pytest.approx(8 / r.t_pp) and r.s_tg == pytest.approx(2 / r.t_tg) for r in rows)
    assert all((r.stddev_pp, r.stddev_tg) == (0, 0) for r in rows)
    with pytest.raises(PlanError, match="no room"):
        next(sweep(counting, 7, pp=8))


def test_repetitions_of_a_sweep(counting, monkeypatch):
    list(sweep(counting, 16, pp=8, tg=2, warm_up=False))  # loads kernels, which looks at the clock
    counting.passes.clear()
    seconds = iter([2, 1, 4, 2, 1, 1, 1, 1])  # of generation and prompt in turn, twice at each of two depths
    now = [0.0]

    def clock():
        now[0] += next(seconds) if clock.running else 0
        clock.running = not clock.running
        return now[0]

    clock.running = False
    monkeypatch.setattr("ggufmill.runtime.evaluate.bench.time.perf_counter", clock)
    first, second = sweep(counting, 16, pp=8, tg=2, warm_up=False, repetitions=2)
    once = [[1, 0, 1], [1, 1, 1], [8, 0, 1]]
    later = [[1, 8, 1], [1, 9, 1], [8, 8, 1]]
    assert counting.passes == [*once, *once, *later, *later]
    assert (first.t_tg, first.t_pp) == (3, 1.5)
    assert first.stddev_tg == pytest.approx(math.sqrt(0.125))  # of 1 and 0.5 tokens per second
    assert first.stddev_pp == pytest.approx(math.sqrt(8))  # of 8 and 4
    assert (second.stddev_tg, second.stddev_pp) == (0, 0)
