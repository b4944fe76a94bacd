"""Sessions, generation and serving of a model with recurrent layers: going back, copies, prompts that are cached."""

import queue

import numpy as np
import pytest
from checkpoint_cases import convert_case

from ggufmill.runtime import load_model
from ggufmill.runtime.graph import Observer
from ggufmill.runtime.serve.engine import Engine
from ggufmill.runtime.serve.tasks import EndEvent, Task
from ggufmill.runtime.session_file import restore_session, save_session

ROUNDING = 1e-4  # between GEMM and GEMV


CASES = ("qwen35", "lfm2", "mamba2", "granitehybrid", "nemotron-h-moe", "falcon-h1", "jamba", "kimi-linear", "deepseek4")
CASES += ("qwen4exp", "qwen4exp-odd")


@pytest.fixture(scope="module", params=CASES)
def path(request, tmp_path_factory):
    return convert_case(request.param, tmp_path_factory.mktemp(request.param))[2]


@pytest.fixture(scope="module")
def model(path):
    return load_model(path, exact=True, ubatch=64, threads=2)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(3, 288, 200)


@pytest.fixture(scope="module")
def full(model, tokens):
    return model.logits(tokens)


def close(logits, expected):
    return np.abs(logits - expected).max() < ROUNDING


def test_a_session_goes_back_to_any_position(model, tokens, full):
    session = model.session()
    session.feed(tokens[:100])
    for i in range(100, 120):
        session.feed(tokens[i : i + 1])
    for length in (119, 110, 100, 63, 5, 0):
        session.rewind(length)
        assert session.tokens == tokens[:length].tolist()
        assert session.cache.length <= length
        assert close(session.feed(tokens[length : length + 1]), full[length])
        assert session.cache.length == length + 1
        assert close(session.feed(tokens[length + 1 : 121]), full[120])


def test_where_checkpoints_are(model, tokens):
    session = model.session()
    for first in range(0, 90, 30):
        session.feed(tokens[first : first + 30])
    session.feed([1])
    session.feed([2])
    assert [session.resumable(n) for n in (29, 30, 59, 60, 89, 90, 91, 92)] == [0, 30, 30, 60, 60, 90, 91, 92]
    session.feed([3, 4])  # what comes before more than one token is kept, and the end of what was read
    session.feed([5])
    assert [session.resumable(n) for n in (91, 92, 93, 94)] == [90, 92, 92, 94]


def test_forks_go_on_by_themselves(model, tokens, full):
    session = model.session()
    session.feed(tokens[:50])
    forks = [session.fork(), session.fork(30), session.fork(0)]
    assert [len(fork.tokens) for fork in forks] == [50, 30, 0]
    session.feed(tokens[90:])
    batch = [(forks[0], tokens[50:60]), (forks[1], tokens[30:31]), (forks[2], tokens[:7])]
    for logits, at in zip(model.feed(batch), (59, 30, 6), strict=True):
        assert close(logits, full[at])


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("fails_in", [1, 2, 3])
def test_an_interrupted_prompt_leaves_a_session_as_it_was(model, tokens, full, failure, fails_in):
    session, passes = model.session(), []
    session.feed(tokens[:9])
    session.feed(tokens[9:10])

    class Interrupt(Observer):
        def wants_output(self, op):
            return op.out == model.graph.layers[2]

        def on_output(self, op, out):
            passes.append(len(out))
            if len(passes) == fails_in:
                raise failure("now")

    with model.observing(Interrupt()), pytest.raises(failure):
        session.feed(tokens[10:])
    assert (len(session.tokens), session.cache.length) == (10, 10)
    assert close(session.feed(tokens[10:40]), full[39])


def test_settings_do_not_change_the_logits(path, tokens, full):
    for settings in ({"ubatch": 7}, {"threads": 1}, {"flash": False}, {"cache_bytes": 0}, {"checkpoints": 1}):
        assert close(load_model(path, exact=True, **settings).logits(tokens), full), settings


def test_the_bits_do_not_depend_on_passes(model, path, tokens):
    expected = model.logits(tokens[:192])
    logits = load_model(path, exact=True, ubatch=96, threads=1).logits(tokens[:192])
    assert np.array_equal(logits, expected)


def test_a_prompt_that_begins_like_the_last_one_is_not_read_again(model, tokens):
    prompt = tokens[:150].tolist()
    session, options = model.session(), {"n_predict": 12, "temp": 0, "ignore_eos": True}
    first = model.generate(prompt, session=session, **options)
    first.text()
    assert first.timings.cached_tokens == 0
    for change, cached in (
        (150, 149),
        (145, 142),
        (142, 142),
        (141, 128),
        (100, 64),
    ):  # 64: tokens of a pass; the last 8, the last
        other = [*prompt[:change], *tokens[160:190].tolist()]
        again = model.generate(other, session=session, **options)
        again.text()
        alone = model.generate(other, **options)
        alone.text()
        assert again.tokens == alone.tokens
        assert again.timings.cached_tokens == cached
        model.generate(prompt, session=session, **options).text()
    more = [*prompt, *first.tokens, 7, 8]  # a conversation that goes on
    going_on = model.generate(more, session=session, **options)
    assert going_on.timings.cached_tokens == len(prompt) - 1  # the answer was not computed as prompts are
    going_on.text()
    alone = model.generate(more, **options)
    alone.text()
    assert going_on.tokens == alone.tokens


def test_a_saved_session_goes_on_with_the_same_logits(model, path, tokens, full, tmp_path):
    """After a restart; also where the session had gone back to a place between checkpoints before it was saved."""
    session = model.session()
    session.feed(tokens[:70])
    for i in range(70, 75):
        session.feed(tokens[i : i + 1])
    for length, name in ((75, "whole"), (72, "rewound")):
        session.rewind(length)
        save_session(session, tmp_path / name)
        restored = load_model(path, exact=True, ubatch=64, threads=2).session()
        restored.feed(tokens[100:130])
        restore_session(restored, tmp_path / name)
        n = len(restored.tokens)
        assert restored.tokens == tokens[:n].tolist()
        assert n == session.cache.length <= length
        copy = session.fork(n)
        for i in range(n, n + 6):
            np.testing.assert_array_equal(restored.feed(tokens[i : i + 1]), copy.feed(tokens[i : i + 1]))
        restored.rewind(min(n, 40))  # where it has no state: what lies before is computed again
        assert close(restored.feed(tokens[min(n, 40) : 50]), full[49])


def test_a_saved_slot_answers_with_the_same_tokens(path, tokens, tmp_path):
    """Of a server, for a prompt that begins like the saved one."""
    TestClient = pytest.importorskip("starlette.testclient").TestClient
    pytest.importorskip("httpx")
    from ggufmill.runtime.serve import ServerSettings, make_app

    def post(client, url, **body):
        reply = client.post(url, json=body, headers={"host": "127.0.0.1"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    ask = {"n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    prompt = tokens[:50].tolist()
    with TestClient(make_app(load_model(path, exact=True), ServerSettings(slot_save_path=tmp_path))) as client:
        first = post(client, "/completion", prompt=prompt, **ask)["tokens"]
        longer = [*prompt, *first[:-1], *tokens[60:70].tolist()]  # the last token was not computed
        post(client, "/slots/0?action=save", filename="a")
        expected = post(client, "/completion", prompt=longer, **ask)
    with TestClient(make_app(load_model(path, exact=True), ServerSettings(slot_save_path=tmp_path))) as client:
        post(client, "/completion", prompt=tokens[100:120].tolist(), **ask)
        assert post(client, "/slots/0?action=restore", filename="a")["n_restored"] == len(prompt) - 1
        restored = post(client, "/completion", prompt=longer, **ask)
        assert restored["tokens"] == expected["tokens"]
        assert restored["timings"]["cache_n"] == len(prompt) - 1
        assert post(client, "/completion", prompt=prompt, **ask)["tokens"] == first


def test_a_server_answers_as_one_session_does(path, tokens):
    model = load_model(path, exact=True, parallel=2)
    engine = Engine(model)
    prompts = [tokens[:60], tokens[:40], [*tokens[:52], *tokens[90:110]], tokens[100:140], tokens[:60], tokens[:55]]
    options = {"n_predict": 8, "temp": 0, "ignore_eos": True, "n_probs": 0}
    answers = []
    try:
        for group in (prompts[:3], prompts[3:]):
            events = [queue.SimpleQueue() for _ in group]
            for prompt, events_of in zip(group, events, strict=True):
                engine.submit(Task([int(t) for t in prompt], dict(options), events_of.put))
            for events_of in events:
                sampled = []
                while True:
                    event = events_of.get(timeout=120)
                    sampled += event.sampled
                    if isinstance(event, EndEvent):
                        assert event.error is None
                        break
                answers.append([each.token for each in sampled])
    finally:
        engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = model.generate([int(t) for t in prompt], n_predict=8, temp=0, ignore_eos=True)
        alone.text()
        assert answer == alone.tokens
