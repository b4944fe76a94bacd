"""Every field of every route has a limit, and ten times as much is refused quickly, while the server answers others."""

import ast
import json
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import httpx
from starlette.testclient import TestClient

import ggufmill.runtime.serve as serve_package
from ggufmill.runtime.serve import ServerSettings, make_app
from ggufmill.runtime.serve import app as serve_app
from ggufmill.runtime.serve.model_folder import ModelFolder
from ggufmill.runtime.serve.replies import anthropic_messages, openai_responses
from ggufmill.runtime.serve.requests import field_limits, fields
from ggufmill.runtime.serve.requests.json_body import MAX_DEPTH, MAX_FIELDS, check_fields, count_values, load_body
from ggufmill.runtime.serve.routes import llama_server
from ggufmill.runtime.serve.routes import models as models_module
from ggufmill.runtime.serve.served_models import ServedModels
from ggufmill.runtime.serve.service import MAX_PROMPT_TOKENS
from ggufmill.runtime.serve.work_threads import WorkThreads

QUOTED, OBJECT = '"x"', '{"text":"x"}'
HERE = "http://127.0.0.1:8080"
BODY = 8 << 20  # bytes of a request, the default of --max-body
SECONDS = 1.0  # of the processor, for one refused request; most take some milliseconds
TABLES = ("_OPTIONS", "_UNSUPPORTED", "_GRAMMAR_FIELDS", "_OTHER_FIELDS", "_CHAT_FIELDS", "_COMPLETION_FIELDS", "_OWN_FIELDS")
TABLES += ("_INFILL_FIELDS", "_SAME_FIELDS", "_RENAMED", "_ECHOED")


@pytest.fixture(scope="module")
def model(reciting):
    return reciting("Hi you!")


@pytest.fixture(scope="module", params=["one model", "several models"])
def make(request, model, tmp_path_factory, write_model):
    """make(): the application, for one model or for a folder with one."""
    slots, folder = tmp_path_factory.mktemp("slots"), tmp_path_factory.mktemp("models")
    write_model(folder / "m.gguf")

    def load(path, name):
        service = serve_app.make_service(model, None, WorkThreads(), alias=name)
        return service, serve_app.service_routes(service, slots)

    if request.param == "one model":
        return lambda: make_app(model, ServerSettings(slot_save_path=slots))
    return lambda: serve_app.make_models_app(
        ServedModels(ModelFolder(folder), WorkThreads(), load=load, needed=lambda path: 1, memory=10)
    )


@pytest.fixture(scope="module")
def limits_of_routes(make):
    """path -> the limits that the route reads its requests by; {} for one that reads none."""
    read: list = []

    def recording(body, limits, tokens):
        read.append(limits)
        return check_fields(body, limits, tokens)

    app, found = make(), {}
    with pytest.MonkeyPatch.context() as patch, TestClient(app, base_url=HERE) as client:
        patch.setattr(serve_package.service, "check_fields", recording)
        patch.setattr(models_module, "check_fields", recording)
        for route in app.routes:
            if "POST" in (route.methods or ()):
                read.clear()
                client.post(url_of(route.path), json={"model": "m"})
                found[route.path] = read[-1] if read else {}  # what chooses a model comes before the model's route
    return found


def url_of(path):
    return path.replace("{number:int}", "0") + ("?action=save" if "slots" in path else "")


def test_every_route_that_reads_a_body_has_limits(limits_of_routes):
    assert len(limits_of_routes) >= 24
    assert [path for path, limits in limits_of_routes.items() if not limits] == []
    known = [value for name, value in vars(field_limits).items() if name.isupper() and isinstance(value, dict)]
    assert all(any(limits is each for each in known) for limits in limits_of_routes.values())
    unused = [each for each in known if not any(each is limits for limits in limits_of_routes.values())]
    if "/models/load" not in limits_of_routes:
        unused.remove(field_limits.MODEL)
    assert unused == [each for name, each in vars(field_limits).items() if name.startswith("_") and each in unused]


def fields_that_are_read():
    """Names of fields that the modules of the server take from a `body`: (module, name)."""
    found = set()
    for path in sorted(Path(serve_package.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            key = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
                holder, key = node.func.value, node.args[0]
            elif isinstance(node, ast.Subscript):
                holder, key = node.value, node.slice
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
                holder, key = node.comparators[0], node.left
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and getattr(holder, "id", "") == "body":
                found.add((path.name, key.value))
    for module in (fields, anthropic_messages, openai_responses, llama_server):  # those that are read in loops over tables
        for table in TABLES:
            found.update((Path(module.__file__).name, name) for name in getattr(module, table, ()))
    return found


def test_no_field_is_read_that_has_no_limit(limits_of_routes):
    """A field without a limit would be None at every request (`check_fields`), so that what reads it could not work."""
    read = fields_that_are_read()
    assert len(read) > 120
    every = {name for limits in limits_of_routes.values() for name in limits}
    assert {name for _, name in read} - every == set()
    chat = {name for module, name in read if module == "fields.py"}
    assert chat - {"prompt", "echo", "best_of", "suffix"} <= set(field_limits.CHAT)
    assert {name for module, name in read if module == "anthropic_messages.py"} <= set(field_limits.ANTHROPIC)
    assert {name for module, name in read if module == "openai_responses.py"} <= set(field_limits.RESPONSES)


def test_a_field_without_a_limit_is_not_read():
    body = check_fields(load_body(b'{"n": 2, "new": {"a": [1]}}', 100), {"n": field_limits.CHAT["n"]}, 100)
    assert body == {"n": 2, "new": None}


def excesses(limit):
    """Values of ten times the limit, or as much as a body may have and a little more: (which limit, JSON text)."""
    characters = 10 * limit.characters if limit.characters is not None else BODY
    values = 10 * (limit.values + (MAX_PROMPT_TOKENS if limit.has_tokens else 0))

    def repeated(element, count):
        return ",".join([element] * min(count, BODY // (len(element) + 1) + 1))

    def fields(length, count):
        return ",".join(f'"{i:0>{length}}":1' for i in range(min(count, BODY // (length + 5) + 1)))

    yield "characters", f'"{"x" * characters}"'
    yield "characters in names", f"{{{fields(99, characters // 99 + 1)}}}"
    yield "values", f"[{repeated('1', values)}]"
    yield "texts", f"[{repeated(QUOTED, values)}]"
    yield "objects", f"[{repeated(OBJECT, values // 2)}]"
    yield "fields", f"{{{fields(7, values)}}}"
    yield "depth", "[" * (10 * limit.depth) + "]" * (10 * limit.depth)
    yield "depth of objects", '{"a":' * (10 * limit.depth) + "1" + "}" * (10 * limit.depth)


def kinds_of_routes(limits_of_routes):
    """(path, limits) of one route for each table of limits."""
    return {id(limits): (path, limits) for path, limits in limits_of_routes.items()}.values()


@pytest.mark.slow
def test_ten_times_as_much_of_any_field_is_refused(make, limits_of_routes):
    """What is larger than 1 MB is tried once for each limit: it takes long to send. Of several models the tables are the same:
    there it is the first field of each."""
    tried, made, large, fields = 0, {}, set(), None if "/models/load" not in limits_of_routes else 1
    with TestClient(make(), base_url=HERE) as client:
        for path, limits in kinds_of_routes(limits_of_routes):
            for name, limit in list(limits.items())[:fields]:
                for what, value in made.get(limit) or made.setdefault(limit, list(excesses(limit))):
                    data = f'{{"{name}":{value}}}'
                    if len(data) > 1 << 20:
                        if (limit, what) in large:
                            continue
                        large.add((limit, what))
                    if len(data) > BODY + 1000:
                        data = data[: BODY + 1000]  # more is not read either
                    before = time.process_time()
                    response = client.post(url_of(path), content=data)
                    spent = time.process_time() - before
                    error = response.json()["error"]
                    assert response.status_code in (400, 413), (path, name, what, error)
                    assert error["code"] in ("too_large", "invalid_value"), (path, name, what, error)
                    assert error["param"] in (name, None), (path, name, what, error)
                    assert ("may have" in error["message"] and error["code"]) or len(data) > BODY, (path, name, what, error)
                    assert spent < SECONDS, (path, name, what, spent)
                    assert len(response.content) < 1000
                    tried += 1
    assert tried > 4 * sum(len(list(limits)[:fields]) for _, limits in kinds_of_routes(limits_of_routes))


def test_the_whole_of_a_request_has_limits(make):
    bodies = {
        "values of a field that is not read": '{"new":[' + ",".join(["1"] * 5_000_000) + "]}",
        "levels of a field that is not read": '{"new":' + "[" * 10 * MAX_DEPTH + "]" * 10 * MAX_DEPTH + "}",
        "fields": "{" + ",".join(f'"f{i}":1' for i in range(10 * MAX_FIELDS)) + "}",
        "many fields": "{" + ",".join(f'"f{i}":1' for i in range(500_000)) + "}",
        "brackets that do not end": "[" * BODY,
        "large numbers": '{"prompt":[' + ",".join(["9" * 4000] * 2000) + "]}",
    }
    with TestClient(make(), base_url=HERE) as client:
        for what, data in bodies.items():
            before = time.process_time()
            response = client.post("/v1/completions", content=data)
            assert response.status_code in (400, 413), what
            assert time.process_time() - before < SECONDS, what
        # What is not read may be long: it costs nothing.
        response = client.post("/v1/completions", json={"prompt": ":", "max_tokens": 1, "new": "x" * 1_000_000})
        assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "new")


def test_values_are_counted_as_they_are():
    texts = [
        "[1,[2,{}]]",
        '{"a":[1,2],"b":{"c":null}}',
        '"[{,:"',
        '["\\"[","\\\\",{"\\\\\\"":1}]',
        "1",
        "[]",
        '{"a":"\\u0022["}',
    ]

    def values_of(value):
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(values_of, value.values()))
        return 1 + sum(map(values_of, value)) if isinstance(value, list) else 1

    def nodes_of(value):
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(nodes_of, value.values()))
        return 1 + sum(map(nodes_of, value)) if isinstance(value, list) else 0

    def depth_of(value):
        below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if below is None else 1 + max(map(depth_of, below), default=0)

    for text in texts:
        value, counts = json.loads(text), count_values(text.encode())
        assert counts.values >= values_of(value)
        assert (counts.nodes, counts.depth) == (nodes_of(value), depth_of(value)), text
    long = json.dumps(["\\" * 7 + '"[', {"a": 'x"'}] * 300_000)  # more than is counted at a time
    assert count_values(long.encode())[1:] == (600_001, 2)


MESSAGE = {"role": "user", "content": "x"}
# Requests that took seconds of the event loop, of the engine or of the threads for texts, and the largest that are accepted.
LARGE = {
    "samplers": ("/v1/completions", {"prompt": ":", "samplers": ["top_k"] * 100_000}),
    "letters of samplers": ("/v1/completions", {"prompt": ":", "samplers": "k" * 7_900_000}),
    "as many samplers as there may be": ("/v1/completions", {"prompt": ":", "max_tokens": 20, "samplers": ["top_k"] * 16}),
    "a text of logit_bias": ("/v1/completions", {"prompt": ":", "logit_bias": [["x" * 7_900_000, -1]]}),
    "texts of logit_bias": ("/v1/completions", {"prompt": ":", "logit_bias": [["hello there 1 " * 130, -1]] * 4096}),
    "as many biases as there may be": ("/v1/completions", {"prompt": ":", "logit_bias": [["hello there 1", -1]] * 4096}),
    "a prompt": ("/v1/completions", {"prompt": "word " * 1_500_000}),
    "token ids": ("/v1/completions", {"prompt": [5] * 2_500_000}),
    "as many token ids as there may be": ("/v1/completions", {"prompt": [5] * MAX_PROMPT_TOKENS}),
    "tools": ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [{"type": "function"}] * 100_000}),
    "fields": ("/v1/completions", {"prompt": ":", **{f"k{i}": 1 for i in range(400_000)}}),
    "variables": ("/v1/chat/completions", {"messages": [MESSAGE], "chat_template_kwargs": {"a": [[]] * 100_000}}),
    "as many messages as there may be": ("/v1/chat/completions", {"messages": [MESSAGE] * 20_000}),
    "items": ("/v1/responses", {"input": [MESSAGE] * 20_000}),
    "blocks": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{**MESSAGE, "content": [{"type": "text", "text": "x"}] * 15_000}]},
    ),
    "as many texts as there may be": ("/v1/embeddings", {"input": ["Hi you!"] * 2048}),
    "texts in pieces": ("/tokenize", {"content": "a b " * 500, "with_pieces": True}),
    "tokens of a text": ("/detokenize", {"tokens": [65] * MAX_PROMPT_TOKENS}),
    "prompts with one suffix": ("/v1/completions", {"prompt": [":"] * 128, "suffix": "x" * 400}),
}


@pytest.mark.slow
def test_others_are_answered_beside_large_requests(served, reciting):
    """/health and a short answer; the time is that of the wall, so that it has room for other programs."""
    url = served(reciting("Hi you!", parallel=2), warm_up=False)
    done, longest, sound = threading.Event(), {"/health": 0.0, "/v1/completions": 0.0}, {"prompt": ":", "max_tokens": 2}

    def ask(path):
        with httpx.Client(base_url=url, timeout=60) as client:
            while not done.is_set():
                before = time.monotonic()
                reply = client.get(path) if path == "/health" else client.post(path, json=sound)
                assert reply.status_code == 200
                longest[path] = max(longest[path], time.monotonic() - before)
                time.sleep(0.005)

    assert httpx.post(f"{url}/v1/completions", json=sound, timeout=300).status_code == 200  # compiles kernels
    threads = [threading.Thread(target=ask, args=(path,)) for path in longest]
    for thread in threads:
        thread.start()
    try:
        for what, (path, body) in LARGE.items():
            data = json.dumps(body)
            before = time.process_time()
            reply = httpx.post(url + path, content=data, headers={"Content-Type": "application/json"}, timeout=300)
            assert reply.status_code in (200, 400), (what, reply.text[:300])
            assert time.process_time() - before < 5, what
            if not what.startswith(("as many", "texts in", "tokens")):
                assert reply.status_code == 400, what
            assert max(longest.values()) < 5, (what, longest)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
