"""Connections: clients that send or read nothing, too many of them, and how many the process can open."""

import json
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from ggufmill.errors import UsageError
from ggufmill.operating_system import process
from ggufmill.runtime.serve import connections


@pytest.fixture(scope="module")
def model(reciting):
    return reciting("Hi you!")


def address(url):
    return "127.0.0.1", int(url.rpartition(":")[2])


def read_all(client):
    client.settimeout(120)
    data = b""
    while True:
        part = client.recv(4096)
        if not part:
            return data
        data += part


def read_answer(client):
    """An answer with a JSON object, of a connection that stays open."""
    client.settimeout(120)
    data = b""
    while not data.endswith(b"}"):
        part = client.recv(4096)
        assert part
        data += part
    return data


def test_half_a_header_is_ended(served, model):
    url = served(model, header_seconds=1.5)
    with socket.create_connection(address(url)) as silent, socket.create_connection(address(url)) as half:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        for client in (silent, half):
            assert read_all(client).startswith(b"HTTP/1.1 408 ")
    # A second header on the same connection has the same limit.
    with socket.create_connection(address(url)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /he")
        assert b"HTTP/1.1 408 " in read_all(client)


def test_an_answer_may_take_longer_than_a_header(served, model):
    url = served(model, header_seconds=1.5)
    request = {"prompt": ":", "max_tokens": 200, "ignore_eos": True}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address(url)) as client:
        client.sendall(head.encode())
        time.sleep(2)
        client.sendall(body)
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


TOKENIZE = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 15\r\n\r\n"


WAITING = {"no byte": b"", "half a header": HEALTH[:-2], "no next request": HEALTH, "half a body": TOKENIZE + b"{"}


@pytest.mark.parametrize("sent", WAITING.values(), ids=WAITING.keys())
def test_a_new_connection_takes_the_place_of_one_that_waits_for_its_client(served, model, sent):
    url = served(model, max_connections=4)
    clients = [socket.create_connection(address(url)) for _ in range(4)]
    try:
        for client in clients:
            client.sendall(sent)
            if sent == HEALTH:
                assert read_answer(client).startswith(b"HTTP/1.1 200 ")
        clients.append(socket.create_connection(address(url)))
        clients[4].sendall(HEALTH)
        assert read_answer(clients[4]).startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionResetError):  # if it is closed before what it has sent is read
            assert read_all(clients[0]).startswith(b"HTTP/1.1 408 ")  # the one that has waited longest
        for client in clients[1:4]:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # is still open
                client.recv(4096)
    finally:
        for client in clients:
            client.close()


def test_too_many_requests_at_once_get_503_and_the_server_goes_on(served, model, monkeypatch):
    go_on, begun, encode = threading.Event(), threading.Semaphore(0), model.tokenizer.encode

    def slow(text, *arguments):
        begun.release()
        assert go_on.wait(120)
        return encode(text, *arguments)

    monkeypatch.setattr(model.tokenizer, "encode", slow)
    url = served(model, max_connections=2)
    busy = [socket.create_connection(address(url)) for _ in range(2)]
    try:
        for client in busy:
            client.sendall(TOKENIZE + b'{"content":"a"}')
        assert begun.acquire(timeout=120)
        assert begun.acquire(timeout=120)
        with socket.create_connection(address(url)) as more:
            assert read_all(more).startswith(b"HTTP/1.1 503 ")
        go_on.set()
        for client in busy:
            assert read_all(client).startswith(b"HTTP/1.1 200 ")
    finally:
        go_on.set()
        for client in busy:
            client.close()
    assert json.load(urllib.request.urlopen(f"{url}/health", timeout=120))["status"] == "ok"


def test_a_body_that_does_not_arrive_ends_its_connection(served, model):
    url = served(model, body_seconds=0.3)
    with socket.create_connection(address(url)) as client:
        client.sendall(TOKENIZE.replace(b"Connection: close\r\n", b"") + b"{")
        assert read_all(client).startswith(b"HTTP/1.1 408 ")


def test_connections_within_what_the_process_can_open(monkeypatch):
    monkeypatch.setattr(connections, "open_file_limit", lambda: 256)
    assert connections.connection_limit(1000) == 192
    assert connections.connection_limit(100) == 100
    monkeypatch.setattr(connections, "open_file_limit", lambda: 40)
    with pytest.raises(UsageError, match="40 files only"):
        connections.connection_limit(100)
    monkeypatch.setattr(connections, "open_file_limit", lambda: None)
    assert connections.connection_limit(1000) == 1000


@pytest.mark.skipif(process.resource is None, reason="no limits of processes")
def test_the_limit_of_open_files_is_raised_to_what_is_permitted():
    resource = process.resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        process.raise_open_file_limit(512)
        assert process.open_file_limit() == min(512, hard if hard != resource.RLIM_INFINITY else 512)
        process.raise_open_file_limit(300)  # never lowers it
        assert process.open_file_limit() >= min(512, hard if hard != resource.RLIM_INFINITY else 512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
