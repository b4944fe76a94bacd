"""What a client can hold up: connections, headers, bodies, long texts, long stop texts, host names, and the log."""

import asyncio
import ipaddress
import json
import logging
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import httpx
from starlette.testclient import TestClient

from ggufmill.errors import FormatError
from ggufmill.runtime.generation.generate import _overlap
from ggufmill.runtime.generation.repetition import find_breakers
from ggufmill.runtime.line_limit import LineLimit
from ggufmill.runtime.serve import ServerSettings, connections, make_app, memory_middleware
from ggufmill.runtime.serve.responses import dump_in_pieces
from ggufmill.runtime.serve.security_middleware import known_hosts
from ggufmill.runtime.serve.tool_calls.prompt_renderer import PromptRenderer

HERE = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def model(reciting):
    return reciting("Hi you!")


PROXY = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}


def test_a_body_that_does_not_arrive(model):
    async def slow_body():
        yield b'{"prompt":'
        await asyncio.sleep(30)
        yield b'"x"}'

    async def ask():
        app = make_app(model, ServerSettings(body_seconds=0.3))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HERE) as client:
            return await client.post("/v1/completions", content=slow_body())

    response = asyncio.run(ask())
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(model, monkeypatch):
    def encode(*arguments):
        raise AssertionError("encoded")

    monkeypatch.setattr(model.tokenizer, "encode", encode)
    with TestClient(make_app(model), base_url=HERE) as client:
        prompt = "abcd " * 200_000
        for path, body in (
            ("completions", {"prompt": prompt}),
            ("chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
        ):
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"


TEXT_FIELDS = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/completions suffix": lambda text: {"prompt": "a", "suffix": text},
    "/completion": lambda text: {"prompt": [text, 5]},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/messages": lambda text: {"max_tokens": 5, "messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/v1/embeddings": lambda text: {"input": [text]},
    "/embedding": lambda text: {"content": text},
    "/tokenize": lambda text: {"content": text},
    "/infill": lambda text: {"input_prefix": text},
    "/infill suffix": lambda text: {"input_suffix": text},
}


@pytest.mark.parametrize("path", TEXT_FIELDS)
def test_texts_of_vocabularies_that_do_not_write_all_bytes_have_a_limit(model, monkeypatch, path):
    """BERT's and unigram vocabularies drop or merge characters, so that a text of any length may be few tokens."""

    def encode(*arguments, **options):
        raise AssertionError("encoded")

    monkeypatch.setattr(model.tokenizer, "_writes_all_bytes", False)
    monkeypatch.setattr(model.tokenizer, "encode", encode)
    with TestClient(make_app(model), base_url=HERE) as client:
        response = client.post(path.partition(" ")[0], json=TEXT_FIELDS[path]("word " * 200_000))
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "bytes, and up to 8176 are read" in error["message"]


def test_short_texts_do_not_wait_for_long_ones(reciting, monkeypatch):
    """Nor for a vocabulary that is searched, nor for JSON that is read."""
    model = reciting("Hi you!", n_ctx=1 << 17)
    go_on, begun, encode = threading.Event(), threading.Semaphore(0), model.tokenizer.encode

    def slow(text, *arguments):
        if len(text) > 1000:
            begun.release()
            assert go_on.wait(120)
        return encode(text, *arguments)

    def slow_search(tokenizer, texts):
        begun.release()
        assert go_on.wait(120)
        return find_breakers(tokenizer, texts)

    monkeypatch.setattr(model.tokenizer, "encode", slow)
    monkeypatch.setattr("ggufmill.runtime.serve.service.find_breakers", slow_search)
    slowly = [("/tokenize", {"content": "x" * 70_000})] * 4
    slowly += [("/v1/completions", {"prompt": "a", "max_tokens": 1, "dry_multiplier": 1})] * 4
    with TestClient(make_app(model, options={"temp": 0}), base_url=HERE) as client:
        statuses = []
        threads = [
            threading.Thread(target=lambda path=path, body=body: statuses.append(client.post(path, json=body).status_code))
            for path, body in slowly
        ]
        for thread in threads:
            thread.start()
        for _ in range(2):  # one of each kind
            assert begun.acquire(timeout=60)
        assert client.post("/tokenize", json={"content": "a"}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a:", "max_tokens": 2}).status_code == 200
        assert statuses == []
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert statuses == [200] * 8


def test_few_wait_for_a_template_and_the_others_are_told_to_come_again(served, model, monkeypatch):
    """Without a queue of their own, forty conversations took all threads that write answers."""
    monkeypatch.setattr("ggufmill.runtime.serve.work_threads._MAX_WAITING", 10)
    go_on, render = threading.Event(), PromptRenderer.render

    def slow(self, messages, variables):
        if len(messages[0]["content"]) > 1:
            assert go_on.wait(120)
        return render(self, messages, variables)

    monkeypatch.setattr(PromptRenderer, "render", slow)
    asked = {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}
    url, replies = served(model, warm_up=False), []

    def post(path, body):
        return httpx.post(url + path, json=body, timeout=120)

    threads = [threading.Thread(target=lambda: replies.append(post("/v1/chat/completions", asked))) for _ in range(15)]
    for thread in threads:
        thread.start()
    try:
        give_up = time.monotonic() + 60
        while len(replies) < 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert [(reply.status_code, reply.headers["retry-after"]) for reply in replies] == [(503, "1")] * 4
        assert post("/v1/completions", {"prompt": "a:", "max_tokens": 2}).status_code == 200
    finally:
        go_on.set()
        for thread in threads:
            thread.join(120)
    assert len(replies) == 15
    assert {reply.status_code for reply in replies} <= {200, 503}  # the engine's own queue is shorter


@pytest.mark.parametrize("name", ["samplers", "logit_bias", "messages", "tools"])
def test_the_engine_and_the_event_loop_have_little_to_do_for_a_field(model, name):
    """Without a limit 100,000 samplers stopped all generation for minutes, and texts of biases the event loop."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    values = {
        "samplers": ["top_k"] * 17,
        "logit_bias": [["x" * 70_000, -1]],
        "messages": [{"role": "user", "content": "x"}] * 40_000,
        "tools": [tool] * 15_000,
    }
    body = {"messages": [{"role": "user", "content": "x"}], name: values[name]}
    with TestClient(make_app(model), base_url=HERE) as client:
        response = client.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_texts_that_the_vocabulary_cannot_write_are_the_clients_fault(model, monkeypatch):
    def encode(*arguments, **options):
        raise FormatError("the vocabulary (tokenizer.ggml.*) cannot write this text: index out of bounds")

    monkeypatch.setattr(model.tokenizer, "encode", encode)
    with TestClient(make_app(model), base_url=HERE) as client:
        for path in (each for each in TEXT_FIELDS if not each.startswith("/infill")):
            response = client.post(path.partition(" ")[0], json=TEXT_FIELDS[path]("x"))
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value"), path
        biased = client.post("/v1/completions", json={"prompt": [5], "logit_bias": [["x", 1]]})
        assert biased.status_code == 400


def test_memory_is_given_back_after_large_requests():
    trimmed = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body", "body": bytes(scope["size"])})

    async def run():
        async def receive():
            return {"type": "http.request", "body": bytes(1000)}

        async def send(message):
            pass

        middleware = memory_middleware.MemoryMiddleware(app, lambda: trimmed.append(1))
        for sizes, expected in (((5, 6), 0), ((memory_middleware.LARGE,) * 3, 1)):
            for size in sizes:
                await middleware({"type": "http", "size": size}, receive, send)
            await asyncio.sleep(0.1)
            assert len(trimmed) == expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_middleware, "_DELAY", 0.0)
        asyncio.run(run())


def test_large_answers_are_written_in_pieces(monkeypatch):
    tokens = [{"token": "x\u2028é\udc80", "logprob": -0.5, "top": [[i, 1e-300] for i in range(5)]} for _ in range(700)]
    value = {
        "choices": [{"index": 0, "logprobs": {"content": tokens}, "é": None}, {}],
        "n": 1.5,
        "empty": [],
        "long": list(range(600)),
    }
    sizes, dumps = [], json.dumps
    monkeypatch.setattr(json, "dumps", lambda each: sizes.append(len(dumps(each))) or dumps(each))
    assert dump_in_pieces(value) == dumps(value)
    assert max(sizes) < len(dumps(value)) / 2


def test_the_least_number_of_tokens(model):
    tokenizer = model.tokenizer
    for text in ("", "a", "Hello there, how are you?", "Größe 中文 " * 50, "\udc80\ud800"):
        n_bytes, n_tokens = len(text.encode("utf-8", "replace")), len(tokenizer.encode(text, add_special=False))
        assert tokenizer.least_tokens(n_bytes) <= n_tokens
        assert n_bytes <= tokenizer.most_bytes(n_tokens)


def test_other_requests_are_answered_while_texts_are_encoded(model, monkeypatch):
    go_on, begun, encode = threading.Event(), threading.Event(), model.tokenizer.encode

    def slow(text, *arguments):
        begun.set()
        assert go_on.wait(120)
        return encode(text, *arguments)

    monkeypatch.setattr(model.tokenizer, "encode", slow)
    with TestClient(make_app(model), base_url=HERE) as client:
        replies = []
        threads = [
            threading.Thread(target=lambda: replies.append(client.post("/tokenize", json={"content": "a"}))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        assert begun.wait(30)
        assert client.get("/health").json()["status"] == "ok"
        go_on.set()
        for thread in threads:
            thread.join(30)
        assert [reply.status_code for reply in replies] == [200] * 5


@pytest.mark.parametrize("stop", [["a" * 5000], ["a"] * 17])
def test_stop_texts_have_limits(model, stop):
    with TestClient(make_app(model), base_url=HERE) as client:
        response = client.post("/v1/completions", json={"prompt": "x", "stop": stop})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stop"


def test_overlap_of_text_and_stop_text():
    def by_definition(text, stop):
        return max((n for n in range(len(stop)) if n <= len(text) and text.endswith(stop[:n])), default=0)

    texts = ["", "a", "ab", "aab", "abab", "xaba", "aaaa", "abaab"]
    for text in texts:
        for stop in texts[1:]:
            assert _overlap(text, stop) == by_definition(text, stop), (text, stop)


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::"])
def test_host_names_are_checked_on_every_address(model, bound):
    settings = ServerSettings(host=bound, hosts=("Mill.Example.org",), api_key="k")
    with TestClient(make_app(model, settings), base_url=HERE) as client:

        def status(host):
            return client.get("/health", headers={"Host": host}).status_code

        assert status("localhost:8080") == status("[::1]:8080") == status("mill.example.org") == 200
        assert status("attacker.example.com") == 403
        assert status("10.1.2.3:8080") == (403 if bound == "127.0.0.1" else 200)


def test_a_proxy_that_ends_tls_on_this_machine_says_so(served, model):
    """Its pages have an origin of https, and so has the request then."""
    url = served(model, warm_up=False)
    headers = {"Origin": url.replace("http:", "https:")}
    statuses = [httpx.get(f"{url}/props", headers=headers | more, timeout=60).status_code for more in ({}, PROXY)]
    assert statuses == [403, 200]
    assert httpx.get(f"{url}/props", headers={"Origin": url} | PROXY, timeout=60).status_code == 403


def test_names_of_this_machine(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan.example")
    assert known_hosts("0.0.0.0") >= {"box.lan.example", "box", "box.local"}
    assert known_hosts("127.0.0.1", ["Other."]) == {"127.0.0.1", "other"}


def test_refused_requests_are_reported_with_their_field(model):
    refused = []
    with TestClient(make_app(model, ServerSettings(on_refused=refused.append)), base_url=HERE) as client:
        client.post("/v1/completions", json={"prompt": "x", "temperature": "hot"})
        client.get("/nothing%0A%1B[31mred")
        client.get("/health", headers={"Host": "attacker.example.com"})
    lines = [str(each) for each in refused]
    assert lines[0].startswith("refused POST /v1/completions: 400 (temperature) temperature has to be")
    assert lines[1].startswith("refused GET /nothing")
    assert all(line.isprintable() for line in lines)
    assert "403" in lines[2]


def test_a_flood_does_not_fill_the_log():
    now = [0.0]
    limit = LineLimit(burst=10, per_second=2, clock=lambda: now[0])
    assert [limit.admit() for _ in range(1000)].count(None) == 990
    now[0] = 1.0
    assert limit.admit() == 990
    assert limit.admit() == 0
    assert limit.admit() is None


def test_messages_of_the_server_are_limited(caplog):
    connections.limit_logs(LineLimit(burst=5, per_second=0))
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(100):
                logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        assert len(caplog.records) == 5
    finally:
        connections.limit_logs(LineLimit())


def test_replies_are_sent_at_once():
    """Without TCP_NODELAY each request of a kept connection waits 40 ms for an acknowledgement."""
    from ggufmill.runtime.serve.listen import _listen

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport):
            delays.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def connect():
        server = await asyncio.get_running_loop().create_server(Accepted, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        while not delays:
            await asyncio.sleep(0.001)
        writer.close()
        server.close()

    delays, listener = [], _listen("127.0.0.1", 0)
    asyncio.run(asyncio.wait_for(connect(), 30))
    assert delays[0]


@pytest.mark.parametrize(("bound", "family"), [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)])
def test_the_printed_address_is_one_that_reaches_the_server(bound, family):
    from ggufmill.runtime.serve.listen import browser_url

    url = urlsplit(browser_url(bound, 8080))
    assert url.port == 8080
    assert not ipaddress.ip_address(url.hostname).is_unspecified
    try:
        with socket.socket(family) as own:
            own.bind((url.hostname, 0))  # an address of this machine
    except OSError:
        assert family == socket.AF_INET6, "IPv4 is always there"
    assert browser_url("box", 80) == "http://box:80"
