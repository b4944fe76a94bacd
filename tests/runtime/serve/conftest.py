"""A model that recites a given text, and servers for it."""

import dataclasses
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest

from ggufmill.runtime import load_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def random_model(tiny):
    """random_model(keys, **settings of load_model): one with random weights, and these keys in its metadata."""

    def build(keys, **settings):
        return load_model(dataclasses.replace(tiny, metadata=tiny.metadata | keys), **settings)

    return build


@pytest.fixture(scope="session")
def reciting(tiny):
    """reciting(text, end=True, n_ctx=512): a model that recites a text (no byte twice) after ':', then ends or starts again."""

    def build(text, end=True, **settings):
        ids = [2 + ord(":"), *[2 + b for b in text.encode()]]
        ids.append(1 if end else ids[1])
        n = tiny.tensors["token_embd.weight"].n_rows
        directions = np.random.default_rng(0).standard_normal((n, 32)).astype(np.float32)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        head = np.zeros((n, 32), np.float32)
        for token, following in pairwise(ids):
            head[following] += 50 * directions[token]
        arrays = {
            "token_embd.weight": directions,
            "output.weight": head,
            "blk.0.attn_output.weight": np.zeros((32, 32), np.float32),
            "blk.0.ffn_down.weight": np.zeros((32, 48), np.float32),
        }
        tensors = {
            name: dataclasses.replace(tiny.tensors[name], read=lambda start, stop, array=array: array[start:stop])
            for name, array in arrays.items()
        }
        metadata = tiny.metadata | {
            "general.name": "Reciter <b>",
            "llama.context_length": 4096,
            "tokenizer.chat_template": TEMPLATE,
            "ggufmill.recipe": "attn=q8_0\nffn=q4_K",
        }
        source = dataclasses.replace(tiny, metadata=metadata, tensors=tiny.tensors | tensors)
        return load_model(source, **({"n_ctx": 512} | settings))

    return build


@pytest.fixture(scope="session")
def running():
    """running(serve or serve_models, *its arguments, **its settings) -> URL of a server that runs in a thread until the tests
    end."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from ggufmill.runtime.serve import ServerSettings

    names = {field.name for field in dataclasses.fields(ServerSettings)}
    stops = []

    def start(serve, *positional, **arguments):
        ready, stop, url = threading.Event(), threading.Event(), []
        given = {"port": 0, "stop": stop} | {each: arguments.pop(each) for each in names & arguments.keys()}
        settings = ServerSettings(**given, on_ready=lambda address: (url.append(address), ready.set()))
        thread = threading.Thread(target=serve, args=positional, kwargs=arguments | {"settings": settings})
        thread.start()
        stops.append((settings.stop, thread))
        assert ready.wait(120)
        return url[0]

    yield start
    for stop, _ in stops:
        stop.set()
    for _, thread in stops:
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def served(running):
    """served(model, **arguments and settings of serve) -> URL of a server that runs in a thread until the tests end."""
    from ggufmill.runtime.serve import serve

    return lambda model, **arguments: running(serve, model, **({"options": {"temp": 0}} | arguments))


@pytest.fixture(scope="session")
def write_model():
    """write_model(path, keys={}, tensors=1): a GGUF file with an architecture and tensors, which no runtime can run."""
    gguf = pytest.importorskip("gguf")

    def write(path, keys=None, tensors=1, architecture="llama"):
        path.parent.mkdir(exist_ok=True)
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in (keys or {}).items():
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
        for i in range(tensors):
            writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def browser():
    """Chromium without a window; skips where there is none."""
    pytest.importorskip("selenium")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    chrome = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not chrome or not driver:
        pytest.skip("there is no chromium with its driver")
    options = ChromeOptions()
    options.binary_location = chrome
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1200,800"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options, ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def visit(browser):
    """visit(url): opens the page with empty storage; checks at the end that the console has no errors."""

    def go(url):
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get_log("browser")
        browser.get(url)
        return browser

    yield go
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "401" not in entry["message"]]
    assert severe == []
