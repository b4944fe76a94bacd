"""Models that recite, as of a folder that is served, and what is asked of the server."""

import threading
import time
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import httpx

TEXTS = {"a": "Hi you!", "b": "Bye, dr", "c": "Some ya"}  # no byte twice


PATIENCE = 60  # seconds


class Opening:
    """Opens the models of a folder as those that recite, and keeps count. hold(name): loading it waits for `go`."""

    def __init__(self, models):
        self.models, self.opened, self.sizes = models, [], {}
        self.held, self.go, self.begun = set(), threading.Event(), threading.Event()

    def open(self, path):
        self.opened.append(path.stem)
        if path.stem in self.held:
            self.begun.set()
            assert self.go.wait(PATIENCE)
        return self.models[path.stem], {"temp": 0}

    def needed(self, path):
        return self.sizes.get(path.stem, 100)


def complete(url, model, tokens=3, **more):
    body = {"model": model, "prompt": ":", "max_tokens": tokens, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def text_of(url, model):
    reply = complete(url, model)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["text"]


def statuses(url):
    return {each["id"]: each["status"]["value"] for each in httpx.get(f"{url}/models", timeout=PATIENCE).json()["data"]}


def loaded_at(url):
    return {name for name, value in statuses(url).items() if value == "loaded"}


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def streaming(url, model, **more):
    """The answer of a model without an end, as (the lines so far, whether it has ended)."""
    lines, ended, close = [], threading.Event(), threading.Event()

    def read():
        body = {"model": model, "prompt": ":", "stream": True, **more}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply, suppress(httpx.ReadError):
            for line in reply.iter_lines():
                lines.append(line)
                if close.is_set():
                    break
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: lines)
    try:
        yield lines, ended
    finally:
        close.set()
        thread.join(PATIENCE)
