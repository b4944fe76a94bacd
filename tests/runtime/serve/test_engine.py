"""The engine: requests that share their steps."""

import dataclasses
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from ggufmill.formats import TYPES, MillError
from ggufmill.quantize import decode, encode
from ggufmill.runtime import generate, load_model
from ggufmill.runtime.generation.generate import _PROMPT_STEP
from ggufmill.runtime.model import Model

pytest.importorskip("starlette")
from ggufmill.runtime.serve.engine import End, Engine, Job

PROMPTS = [[0, *range(2 + start, 2 + start + n)] for start, n in ((60, 3), (97, 20), (40, 1), (110, 9), (65, 12))]
LONG = {"n_predict": -1, "temp": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def packed(tiny):
    """The tiny model in types that are multiplied from their packed bytes, for long contexts."""

    def pack(tensor):
        kind = "q8_0" if len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0 else "f32"
        q = encode(tensor.read(0, tensor.n_rows), kind)
        return dataclasses.replace(
            tensor,
            source_type=kind,
            read=lambda start, stop: decode(q[start:stop], kind, tensor.shape[0]),
            raw=lambda start, stop: q[start:stop],
            stored=TYPES[kind],
            mapped=q,
        )

    tensors = {name: pack(tensor) for name, tensor in tiny.tensors.items()}
    return dataclasses.replace(tiny, tensors=tensors, metadata=tiny.metadata | {"llama.context_length": 4096})


class Client:
    """Submits a job and collects what comes of it."""

    def __init__(self, engine, prompt, **options):
        self.texts, self.drawn, self.end, self.done, self.began = [], [], None, threading.Event(), threading.Event()
        self.job = Job(prompt, {"temp": 0, "ignore_eos": True} | options, self._hear)
        engine.submit(self.job)

    def _hear(self, event):
        self.drawn += event.drawn
        if isinstance(event, End):
            self.end = event
            self.done.set()
        else:
            self.texts.append(event.text)
            self.began.set()

    def text(self):
        assert self.done.wait(30)
        assert self.end.error is None
        return "".join(self.texts)


@pytest.fixture
def engine(packed):
    """engine(**settings) -> Engine that is closed at the end"""
    made = []

    def make(waiting=16, **settings):
        made.append(Engine(load_model(packed, **({"parallel": 4} | settings)), waiting))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def passes(monkeypatch):
    """The tokens of every sequence in each pass, as they come."""
    seen, feed = [], Model.feed

    def watched(self, turns):
        seen.append([len(tokens) for _, tokens in turns])
        return feed(self, turns)

    monkeypatch.setattr(Model, "feed", watched)
    return seen


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("sampling", [{}, {"temp": 1.5, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "seed": 3}])
def test_neighbours_change_nothing(packed, engine, sampling):
    model = load_model(packed)
    options = {"n_predict": 40, "temp": 0, "ignore_eos": True, "n_probs": 0} | sampling
    alone = [generate(model, prompt, **options) for prompt in PROMPTS]
    texts = [each.text() for each in alone]
    together = engine(parallel=5)
    clients = [Client(together, prompt, **options) for prompt in PROMPTS]
    assert [client.text() for client in clients] == texts
    # To the last bit: log probabilities, too.
    assert [client.drawn for client in clients] == [each.drawn for each in alone]


def test_running_jobs_share_their_steps(engine, passes):
    shared = engine()
    clients = [Client(shared, prompt, n_predict=300) for prompt in PROMPTS[:4]]
    for client in clients:
        client.text()
    assert [1, 1, 1, 1] in passes
    assert len([each for each in passes if len(each) > 1]) > 250
    assert all(len(each) == 1 for each in passes if max(each) > 1)  # prompts go alone


def test_more_jobs_than_a_pass_takes(engine, passes):
    many = engine(parallel=11)
    clients = [Client(many, [0, 70 + i], n_predict=60) for i in range(11)]
    texts = [client.text() for client in clients]
    assert max(map(len, passes)) == 8
    assert [Client(many, [0, 70 + i], n_predict=60).text() for i in range(11)] == texts


def test_jobs_join_and_leave_at_any_step(engine):
    shared = engine(parallel=2)
    endless = Client(shared, PROMPTS[0], n_predict=-1)
    assert endless.began.wait(20)
    alone = [Client(shared, prompt, n_predict=10).text() for prompt in PROMPTS[1:]]
    assert not endless.done.is_set()
    assert [Client(shared, prompt, n_predict=10).text() for prompt in PROMPTS[1:]] == alone
    endless.job.cancel()
    assert endless.done.wait(20)
    assert endless.end.reason == "cancelled"
    assert endless.end.timings.generated_tokens >= 40


def test_a_long_prompt_lets_others_go_on(engine, passes):
    shared = engine(parallel=2)
    short = Client(shared, PROMPTS[0], n_predict=-1)
    assert short.began.wait(20)
    before = len(passes)
    reader = Client(shared, [0] + [5] * (4 * _PROMPT_STEP), n_predict=3)
    reader.text()
    order = [max(each) > 1 for each in passes[before:]]
    pieces = [i for i, is_piece in enumerate(order) if is_piece]
    assert len(pieces) == 4
    assert all(b - a >= 2 for a, b in pairwise(pieces))  # a token of the other between any two
    assert not short.done.is_set()


def test_prompts_are_read_in_turn_and_in_pieces_of_ub(engine, passes):
    shared = engine(parallel=2, ubatch=64)
    first = Client(shared, [0] + [5] * 2000, n_predict=1)
    wait_until(lambda: passes)
    second = Client(shared, [0] + [6] * 100, n_predict=1)
    second.text()
    assert not first.done.is_set()  # the shorter one did not wait for all of the longer one
    first.text()
    assert max(map(max, passes)) == 64


def test_whoever_is_cancelled_leaves_at_once(engine):
    shared = engine(waiting=2, parallel=1)
    running, waiting, other = (Client(shared, prompt, n_predict=-1) for prompt in PROMPTS[:3])
    assert running.began.wait(20)
    waiting.job.cancel()
    assert waiting.done.wait(20)  # before its turn came: the place in the queue is free again
    assert (waiting.end.reason, waiting.texts) == ("cancelled", [])
    assert not running.done.is_set()
    assert shared.load == 2
    running.job.cancel()
    assert other.began.wait(20)
    other.job.cancel()
    wait_until(lambda: shared.load == 0)


def test_a_fault_ends_only_the_job_that_has_it(engine, monkeypatch):
    shared = engine(parallel=3)
    feed = Model.feed

    def fails(self, turns):
        if any(len(session.tokens) == 30 and session.tokens[1] == PROMPTS[0][1] for session, _ in turns):
            raise MillError("this one cannot go on")
        return feed(self, turns)

    monkeypatch.setattr(Model, "feed", fails)
    clients = [Client(shared, prompt, n_predict=40) for prompt in PROMPTS[:3]]
    assert all(client.done.wait(20) for client in clients)
    assert str(clients[0].end.error) == "this one cannot go on"
    monkeypatch.setattr(Model, "feed", feed)
    assert [client.text() for client in clients[1:]] == [Client(shared, p, n_predict=40).text() for p in PROMPTS[1:3]]


def test_logits_of_one_that_are_not_finite(engine, monkeypatch):
    shared = engine(parallel=2)
    feed = Model.feed

    def broken(self, turns):
        logits = feed(self, turns)
        for row, (session, _) in zip(logits, turns, strict=True):
            row[:] = np.where(session.tokens[1] == PROMPTS[0][1], np.nan, row)
        return logits

    monkeypatch.setattr(Model, "feed", broken)
    bad, good = (Client(shared, prompt, n_predict=20) for prompt in PROMPTS[:2])
    assert good.text()
    assert bad.done.wait(20)
    assert "not finite" in str(bad.end.error)


def test_timings_are_what_a_client_sees(engine):
    shared = engine()
    began = time.perf_counter()
    clients = [Client(shared, prompt, n_predict=200) for prompt in PROMPTS[:4]]
    for client in clients:
        client.text()
    wall = time.perf_counter() - began
    for client, prompt in zip(clients, PROMPTS, strict=False):
        t = client.end.timings
        assert (t.prompt_tokens + t.cached_tokens, t.generated_tokens) == (len(prompt), 200)
        assert 0 < t.prompt_seconds < wall
        assert 0 < t.generated_seconds < wall
        assert t.prompt_seconds + t.generated_seconds <= wall
    # Side by side, not one after the other: together they take longer than the clock says.
    assert sum(client.end.timings.generated_seconds for client in clients) > 1.5 * wall


def test_what_is_known_is_not_read_again(engine):
    shared = engine(parallel=2)
    Client(shared, [0, *range(50, 90)], n_predict=2).text()
    busy = Client(shared, [0, *range(50, 80), 3], n_predict=-1)  # takes that session
    assert busy.began.wait(20)
    again = Client(shared, [0, *range(50, 90)], n_predict=2)
    again.text()
    assert again.end.timings.cached_tokens == 0
    more = Client(shared, [0, *range(50, 100)], n_predict=2)
    more.text()
    assert more.end.timings.cached_tokens == 41
    busy.job.cancel()
    assert busy.done.wait(20)
