"""An answer is the same, to the bit of its probabilities, whatever the server has cached and whoever else is served."""

import threading

import numpy as np
import pytest

from ggufmill import quantize_model
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

pytest.importorskip("starlette")
from ggufmill.runtime.serve.engine import Engine
from ggufmill.runtime.serve.tasks import EndEvent, Task

GREEDY, SEEDED = {"temp": 0}, {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Client:
    def __init__(self, engine, prompt, **options):
        self.sampled, self.end, self.done = [], None, threading.Event()
        engine.submit(Task(prompt, {"n_predict": 10, "n_probs": 5, "ignore_eos": True} | options, self._receive))

    def _receive(self, event):
        self.sampled += event.sampled
        if isinstance(event, EndEvent):
            self.end = event
            self.done.set()

    def answer(self):
        """Tokens and their log probabilities."""
        assert self.done.wait(60)
        assert self.end.error is None
        return [(each.token, each.logprob, tuple(each.top)) for each in self.sampled]

    @property
    def cached(self):
        return self.end.timings.cached_tokens


@pytest.fixture(scope="module", params=["Q4_K_M", pytest.param("fp8", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    """The demo: latent attention, a mixture of experts."""
    path = FOLDER / "demo"
    if request.param != "fp8":
        path = tmp_path_factory.mktemp("answers") / "demo.gguf"
        quantize_model(FOLDER / "demo", path, request.param)
    return load_model(path, threads=2, parallel=4)


@pytest.fixture(scope="module")
def prompts(model):
    text, random = (FOLDER / "demo/heldout.txt").read_text(), np.random.default_rng(0)
    starts, sizes = random.integers(0, len(text) - 900, 6), random.integers(20, 900, 6)
    return [model.tokenizer.encode(text[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@pytest.fixture
def engine(model):
    made = Engine(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(model, prompts):
    """alone(number of a prompt or tokens, options): of a server that has served nothing else."""

    def answer(prompt, **options):
        engine = Engine(model)
        try:
            return Client(engine, prompts[prompt] if isinstance(prompt, int) else prompt, **options).answer()
        finally:
            engine.close()

    return answer


def test_prompts_whose_beginning_is_cached(model, engine, prompts, alone):
    for number, prompt in enumerate(prompts):
        for length in (len(prompt), len(prompt) // 2, len(prompt) - 3):
            Client(engine, [*prompt[:length], 5]).answer()
        again = Client(engine, prompt, **GREEDY)
        assert again.answer() == alone(number, **GREEDY)
        assert again.cached >= len(prompt) - 4 or len(prompt) <= model.short_prompt
    assert min(map(len, prompts)) <= model.short_prompt < max(map(len, prompts))


def test_conversations(engine, prompts, alone):
    conversation = prompts[0]
    for following in prompts[1:5]:
        reply = Client(engine, conversation, seed=2, **SEEDED).answer()
        assert reply == alone(conversation, seed=2, **SEEDED)
        n_read, conversation = len(conversation), [*conversation, *(token for token, *_ in reply), *following]
    last = Client(engine, conversation, **GREEDY)
    assert last.answer() == alone(conversation, **GREEDY)
    assert last.cached == n_read - 1


@pytest.mark.parametrize("options", [GREEDY, SEEDED | {"seed": 3}])
def test_other_clients(engine, prompts, alone, options):
    for number, prompt in enumerate(prompts):
        others = [Client(engine, prompts[(number + i) % 6], n_predict=5 * i, **SEEDED) for i in (1, 2, 3)]
        assert Client(engine, prompt, **options).answer() == alone(number, **options)
        for other in others:
            other.answer()


def test_several_choices_are_several_requests(engine, prompts, alone):
    for number, prompt in enumerate(prompts[:4]):
        choices = [Client(engine, prompt, seed=seed, **SEEDED) for seed in (1, 2, 3)]
        assert [each.answer() for each in choices] == [alone(number, seed=seed, **SEEDED) for seed in (1, 2, 3)]
