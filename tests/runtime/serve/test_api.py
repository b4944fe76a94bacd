"""Invalid requests, security checks and details of the HTTP interface, without a socket."""

import base64
import dataclasses
import hashlib
import json
import re
import time

import numpy as np
import pytest

from ggufmill.formats import MillError, PlanError
from ggufmill.runtime import load_model

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from ggufmill.runtime.serve import Engine, ServerSettings, make_app
from ggufmill.runtime.serve.engine import Busy
from ggufmill.runtime.serve.tasks import EndEvent, Task

ANSWER = "Hi <b>you!"
ASK = {"messages": [{"role": "user", "content": "Hello"}]}
HERE = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def model(reciting):
    return reciting(ANSWER)


@pytest.fixture(scope="module")
def client(model):
    with TestClient(make_app(model, ServerSettings(max_body=20_000), options={"temp": 0}), base_url=HERE) as client:
        yield client


def error(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_a_body_that_is_not_a_json_object(client):
    for content in (b"", b"{", b"\xff", '{"messages": []}'.encode("utf-16")):
        assert error(client.post("/v1/chat/completions", content=content))["code"] == "invalid_json"
    assert error(client.post("/v1/chat/completions", content=b"[" * 9000))["code"] == "too_large"
    assert "JSON object" in error(client.post("/v1/completions", json=[1]))["message"]


def test_a_body_that_is_too_large(client):
    for content in (b" " * 20_001, (b" " * 1000 for _ in range(21))):
        assert error(client.post("/v1/chat/completions", content=content), 413)["code"] == "too_large"
    assert client.post("/v1/chat/completions", content=b" " * 19_000 + json.dumps(ASK).encode()).status_code == 200


def test_variables_of_a_template_with_names_of_python(client):
    """A variable called like a parameter of the functions that render is a variable like any other."""
    for name in ("self", "args", "kwargs", "context"):
        response = client.post("/apply-template", json={**ASK, "chat_template_kwargs": {name: 1}})
        assert response.status_code == 200, response.text


def test_unknown_paths_and_methods(client):
    assert error(client.get("/v1/nothing"), 404)["type"] == "not_found_error"
    assert "GET is not possible" in error(client.get("/v1/completions"), 405)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", -1),
        ("temperature", [1]),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("max_tokens", True),
        ("max_tokens", 1e9),
        ("seed", "x"),
        ("stop", {"a": 1}),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("model", 3),
        ("logprobs", 2),
        ("messages", "Hello"),
        ("chat_template_kwargs", [1]),
        ("chat_template_kwargs", {"messages": []}),
        ("stream_options", 1),
        ("reasoning_effort", 1),
        ("response_format", {"type": "json"}),
        ("logit_bias", 5),
        ("logit_bias", {"5000": 1}),
        ("logit_bias", [[5, 1, 1]]),
        ("logit_bias", [[True, 1]]),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("typical_p", 0),
        ("xtc_threshold", 2),
        ("dry_base", 0.5),
        ("dry_allowed_length", 1.5),
        ("dry_sequence_breakers", "\n"),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", ["x"] * 17),
        ("mirostat", 3),
    ],
)
def test_invalid_fields_are_named(client, field, value):
    body = error(client.post("/v1/chat/completions", json=ASK | {field: value}))
    assert field in body["message"]
    assert body["param"] == field


def test_samplers_of_requests_are_those_of_generate(client, model):
    """DRY forbids what the model would recite again, unless a breaker stands before it; Mirostat takes the place of filters."""
    again = {"prompt": f"{ANSWER}:Hi <", "max_tokens": 1, "temperature": 0}
    assert client.post("/v1/completions", json=again).json()["choices"][0]["text"] == "b"
    for fields in ({"dry_sequence_breakers": []}, {"dry_sequence_breakers": [":"]}, {"dry_sequence_breakers": ["<"]}):
        reply = client.post("/v1/completions", json=again | {"dry_multiplier": 1000} | fields).json()
        assert (reply["choices"][0]["text"] == "b") == (fields["dry_sequence_breakers"] == ["<"])
    hot = {"prompt": "a:", "temperature": 100, "top_k": 1, "mirostat_tau": 10, "max_tokens": 20, "seed": 1}
    replies = [client.post("/v1/completions", json=hot | {"mirostat": version}).json() for version in (0, 1, 2)]
    assert [reply["choices"][0]["text"] == ANSWER for reply in replies] == [True, False, False]


def test_invalid_messages_are_named(client):
    for message, where in (
        ("x", "messages[1]"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
        ({"content": "x"}, "messages[1].role"),
    ):
        body = error(client.post("/v1/chat/completions", json={"messages": [*ASK["messages"], message]}))
        assert body["param"] == where


def test_invalid_prompts_are_named(client):
    for prompt in (None, 5, [[0], [1.5]], [1.5], [True], {}, [5000], [-1]):
        assert error(client.post("/v1/completions", json={"prompt": prompt}))["param"] == "prompt"
    assert client.post("/v1/completions", json={"prompt": ["a:"], "max_tokens": 1}).json()["choices"][0]["text"] == "H"
    assert client.post("/v1/completions", json={"prompt": "", "max_tokens": 1}).status_code == 200  # begins with BOS
    assert error(client.post("/v1/completions", json={"prompt": []}))["code"] == "invalid_value"


def test_ignored_fields_are_listed_in_a_header(client):
    response = client.post("/v1/chat/completions", json=ASK | {"cache_prompt": True, "tempreture": 1, "a\nb": 1, "user": "me"})
    assert response.headers["x-ignored-fields"] == "cache_prompt, tempreture"
    neutral = {"n": 1, "tools": [], "logit_bias": {}, "response_format": {"type": "text"}, "stop": None, "seed": -1}
    response = client.post("/v1/chat/completions", json=ASK | neutral)
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers


def test_content_parts_and_the_developer_role(client):
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    assert client.post("/apply-template", json={"messages": messages}).json() == {"prompt": "<s>s:D\nu:Hello\na:\na:"}


def test_a_last_message_of_the_assistant_is_continued(client):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi "}]
    rendered = client.post("/apply-template", json={"messages": messages}).json()
    assert rendered == {"prompt": "<s>u:Hello\na:Hi "}
    anthropic = {"messages": messages, "max_tokens": 50}
    reply = client.post("/v1/messages", json=anthropic).json()
    assert reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"] == len("u:Hello\na:Hi ") + 1


def test_server_sent_events_of_a_stream(client):
    response = client.post("/v1/chat/completions", json=ASK | {"stream": True, "max_tokens": 2})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "H", "i", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    timings = chunks[-1]["timings"]
    assert set(timings) == {"cache_n"} | {
        f"{part}_{name}" for part in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")
    }
    assert timings["predicted_n"] == 2


def test_tokenize_and_detokenize(client):
    ids = client.post("/tokenize", json={"content": "<s>é"}).json()["tokens"]
    assert ids == [0, 2 + 0xC3, 2 + 0xA9]
    assert client.post("/tokenize", json={"content": "<", "add_special": True}).json()["tokens"] == [0, 2 + ord("<")]
    assert len(client.post("/tokenize", json={"content": "<s>", "parse_special": False}).json()["tokens"]) == 3
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "<s>é"
    assert error(client.post("/tokenize", json={}))["param"] == "content"
    assert error(client.post("/detokenize", json={"tokens": [258]}))["param"] == "tokens"
    assert error(client.post("/detokenize", json={"tokens": "x"}))["param"] == "tokens"


def test_the_tokenizer_as_clients_of_vllm_ask_for_it(client):
    info = client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"], info["add_bos_token"]) == ("<s>", "</s>", None, True)
    assert (info["vocab_size"], info["model_max_length"]) == (258, 512)
    assert "m.content" in info["chat_template"]
    assert client.post("/tokenize", json={"prompt": "<"}).json() == {
        "tokens": [0, 2 + ord("<")],
        "count": 2,
        "max_model_len": 512,
    }
    body = {"prompt": "<", "add_special_tokens": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == [2 + ord("<")]
    assert client.post("/detokenize", json={"tokens": [2 + ord("<")]}).json()["prompt"] == "<"
    assert error(client.post("/tokenize", json={"prompt": 1}))["param"] == "prompt"


def test_props_describe_the_model(client, model):
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 0
    assert (props["bos_token"], props["eos_token"], props["total_slots"]) == ("<s>", "</s>", 1)
    assert "m.content" in props["chat_template"]
    assert "chat_template_tool_use" not in props
    assert (props["endpoint_slots"], props["endpoint_metrics"], props["modalities"]["vision"]) == (True, False, False)
    assert (props["model_ftype"], props["build_info"].split()[0]) == ("F32", "ggufmill")
    about = props["model"]
    elements = sum(t.n_elements for t in model.source.tensors.values())
    assert (about["name"], about["architecture"], about["parameters"]) == ("Reciter <b>", "llama", elements)
    assert (about["bytes"], about["bits_per_weight"]) == (4 * elements, 32)
    assert about["types"] == [{"type": "f32", "tensors": 12, "parameters": elements, "bytes": 4 * elements}]
    assert about["cache"] == {"cache_k": "f16", "cache_v": "f16"}
    assert (about["n_ctx"], about["n_ctx_train"], about["layers"], about["vocabulary"]) == (512, 4096, 1, 258)
    assert about["about"] == {"recipe": "attn=q8_0\nffn=q4_K"}


def test_health(client):
    assert client.get("/health").json() == {"status": "ok", "slots_processing": 0, "slots_idle": 1, "waiting": 0}


def test_the_page_may_run_only_its_own_script(client):
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    for tag in ("script", "style"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|\bon[a-z]+=", response.text)
    assert response.headers["x-frame-options"] == "DENY"


# What no browser sends: a port that is none, or something in front of or behind the name.
NO_HOSTS = [
    "localhost:80@evil.example",
    "[::1]evil.example",
    "localhost:evil",
    "localhost:",
    "localhost:65536",
    "[::1",
    "[::1]:",
]
NO_HOSTS += ["user@localhost", "localhost/evil", "localhost, evil.example", " localhost", "http://localhost", "[localhost]"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8080", "", "localhost.evil.example", *NO_HOSTS]
)
def test_other_host_names_are_refused_on_the_loopback_address(client, host):
    for path in ("/", "/props", "/health"):
        assert error(client.get(path, headers={"host": host}), 403)["code"] == "forbidden_host"


def test_loopback_host_names_are_accepted(client, model):
    for host in ("localhost", "localhost:9", "127.0.0.1", "127.1.2.3:80", "[::1]:8080"):
        assert client.get("/health", headers={"host": host}).status_code == 200
    with TestClient(
        make_app(model, ServerSettings(host="0.0.0.0", hosts=["my-server.example"])), base_url="http://my-server.example"
    ) as public:
        assert public.get("/health").status_code == 200


def test_requests_of_other_origins_are_refused(client):
    other_schemes = [HERE.replace("http", scheme) for scheme in ("https", "ws", "chrome-extension", "file")]
    no_origins = ["127.0.0.1:8080", "", f"{HERE}/", f"{HERE}@evil.example", f"{HERE}, {HERE}", "http://127.0.0.1"]
    others = ["https://evil.example", "null", "http://localhost:8080", "http://127.0.0.1:9999"]
    for origin in (*others, *other_schemes, *no_origins):
        response = client.post("/v1/chat/completions", json=ASK, headers={"origin": origin})
        assert error(response, 403)["code"] == "forbidden_origin"
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert client.post("/v1/chat/completions", json=ASK, headers={"origin": HERE}).status_code == 200
    at_the_port_of_the_scheme = {"host": "LocalHost", "origin": "http://localhost:80"}
    assert client.post("/v1/chat/completions", json=ASK, headers=at_the_port_of_the_scheme).status_code == 200
    assert client.options("/v1/chat/completions", headers={"origin": "https://evil.example"}).status_code in (403, 405)


def test_all_but_the_page_and_health_need_the_key(model):
    with TestClient(make_app(model, ServerSettings(api_key="clé")), base_url=HERE) as client:
        for path in ("/props", "/v1/models", "/v1/nothing"):
            response = client.get(path)
            assert error(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert error(client.post("/v1/completions", json={"prompt": "a"}), 401)["code"] == "invalid_api_key"
        for value in ("Bearer ", "Bearer cl", "Basic clé", "clé", "Bearer clé x"):
            assert client.get("/props", headers={"authorization": value.encode()}).status_code == 401
        assert client.get("/props", headers={"authorization": "bearer clé".encode()}).status_code == 200
        assert client.get("/").status_code == client.get("/health").status_code == 200
        # With a key, any origin is accepted: its requests need the key as well.
        headers = {"authorization": "Bearer clé".encode(), "origin": b"https://my-frontend.example"}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_model_without_a_template_serves_completions(reciting):
    model = reciting(ANSWER)
    del model.source.metadata["tokenizer.chat_template"]
    with TestClient(make_app(model, options={"temp": 0}), base_url=HERE) as client:
        body = error(client.post("/v1/chat/completions", json=ASK))
        assert body["code"] == "no_chat_template"
        assert "--template" in body["message"]
        assert client.get("/props").json()["chat_template"] == ""
        assert client.post("/v1/completions", json={"prompt": "a:"}).json()["choices"][0]["text"] == ANSWER
    with TestClient(make_app(model, ServerSettings(template="chatml")), base_url=HERE) as client:
        assert client.post("/apply-template", json=ASK).json()["prompt"].startswith("<|im_start|>user\nHello")
    with pytest.raises(PlanError, match="no chat template 'nope'"):
        make_app(model, ServerSettings(template="nope"))
    with pytest.raises(PlanError, match="temp"):
        make_app(model, options={"temp": -1})


def test_a_model_with_nan_weights_gives_errors_and_the_server_goes_on(reciting, tiny):
    good = reciting(ANSWER)
    broken = np.full((48, 32), np.nan, np.float32)
    tensor = dataclasses.replace(tiny.tensors["blk.0.ffn_gate.weight"], read=lambda start, stop: broken[start:stop])
    tensors = good.source.tensors | {"blk.0.ffn_gate.weight": tensor}
    model = load_model(dataclasses.replace(good.source, tensors=tensors), n_ctx=64)
    with TestClient(make_app(model), base_url=HERE) as client:
        for _ in range(2):
            assert "blk.0.ffn_gate.weight" in error(client.post("/v1/chat/completions", json=ASK), 500)["message"]
        stream = client.post("/v1/chat/completions", json=ASK | {"stream": True})
        last = json.loads(stream.text.split("\n\n")[-3].removeprefix("data: "))
        assert last["error"]["type"] == "server_error"
        assert client.get("/health").json()["slots_processing"] == 0


def test_the_engine_survives_exceptions_of_listeners(model):
    ends = []
    engine = Engine(model, on_end=ends.append)

    def fails(event):
        raise RuntimeError("the event loop is closed")

    try:
        engine.submit(Task([0, 2 + ord(":")], {"temp": 0}, fails))
        events = []
        engine.submit(Task([0, 2 + ord(":")], {"temp": 0}, events.append))
        engine.submit(Task([0], {"heat": 1}, events.append))
    finally:
        deadline = time.monotonic() + 120
        while len(ends) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.close()
    assert [end.reason for end in ends[:2]] == ["cancelled", "eos"]
    assert "".join(event.text for event in events[:-2]) == ANSWER
    assert isinstance(events[-1], EndEvent)
    assert isinstance(events[-1].error, MillError)
    with pytest.raises(Busy, match="shutting down"):
        engine.submit(Task([0], {}, fails))
