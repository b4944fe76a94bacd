"""Several prompts and several choices per request, prompts that are scored, biases: with OpenAI's Python client."""

import numpy as np
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
from starlette.testclient import TestClient  # noqa: E402

from ggufmill.runtime import load_model  # noqa: E402
from ggufmill.runtime.serve import make_app  # noqa: E402

ANSWER = "Hi you!"
ASK = [{"role": "user", "content": "Hello"}]
PROMPT = [0, *[2 + b for b in b"say:"]]
HOT = {"temperature": 2.0, "top_p": 1, "max_tokens": 12, "extra_body": {"top_k": 0, "min_p": 0, "ignore_eos": True}}


@pytest.fixture(scope="module", params=[1, 3], ids=["one slot", "three slots"])
def client(request, reciting):
    """OpenAI's client of a server that recites ANSWER."""
    app = make_app(reciting(ANSWER, parallel=request.param), options={"temp": 0})
    with TestClient(app, base_url="http://127.0.0.1:8080") as http:
        yield openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def random_client(tiny):
    """The same of a model whose predictions are not certain, with its model."""
    model = load_model(tiny, parallel=2, n_ctx=256)
    with TestClient(make_app(model, options={"temp": 0}), base_url="http://127.0.0.1:8080") as http:
        yield openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none", max_retries=0, http_client=http), model


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def refused(call, **options):
    with pytest.raises(openai.BadRequestError) as caught:
        call(model="x", **options)
    return caught.value


def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(client):
    def texts(prompt):
        choices = client.completions.create(model="x", prompt=prompt, max_tokens=2).choices
        assert [choice.index for choice in choices] == list(range(len(choices)))
        return [choice.text for choice in choices]

    assert texts("say:") == texts(PROMPT) == texts(["say:"]) == texts([PROMPT]) == ["Hi"]
    assert texts(["say:", "s:", ":H"]) == ["Hi", "Hi", "i "]
    assert texts([PROMPT, [*PROMPT, 2 + ord("H")]]) == ["Hi", "i "]


def test_choices_are_numbered_by_prompt(client):
    reply = client.completions.create(model="x", prompt=["say:", "say:Hi"], n=2, max_tokens=1)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "H"), (1, "H"), (2, " "), (3, " ")]
    prompts = len(PROMPT) + len(PROMPT) + 2
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompts, 4)


def test_each_choice_has_its_own_seed_and_equals_a_request_of_its_own(random_client):
    client, _ = random_client

    def texts(**options):
        return [choice.text for choice in client.completions.create(model="x", **HOT | options).choices]

    two = texts(prompt=["say:", "x:"], n=2, seed=5)
    assert len(set(two[:2])) == 2
    assert [two[0], two[1]] == texts(prompt="say:", n=1, seed=5) + texts(prompt="say:", n=1, seed=6)
    assert two[2:] == texts(prompt="x:", n=2, seed=5)


def test_choices_of_a_chat(client):
    reply = client.chat.completions.create(model="x", messages=ASK, n=3)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(i, ANSWER) for i in range(3)]
    prompt = len("<s>") - 2 + len("u:Hello\na:")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt, 3 * len(ANSWER))


def test_choices_of_a_stream(client):
    chunks = list(
        client.chat.completions.create(model="x", messages=ASK, n=2, stream=True, stream_options={"include_usage": True})
    )
    texts, ends = ["", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.finish_reason] * (choice.finish_reason is not None)
    assert texts == [ANSWER, ANSWER]
    assert ends == ["stop", "stop"]
    assert chunks[-1].usage.completion_tokens == 2 * len(ANSWER)
    pieces = client.completions.create(model="x", prompt=["say:", ":H"], stream=True, echo=True, logprobs=1)
    texts, tokens = ["", ""], [[], []]
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == ["say:" + ANSWER, ":" + ANSWER]
    assert ["".join(each) for each in tokens] == ["<s>say:" + ANSWER + "</s>", "<s>:" + ANSWER + "</s>"]


def test_a_prompt_is_read_once_for_all_choices(random_client):
    client, _ = random_client
    reply = client.completions.create(model="x", prompt="q" * 100, n=4, max_tokens=3, extra_body={"ignore_eos": True})
    timings = reply.model_extra["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 101
    assert timings["cache_n"] <= 1  # of the first choice; the others have all but the last token from it
    assert timings["predicted_n"] == 12


def test_best_of_returns_the_most_probable_answers(random_client):
    client, _ = random_client
    options = {**HOT, "prompt": "once", "seed": 3, "logprobs": 0}
    every = client.completions.create(model="x", n=6, **options).choices
    means = {choice.text: np.mean(choice.logprobs.token_logprobs) for choice in every}
    reply = client.completions.create(model="x", n=2, best_of=6, **options)
    assert [choice.text for choice in reply.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.completion_tokens == 6 * 12
    plain = client.completions.create(model="x", best_of=6, **{**options, "logprobs": None})
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (reply.choices[0].text, None)


def test_echo_gives_the_probabilities_of_the_prompt(random_client):
    client, model = random_client
    prompts = [[0, 70, 80, 90], [0, *range(40, 200)]]
    reply = client.completions.create(model="x", prompt=prompts, max_tokens=1, logprobs=2, echo=True)
    for choice, ids in zip(reply.choices, prompts, strict=True):
        lists, expected = choice.logprobs, log_softmax(model.logits(ids))
        assert (lists.token_logprobs[0], lists.top_logprobs[0]) == (None, None)
        assert (
            len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == len(ids) + 1
        )
        scores = [expected[i, token] for i, token in enumerate(ids[1:])]
        assert lists.token_logprobs[1:-1] == pytest.approx(scores, abs=1e-4)
        assert lists.token_logprobs[-1] == pytest.approx(expected[-1].max(), abs=1e-4)
        assert [max(top.values()) for top in lists.top_logprobs[1:]] == pytest.approx(expected.max(-1), abs=1e-4)
        # The scores do not depend on what the cache held.
        again = client.completions.create(model="x", prompt=ids, max_tokens=0, logprobs=2, echo=True).choices[0]
        assert again.logprobs.token_logprobs == lists.token_logprobs[:-1]
        assert again.finish_reason == "length"


def test_echo_of_texts(client):
    reply = client.completions.create(model="x", prompt="say:", max_tokens=0, echo=True, logprobs=0)
    choice = reply.choices[0]
    assert choice.text == "say:"
    assert choice.logprobs.tokens == ["<s>", *"say:"]
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]
    assert reply.usage.completion_tokens == 0
    plain = client.completions.create(model="x", prompt=["say:", PROMPT[1:]], max_tokens=2, echo=True)
    assert [choice.text for choice in plain.choices] == ["say:Hi", "say:Hi"]
    assert plain.choices[0].logprobs is None
    assert plain.usage.prompt_tokens == 2 * len(PROMPT) - 1  # ids get no BOS


def test_a_token_of_an_echoed_answer_that_ends_it_has_an_entry(client):
    """Clients that score prompts ask for one token, and take the last entry for that token."""
    reply = client.completions.create(model="x", prompt="say:" + ANSWER, max_tokens=1, echo=True, logprobs=1)
    assert reply.choices[0].logprobs.tokens == ["<s>", *"say:", *ANSWER, "</s>"]


def test_logit_bias(client):
    def complete(logit_bias, **extra):
        return client.completions.create(model="x", prompt="say:", max_tokens=1, logit_bias=logit_bias, **extra).choices[0].text

    assert complete({str(2 + ord("Z")): 1000}) == "Z"
    assert complete({str(2 + ord("H")): -100}) != "H"
    assert complete(None, extra_body={"logit_bias": [["Z", 1000]]}) == "Z"
    assert complete(None, extra_body={"logit_bias": [[2 + ord("H"), False]]}) != "H"
    body = refused(client.completions.create, prompt="a", logit_bias={"9999": 1})
    assert (body.param, "no token 9999" in body.message) == ("logit_bias", True)
    banned = [[i, False] for i in range(258)]
    assert "every token" in refused(client.completions.create, prompt="a", extra_body={"logit_bias": banned}).message


def test_bounds_of_a_request_are_told(client):
    create = client.completions.create
    for options, param in (
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 10, "n": 13}, "prompt"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a", "b" * 600]}, "prompt[1]"),
        ({"prompt": [[0], [300]]}, "prompt[1]"),
        ({"prompt": [[0], []]}, "prompt[1]"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a"] * 120, "logprobs": 20}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),  # no tokens for it in the vocabulary
        ({"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
    ):
        assert refused(create, **options).param == param
