"""OpenAI's Python client against a running server."""

import json
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")

ANSWER = "Hi <b>you!"  # no byte twice
ASK = [{"role": "user", "content": "Hello"}]


def client_of(url, key="none", **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300, **options)


@pytest.fixture(scope="module")
def model(reciting):
    return reciting(ANSWER)


@pytest.fixture(scope="module")
def client(served, model):
    return client_of(served(model, alias="reciter"))


@pytest.fixture(scope="module")
def endless(served, reciting):
    """A server whose model never ends by itself, with a queue of one request."""
    return served(reciting("abcdefg", end=False, n_ctx=200_000), max_queue=1)


def test_a_chat(client):
    reply = client.chat.completions.create(model="reciter", messages=ASK)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert reply.object == "chat.completion"
    assert reply.model == "reciter"
    prompt = len("<s>") - 2 + len("u:Hello\na:")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt, len(ANSWER))
    assert reply.usage.total_tokens == prompt + len(ANSWER)
    timings = reply.model_extra["timings"]
    assert timings["predicted_n"] == len(ANSWER)
    assert timings["prompt_n"] + timings["cache_n"] == prompt
    assert timings["predicted_ms"] > 0 < timings["predicted_per_second"]


def test_a_stream(client):
    chunks = list(client.chat.completions.create(model="x", messages=ASK, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == ANSWER
    assert len([t for t in texts if t]) == len(ANSWER)  # one chunk per character, not all at the end
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ANSWER)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions(client):
    reply = client.completions.create(model="x", prompt="say:")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (ANSWER, "stop")
    pieces = client.completions.create(model="x", prompt="say:", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
    tokens = [0, 2 + ord(":")]
    assert client.completions.create(model="x", prompt=tokens, max_tokens=3).choices[0].text == ANSWER[:3]


def test_limits_and_stop_texts(client):
    def complete(**options):
        choice = client.chat.completions.create(model="x", messages=ASK, **options).choices[0]
        return choice.message.content, choice.finish_reason

    assert complete(max_tokens=4) == (ANSWER[:4], "length")
    assert complete(max_completion_tokens=4) == (ANSWER[:4], "length")
    assert complete(stop="<b>") == ("Hi ", "stop")
    assert complete(stop=["never", "you"]) == ("Hi <b>", "stop")
    assert complete(extra_body={"top_k": 1, "min_p": 0.5}, temperature=1.5) == (ANSWER, "stop")


def test_the_same_seed_gives_the_same_text(client):
    def complete(seed):
        options = {"temperature": 5.0, "top_p": 1, "max_tokens": 30, "seed": seed}
        extra = {"top_k": 0, "min_p": 0, "ignore_eos": True, "repeat_penalty": 1.3}
        return client.chat.completions.create(model="x", messages=ASK, extra_body=extra, **options).choices[0].message.content

    assert complete(1) == complete(1)
    assert len({complete(seed) for seed in range(4)}) > 1


def test_log_probabilities(client, model):
    reply = client.chat.completions.create(model="x", messages=ASK, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == ANSWER
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in content)
    assert content[0].logprob == content[0].top_logprobs[0].logprob > content[0].top_logprobs[1].logprob
    assert bytes(content[0].bytes) == b"H"
    chunks = client.chat.completions.create(model="x", messages=ASK, logprobs=True, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-4)
    legacy = client.completions.create(model="x", prompt="say:", logprobs=2).choices[0].logprobs
    assert "".join(legacy.tokens) == ANSWER
    assert legacy.text_offset == list(range(len(ANSWER)))
    assert [len(top) for top in legacy.top_logprobs] == [2] * len(ANSWER)


def test_cached_tokens_of_a_prompt(client):
    def cached_tokens(content):
        reply = client.chat.completions.create(model="x", messages=[{"role": "user", "content": content}])
        return reply.usage.prompt_tokens_details.cached_tokens

    cached_tokens("a long beginning that stays the same, one")
    assert cached_tokens("a long beginning that stays the same, two") >= len("a long beginning that stays the same, ")


def test_models(client):
    assert [m.id for m in client.models.list()] == ["reciter"]
    assert client.models.retrieve("reciter").owned_by == "ggufmill"
    with pytest.raises(openai.NotFoundError, match="only reciter"):
        client.models.retrieve("gpt-4")


def test_errors(client):
    def error(kind="invalid_request_error", **options):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**({"model": "x", "messages": ASK} | options))
        assert caught.value.type == kind
        return caught.value

    assert (error(temperature="hot").param, error(temperature=True).code) == ("temperature", "invalid_value")
    assert error(max_tokens=0).param == "max_tokens"
    assert error(stop=[1]).param == "stop"
    tool = {"type": "function", "function": {"name": "f"}}
    refused = error(tools=[tool])
    assert (refused.param, refused.code) == ("tools", "unsupported_parameter")
    assert "chat template has no place for functions" in refused.message
    assert error(tools=[tool, {"type": "function"}]).param == "tools[1]"
    assert error(tools=[tool], tool_choice="required").code == "unsupported_parameter"
    assert error(messages=[]).param == "messages"
    assert error(messages=[{"role": "king", "content": ""}]).param == "messages[0].role"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert "only text is" in error(messages=[{"role": "user", "content": image}]).message
    refused = error(messages=[{"role": "tool", "content": "4", "tool_call_id": "1"}])
    assert "no tools here" in refused.message
    assert refused.code == "template_error"
    long = error("exceed_context_size_error", messages=[{"role": "user", "content": "x" * 600}])
    assert long.code == "context_length_exceeded"
    assert "holds 512" in long.message
    assert (
        client.chat.completions.create(model="x", messages=ASK).choices[0].message.content == ANSWER
    )  # the server still works


def test_keys(served, model):
    url = served(model, api_key="s3cret-key", warm_up=False)
    assert client_of(url, "s3cret-key").models.list().data
    for wrong in ("s3cret", "S3CRET-KEY", "x"):
        with pytest.raises(openai.AuthenticationError) as caught:
            client_of(url, wrong).chat.completions.create(model="x", messages=ASK)
        assert caught.value.code == "invalid_api_key"
        assert "s3cret" not in str(caught.value)


def load(url):
    """(requests being worked on, requests waiting)"""
    with urllib.request.urlopen(f"{url}/health") as response:
        health = json.load(response)
    return health["slots_processing"], health["waiting"]


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_the_stream_ends_the_generation(endless):
    client = client_of(endless)
    stream = client.chat.completions.create(model="x", messages=ASK, stream=True)
    texts = (chunk.choices[0].delta.content for chunk in stream)
    assert "".join(next(texts) for _ in range(20)).startswith("abcdefgabcd")
    assert load(endless) == (1, 0)
    stream.close()
    wait_until(lambda: load(endless) == (0, 0))
    assert client.chat.completions.create(model="x", messages=ASK, max_tokens=2).choices[0].message.content == "ab"


def test_closing_the_stream_ends_all_choices(endless):
    stream = client_of(endless).chat.completions.create(model="x", messages=ASK, stream=True, n=3)
    next(iter(stream))
    wait_until(lambda: load(endless) == (1, 2))
    stream.close()
    wait_until(lambda: load(endless) == (0, 0))


def test_a_client_timeout_ends_the_generation(endless):
    with pytest.raises(openai.APITimeoutError):
        client_of(endless).with_options(timeout=0.3).chat.completions.create(model="x", messages=ASK)
    wait_until(lambda: load(endless) == (0, 0))


def test_a_full_queue_gives_503(endless):
    client = client_of(endless)
    first = client.chat.completions.create(model="x", messages=ASK, stream=True)
    next(iter(first))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.chat.completions.create, model="x", messages=ASK, max_tokens=3)

        wait_until(lambda: load(endless) == (1, 1))
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="x", messages=ASK, max_tokens=1)
        assert caught.value.status_code == 503
        assert caught.value.code == "server_overloaded"
        first.close()
        assert waiting.result().choices[0].message.content == "abc"


def test_parallel_requests(served, reciting):
    url = served(reciting("abcdefg", end=False, n_ctx=4000, parallel=2))
    client = client_of(url)
    one = client.chat.completions.create(model="x", messages=ASK, stream=True)
    next(iter(one))
    two = client.chat.completions.create(model="x", messages=[*ASK, *ASK], max_tokens=5)  # does not wait for the first
    assert two.choices[0].message.content == "abcde"
    texts = (chunk.choices[0].delta.content for chunk in one)
    assert "".join(next(texts) or "" for _ in range(10)).startswith("abcdefgab")
    one.close()


def test_clients_get_an_error_when_the_server_stops(served, reciting):
    stop = threading.Event()
    url = served(reciting("abcdefg", end=False, n_ctx=200_000), stop=stop)
    stream = client_of(url).chat.completions.create(model="x", messages=ASK, stream=True)
    next(iter(stream))
    stop.set()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
