"""Several models in one server: chosen by requests, loaded when they are asked for, unloaded for others, never at work."""

import gc
import json
import sys
import threading
import weakref

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import httpx
from served_models import PATIENCE, TEXTS, Opening, complete, loaded_at, statuses, streaming, text_of, until
from starlette.testclient import TestClient

from ggufmill import quantize_model
from ggufmill.errors import FormatError
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.serve import serve_models
from ggufmill.runtime.serve.app import make_models_app
from ggufmill.runtime.serve.served_models import ServedModels

DEMO = FOLDER / "demo"


@pytest.fixture(scope="module")
def loaded(reciting):
    """Models that recite without an end, by name."""
    return {name: reciting(text, end=False) for name, text in TEXTS.items()}


@pytest.fixture
def opening(loaded):
    return Opening(loaded)


@pytest.fixture
def folder(tmp_path, write_model):
    for name in TEXTS:
        write_model(tmp_path / f"{name}.gguf")
    return tmp_path


@pytest.fixture
def start(running, opening, folder):
    """start(**arguments of serve_models) -> its URL"""
    return lambda **arguments: running(
        serve_models, folder, opening.open, needed=opening.needed, **({"memory": 1000, "warm_up": False} | arguments)
    )


def test_a_request_chooses_its_model(start, opening):
    url = start()
    assert statuses(url) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
    assert [text_of(url, name) for name in ("a", "b", "a")] == ["Hi ", "Bye", "Hi "]
    assert opening.opened == ["a", "b"]
    assert statuses(url) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    assert httpx.get(f"{url}/props", params={"model": "c"}).json()["model_alias"] == "c"
    reply = complete(url, "a.gguf")  # as llama-server's clients may name it
    assert reply.json()["model"] == "a"
    chat = {"model": "b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert httpx.post(f"{url}/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == "By"
    anthropic = httpx.post(f"{url}/v1/messages", json=chat)
    assert (anthropic.json()["model"], anthropic.json()["content"][0]["text"]) == ("b", "By")
    assert httpx.post(f"{url}/tokenize", json={"model": "a", "content": "x"}).json() == {"tokens": [2 + ord("x")]}
    erased = httpx.post(f"{url}/slots/0", params={"action": "erase", "model": "a"})  # no body
    assert erased.json()["n_erased"] > 0


def test_what_the_list_says(start, folder):
    url = start(most=7, autoload=False)
    (folder / "broken.gguf").write_bytes(b"GGUF")
    complete_list = httpx.get(f"{url}/models").json()
    assert complete_list == httpx.get(f"{url}/v1/models").json()
    assert complete_list["object"] == "list"
    by_name = {each["id"]: each for each in complete_list["data"]}
    assert list(by_name) == ["a", "b", "broken", "c"]
    assert by_name["a"]["status"] == {"value": "unloaded"}
    assert by_name["a"]["aliases"] == ["a.gguf"]
    assert by_name["a"]["size"] == (folder / "a.gguf").stat().st_size
    assert by_name["a"]["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert by_name["broken"]["status"]["failed"] is True
    assert "broken.gguf" in by_name["broken"]["status"]["error"]
    assert str(folder) not in json.dumps(complete_list)  # clients need not know where it is
    assert httpx.get(f"{url}/v1/models/a").json() == by_name["a"]
    assert httpx.get(f"{url}/v1/models/x").status_code == 404
    props = httpx.get(f"{url}/props").json()
    assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 7, False)
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "models": 4, "models_loaded": 0}
    httpx.post(f"{url}/models/load", json={"model": "a"})
    until(lambda: loaded_at(url) == {"a"})
    assert httpx.get(f"{url}/models").json()["data"][0]["meta"]["n_ctx"] == 512


def test_load_and_unload(start, opening):
    url = start(autoload=False)
    error = complete(url, "a").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_loaded", "model")
    assert "/models/load" in error["message"]
    assert httpx.post(f"{url}/models/load", json={"model": "a"}).json() == {"success": True}
    until(lambda: loaded_at(url) == {"a"})
    assert text_of(url, "a") == "Hi "
    assert httpx.post(f"{url}/models/unload", json={"model": "a"}).json() == {"success": True}
    until(lambda: loaded_at(url) == set())
    assert httpx.post(f"{url}/models/unload", json={"model": "a"}).json()["error"]["code"] == "model_not_loaded"
    body = {"model": "b", "prompt": ":", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", params={"autoload": "true"}, json=body, timeout=PATIENCE).status_code == 200
    assert opening.opened == ["a", "b"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/completions", {"prompt": ":"}, 400, "missing_model"),
        ("POST", "/v1/completions", {"prompt": ":", "model": "x"}, 404, "model_not_found"),
        ("POST", "/v1/completions", {"prompt": ":", "model": 7}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": ":", "model": "a" * 2000}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": ":", "model": "broken"}, 500, "model_not_loadable"),
        ("POST", "/v1/completions", [1], 400, "invalid_json"),
        ("POST", "/models/load", {}, 400, "missing_model"),
        ("POST", "/models/load", {"model": ["a"]}, 400, "invalid_value"),
        ("POST", "/models/load", {"model": "x"}, 404, "model_not_found"),
        ("POST", "/models/unload", {"model": "x"}, 404, "model_not_found"),
        ("GET", "/slots", None, 400, "missing_model"),
        ("GET", "/slots?model=x", None, 404, "model_not_found"),
        ("GET", "/nothing?model=a", None, 404, None),
        ("GET", "/v1/completions?model=a", None, 405, None),
        ("POST", "/models", {"model": "a"}, 405, None),
    ],
)
def test_errors_load_nothing(start, opening, folder, method, path, body, status, code):
    (folder / "broken.gguf").write_bytes(b"GGUF")
    url = start()
    reply = httpx.request(method, f"{url}{path}", json=body) if body is not None else httpx.request(method, f"{url}{path}")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code)
    if code in ("missing_model", "model_not_found"):
        assert "a, b, broken, c" in error["message"]
    assert opening.opened == []


def test_the_only_model_need_not_be_named(start, opening, folder):
    for name in ("b", "c"):
        (folder / f"{name}.gguf").unlink()
    url = start()
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": ":", "max_tokens": 3}, timeout=PATIENCE)
    assert reply.json()["choices"][0]["text"] == "Hi "


@pytest.mark.slow(keep=["limit1"])
@pytest.mark.parametrize("limit", [{"most": 2}, {"most": 0, "memory": 250}])
def test_the_least_recently_used_goes(start, opening, limit):
    url = start(**limit)
    for name, kept in (("a", {"a"}), ("b", {"a", "b"}), ("a", {"a", "b"}), ("c", {"a", "c"}), ("b", {"b", "c"})):
        assert text_of(url, name) == TEXTS[name][:3]
        assert loaded_at(url) == kept
    assert opening.opened == ["a", "b", "c", "b"]


def test_memory_that_a_model_alone_exceeds(start, opening):
    opening.sizes = {"a": 100, "b": 1001}
    url = start(is_strict=True)
    assert text_of(url, "a") == "Hi "
    error = complete(url, "b").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_loadable", "model")
    assert "memory" in error["message"]
    assert (loaded_at(url), opening.opened) == ({"a"}, ["a"])
    url = start()
    assert text_of(url, "a") == "Hi "
    assert text_of(url, "b") == "Bye"  # where no limit was given, it is loaded alone
    assert loaded_at(url) == {"b"}


def test_a_model_at_work_stays_and_others_get_their_turn(start, opening, monkeypatch):
    """b waits for a's answer; a request for a that comes after b's is answered after b's."""
    url, order, go_on, passes = start(most=1), [], threading.Event(), []
    feed = opening.models["a"].feed

    def waits(*given, **named):
        passes.append(given)
        assert len(passes) != 20 or go_on.wait(PATIENCE)
        return feed(*given, **named)

    monkeypatch.setattr(opening.models["a"], "feed", waits)

    def ask(name):
        order.append((name, text_of(url, name)))

    with streaming(url, "a", max_tokens=400) as (lines, ended):
        threads = [threading.Thread(target=ask, args=("b",))]
        threads[0].start()
        until(lambda: statuses(url)["b"] == "loading")
        threads.append(threading.Thread(target=ask, args=("a",)))
        threads[1].start()
        n_seen, was_loaded = len(lines), loaded_at(url)
        go_on.set()
        assert ended.wait(PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
    assert was_loaded <= {"a"}
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
    assert (len(text), n_seen < len(lines)) == (400, True)  # all of its answer, most of which came while b was waiting
    assert lines[-2] == "data: [DONE]"
    assert order == [("b", "Bye"), ("a", "Hi ")]
    assert opening.opened == ["a", "b", "a"]


def test_others_stream_while_a_model_is_loaded(start, opening):
    url = start()
    opening.held = {"b"}
    with streaming(url, "a", max_tokens=-1, ignore_eos=True) as (lines, ended):
        thread = threading.Thread(target=text_of, args=(url, "b"))
        thread.start()
        assert opening.begun.wait(PATIENCE)
        assert statuses(url)["b"] == "loading"
        before = len(lines)
        until(lambda: len(lines) > before + 20 or ended.is_set())
        assert text_of(url, "a") == "Hi "
        opening.go.set()
        thread.join(PATIENCE)
    assert loaded_at(url) == {"a", "b"}


def test_whoever_leaves_while_waiting_loads_nothing(start, opening):
    url = start()
    opening.held = {"a"}
    first = threading.Thread(target=text_of, args=(url, "a"))
    first.start()
    assert opening.begun.wait(PATIENCE)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"model": "b", "prompt": ":"}, timeout=0.2)
    until(lambda: statuses(url) == {"a": "loading", "b": "loading", "c": "unloaded"})
    opening.go.set()
    first.join(PATIENCE)
    until(lambda: statuses(url) == {"a": "loaded", "b": "unloaded", "c": "unloaded"})
    assert opening.opened == ["a"]


def test_as_many_as_may_wait(start, opening):
    url = start(max_queue=2)
    opening.held = {"a"}
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(complete(url, "a").status_code)) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: len(replies) == 2)
    assert replies == [503, 503]
    assert complete(url, "b").status_code == 503
    opening.go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(replies) == [200, 200, 200, 503, 503]


def test_what_failed_is_tried_again_when_there_is_a_reason(start, opening, folder, write_model, loaded):
    model = opening.models["a"]
    opening.models = dict(loaded)
    del opening.models["a"]  # a KeyError: no error that is expected

    def open_file(path, original=opening.open):
        try:
            return original(path)
        except KeyError:
            if path.stem == "a" and len(opening.opened) > 1:
                raise FormatError(f"{path}: damaged") from None
            raise

    opening.open = open_file
    url = start()
    for _ in range(2):
        error = complete(url, "a").json()["error"]
        assert error["code"] == "model_not_loadable"
    assert "KeyError" in error["message"]
    assert opening.opened == ["a"]  # not again for each request
    httpx.post(f"{url}/models/load", json={"model": "a"})
    until(lambda: len(opening.opened) == 2)
    until(lambda: complete(url, "a").json()["error"]["message"] == "a.gguf: damaged")
    shown = httpx.get(f"{url}/models").json()["data"][0]["status"]
    assert shown == {"value": "unloaded", "failed": True, "error": "a.gguf: damaged"}
    assert text_of(url, "b") == "Bye"  # the others are served
    opening.models["a"] = model
    write_model(folder / "a.gguf", {"llama.context_length": 1000})
    assert text_of(url, "a") == "Hi "


def test_a_model_that_was_replaced_is_loaded_anew(start, opening, folder, write_model):
    url = start()
    assert text_of(url, "a") == "Hi "
    write_model(folder / "a.gguf", {"llama.context_length": 1000})
    opening.models = {**opening.models, "a": opening.models["b"]}
    assert text_of(url, "a") == "Bye"
    (folder / "a.gguf").unlink()
    assert complete(url, "a").status_code == 404
    write_model(folder / "d.gguf")
    opening.models["d"] = opening.models["c"]
    assert text_of(url, "d") == "Som"
    assert "a" not in statuses(url)


def test_the_end_of_the_server_ends_what_waits(running, start, opening):
    stop = threading.Event()
    url = start(stop=stop)
    opening.held = {"a"}
    replies = []
    thread = threading.Thread(target=lambda: replies.append(complete(url, "a").status_code))
    thread.start()
    assert opening.begun.wait(PATIENCE)
    stop.set()
    opening.go.set()
    thread.join(PATIENCE)
    assert replies == [503]


def test_memory_is_given_back(running, tmp_path):
    """Nothing of an unloaded model stays: no object, no thread, no mapped file."""
    quantize_model(DEMO, tmp_path / "m.gguf", type="q8_0")
    quantize_model(DEMO, tmp_path / "n.gguf", type="q8_0")
    kept = {"m": [], "n": []}

    def open_file(path):
        model = load_model(path)
        kept[path.stem] += [weakref.ref(model), weakref.ref(model.workers), weakref.ref(model.executable)]
        return model, {"temp": 0}

    url = running(serve_models, tmp_path, open_file, needed=lambda path: 1, memory=10)
    assert text_of(url, "n")
    before = own_threads()
    for _ in range(2):
        assert text_of(url, "m")
        assert is_mapped(tmp_path / "m.gguf") is not False
        assert httpx.post(f"{url}/models/unload", json={"model": "m"}).json() == {"success": True}
        until(lambda: loaded_at(url) == {"n"})
        until(lambda: own_threads() <= before)
        assert [each() for each in kept["m"]] == [None] * len(kept["m"])
        until(lambda: not is_mapped(tmp_path / "m.gguf"))
    assert all(each() is not None for each in kept["n"])
    assert len(kept["m"]) == 6


def own_threads():
    return sum(thread.name.startswith("ggufmill") for thread in threading.enumerate())


def is_mapped(path):
    """Whether a file is in this process's memory; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return str(path) in maps.read()


def test_all_is_closed_at_the_end(opening, folder):
    engines = []

    def app():
        from ggufmill.runtime.serve.app import make_service, service_routes
        from ggufmill.runtime.serve.model_folder import ModelFolder
        from ggufmill.runtime.serve.work_threads import WorkThreads

        threads = WorkThreads()

        def load(path, name):
            service = make_service(opening.open(path)[0], None, threads, alias=name)
            engines.append(service.engine)
            return service, service_routes(service, None)

        return make_models_app(ServedModels(ModelFolder(folder), threads, load=load, needed=opening.needed, memory=1000))

    with TestClient(app(), base_url="http://127.0.0.1:8080") as client:
        for name in "ab":
            assert client.post("/v1/completions", json={"model": name, "prompt": ":", "max_tokens": 1}).status_code == 200
    gc.collect()
    assert len(engines) == 2
    assert not any(engine._thread.is_alive() for engine in engines)
