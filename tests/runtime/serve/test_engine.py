"""The engine: tasks that share passes through the model."""

import dataclasses
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest

from ggufmill.formats import TYPES, MillError
from ggufmill.quantize import decode, encode
from ggufmill.runtime import generate, load_model
from ggufmill.runtime.generation.generate import _PROMPT_STEP
from ggufmill.runtime.model import Model

pytest.importorskip("starlette")
from ggufmill.runtime.serve.engine import Engine
from ggufmill.runtime.serve.tasks import EndEvent, Task
from ggufmill.simd.compile.compile_time import seconds_without_compilation

PROMPTS = [[0, *range(2 + start, 2 + start + n)] for start, n in ((60, 3), (97, 20), (40, 1), (110, 9), (65, 12))]
LONG = {"n_predict": -1, "temp": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def packed(tiny):
    """The tiny model in quantised types, whose kernels give a row the same bits in any batch, with a long context."""

    def pack(tensor):
        type_name = "q8_0" if len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0 else "f32"
        data = encode(tensor.read(0, tensor.n_rows), type_name)
        return dataclasses.replace(
            tensor,
            source_type=type_name,
            read=lambda start, stop: decode(data[start:stop], type_name, tensor.shape[0]),
            raw=lambda start, stop: data[start:stop],
            stored=TYPES[type_name],
            mapped=data,
        )

    tensors = {name: pack(tensor) for name, tensor in tiny.tensors.items()}
    return dataclasses.replace(tiny, tensors=tensors, metadata=tiny.metadata | {"llama.context_length": 4096})


class Client:
    """Submits a task and collects its events."""

    def __init__(self, engine, prompt, **options):
        self.texts, self.sampled, self.end, self.done, self.started = [], [], None, threading.Event(), threading.Event()
        self.task = Task(prompt, {"temp": 0, "ignore_eos": True} | options, self._receive)
        engine.submit(self.task)

    def _receive(self, event):
        self.sampled += event.sampled
        if isinstance(event, EndEvent):
            self.end = event
            self.done.set()
        else:
            self.texts.append(event.text)
            self.started.set()

    def text(self):
        assert self.done.wait(120)
        assert self.end.error is None
        return "".join(self.texts)


@pytest.fixture
def engine(packed):
    """engine(**settings) -> Engine that is closed at the end"""
    engines = []

    def make(max_queue=16, **settings):
        engines.append(Engine(load_model(packed, **({"parallel": 4} | settings)), max_queue))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


@pytest.fixture
def passes(monkeypatch):
    """For each pass the number of tokens of every sequence."""
    passes, feed = [], Model.feed

    def recording(self, batch, generated):
        passes.append([len(tokens) for _, tokens in batch])
        return feed(self, batch, generated)

    monkeypatch.setattr(Model, "feed", recording)
    return passes


@contextmanager
def held(shared):
    """What is submitted meanwhile begins together."""
    go_on = threading.Event()
    shared.compute(go_on.wait(120) for _ in range(1))
    try:
        yield
    finally:
        go_on.set()


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("sampling", [{}, {"temp": 1.5, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "seed": 3}])
def test_results_do_not_depend_on_other_tasks(packed, engine, sampling):
    model = load_model(packed)
    options = {"n_predict": 40, "temp": 0, "ignore_eos": True, "n_probs": 0} | sampling
    alone = [generate(model, prompt, **options) for prompt in PROMPTS]
    texts = [each.text() for each in alone]
    together = engine(parallel=5)
    clients = [Client(together, prompt, **options) for prompt in PROMPTS]
    assert [client.text() for client in clients] == texts
    assert [client.sampled for client in clients] == [each.sampled for each in alone]  # log probabilities to the last bit


def test_running_tasks_share_passes(engine, passes):
    shared = engine()
    with held(shared):
        clients = [Client(shared, prompt, n_predict=300) for prompt in PROMPTS[:4]]
    for client in clients:
        client.text()
    assert [1, 1, 1, 1] in passes
    assert len([each for each in passes if len(each) > 1]) > 250
    assert all(len(each) == 1 for each in passes if max(each) > 8)  # a pass reads one prompt only, unless they are short


def test_warm_up_has_a_pass_of_two_sequences(engine, passes):
    """So that code for several tokens is compiled before the first requests are worked on side by side."""
    engine().warm_up()
    wait_until(lambda: [1, 1] in passes)


def test_more_tasks_than_a_batch(engine, passes):
    many = engine(parallel=11)
    with held(many):
        clients = [Client(many, [0, 70 + i], n_predict=60) for i in range(11)]
    texts = [client.text() for client in clients]
    assert max(map(len, passes)) == 8
    assert [Client(many, [0, 70 + i], n_predict=60).text() for i in range(11)] == texts


def test_tasks_start_and_end_at_any_pass(engine):
    shared = engine(parallel=2)
    endless = Client(shared, PROMPTS[0], n_predict=-1)
    assert endless.started.wait(120)
    alone = [Client(shared, prompt, n_predict=10).text() for prompt in PROMPTS[1:]]
    assert not endless.done.is_set()
    assert [Client(shared, prompt, n_predict=10).text() for prompt in PROMPTS[1:]] == alone
    endless.task.cancel()
    assert endless.done.wait(120)
    assert endless.end.reason == "cancelled"
    assert endless.end.timings.generated_tokens >= 40


def test_other_tasks_generate_while_a_long_prompt_is_read(engine, passes):
    shared = engine(parallel=2)
    short = Client(shared, PROMPTS[0], n_predict=-1)
    assert short.started.wait(120)
    before = len(passes)
    reader = Client(shared, [0] + [5] * (4 * _PROMPT_STEP), n_predict=3)
    reader.text()
    prompt_passes = [i for i, n_tokens in enumerate(passes[before:]) if max(n_tokens) > 1]
    assert len(prompt_passes) == 4
    assert all(b - a >= 2 for a, b in pairwise(prompt_passes))  # a token of the other task between any two
    assert not short.done.is_set()


def test_prompts_take_turns_in_parts_of_ubatch_tokens(engine, passes):
    shared, ended = engine(parallel=2, ubatch=64), []

    def task(size):
        return Task([0] + [5] * size, {"n_predict": 1}, lambda event: isinstance(event, EndEvent) and ended.append(size))

    with held(shared):
        for size in (2000, 100):
            shared.submit(task(size))
    wait_until(lambda: len(ended) == 2)
    assert ended == [100, 2000]  # the shorter prompt did not wait for the longer one
    assert max(map(max, passes)) == 64


def test_cancelled_tasks_end_at_once(engine):
    shared = engine(max_queue=2, parallel=1)
    running, waiting, other = (Client(shared, prompt, n_predict=-1) for prompt in PROMPTS[:3])
    assert running.started.wait(120)
    waiting.task.cancel()
    assert waiting.done.wait(120)  # without having started: its place in the queue is free
    assert (waiting.end.reason, waiting.texts) == ("cancelled", [])
    assert not running.done.is_set()
    assert shared.n_tasks == 2
    running.task.cancel()
    assert other.started.wait(120)
    other.task.cancel()
    wait_until(lambda: shared.n_tasks == 0)


def test_an_error_ends_only_the_task_that_causes_it(engine, monkeypatch):
    shared = engine(parallel=3)
    feed = Model.feed

    def fails(self, batch, generated):
        if any(len(session.tokens) == 30 and session.tokens[1] == PROMPTS[0][1] for session, _ in batch):
            raise MillError("this one cannot go on")
        return feed(self, batch, generated)

    monkeypatch.setattr(Model, "feed", fails)
    clients = [Client(shared, prompt, n_predict=40) for prompt in PROMPTS[:3]]
    assert all(client.done.wait(120) for client in clients)
    assert str(clients[0].end.error) == "this one cannot go on"
    monkeypatch.setattr(Model, "feed", feed)
    assert [client.text() for client in clients[1:]] == [Client(shared, p, n_predict=40).text() for p in PROMPTS[1:3]]


def test_nonfinite_logits_end_only_their_task(engine, monkeypatch):
    shared = engine(parallel=2)
    feed = Model.feed

    def broken(self, batch, generated):
        logits = feed(self, batch, generated)
        for row, (session, _) in zip(logits, batch, strict=True):
            row[:] = np.where(session.tokens[1] == PROMPTS[0][1], np.nan, row)
        return logits

    monkeypatch.setattr(Model, "feed", broken)
    bad, good = (Client(shared, prompt, n_predict=20) for prompt in PROMPTS[:2])
    assert good.text()
    assert bad.done.wait(120)
    assert "not finite" in str(bad.end.error)


def test_timings_are_elapsed_times(engine):
    shared = engine()
    start = seconds_without_compilation()
    with held(shared):
        clients = [Client(shared, prompt, n_predict=200) for prompt in PROMPTS[:4]]
    for client in clients:
        client.text()
    wall = seconds_without_compilation() - start
    for client, prompt in zip(clients, PROMPTS, strict=False):
        t = client.end.timings
        assert (t.prompt_tokens + t.cached_tokens, t.generated_tokens) == (len(prompt), 200)
        assert 0 < t.prompt_seconds < wall
        assert 0 < t.generated_seconds < wall
        assert t.prompt_seconds + t.generated_seconds <= wall
    # The tasks run at the same time: the sum of their times is longer than the elapsed time.
    assert sum(client.end.timings.generated_seconds for client in clients) > 1.5 * wall


def test_cached_prompts_are_not_read_again(engine):
    shared = engine(parallel=2)
    Client(shared, [0, *range(50, 90)], n_predict=2).text()
    busy = Client(shared, [0, *range(50, 80), 3], n_predict=-1)  # occupies that slot
    assert busy.started.wait(120)
    again = Client(shared, [0, *range(50, 90)], n_predict=2)
    again.text()
    assert again.end.timings.cached_tokens == 31  # a copy of what the busy slot has
    more = Client(shared, [0, *range(50, 100)], n_predict=2)
    more.text()
    assert more.end.timings.cached_tokens == 40  # what was read: the last token of a prompt is computed as an answer's are
    busy.task.cancel()
    assert busy.done.wait(120)


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_a_prompt_of_several_tasks_is_read_once(packed, engine, parallel):
    prompt = [0, *range(40, 140)]
    options = {"temp": 1.5, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "n_predict": 20}
    alone = [generate(load_model(packed), prompt, seed=i, ignore_eos=True, **options).text() for i in range(4)]
    clients, shared = [], engine(parallel=parallel, max_queue=0, ubatch=32)

    class Waiting(Client):
        def __init__(self, **options):
            super().__init__(type("Collector", (), {"submit": lambda self, task: None})(), prompt, **options)

    clients = [Waiting(seed=i, **options) for i in range(4)]
    shared.submit(*(client.task for client in clients))  # one request, though more tasks than places in the queue
    assert [client.text() for client in clients] == alone
    assert sum(client.end.timings.prompt_tokens for client in clients) == len(prompt) + 3


def test_requests_take_turns(engine):
    shared, ended, submitted = engine(parallel=1), [], threading.Event()

    def listener(i):
        return lambda event: submitted.wait(20) and isinstance(event, EndEvent) and ended.append(i)

    shared.submit(*(Task(PROMPTS[0], {"temp": 0, "n_predict": 2}, listener(i)) for i in range(4)))
    shared.submit(Task(PROMPTS[1], {"temp": 0, "n_predict": 2}, listener("other")))
    submitted.set()
    wait_until(lambda: shared.n_tasks == 0)
    assert ended.index("other") < 3  # it did not wait for all of the first request
    assert [i for i in ended if i != "other"] == [0, 1, 2, 3]
