"""Tensors by HTTP range, from servers that are slow, flaky, wrong, or elsewhere."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hub_server
from hub_server import COMMIT, REPO, serving

from ggufmill.convert.hub import remote
from ggufmill.convert.hub.remote import ReadAhead, RemoteShard, Transport
from ggufmill.formats import FormatError, MillError
from ggufmill.formats.safetensors import read_safetensors

SHARD = "model.safetensors"


@pytest.fixture
def hub(write_checkpoint, tmp_path):
    draw = np.random.default_rng(0)
    tensors = {f"t{i}": draw.standard_normal((11 + i, 64)).astype(np.float32) for i in range(6)} | {"s": np.float32([1, 2])}
    write_checkpoint(tmp_path / "repo", {}, tensors)
    (tmp_path / "repo" / "model-00001-of-00001.safetensors").rename(tmp_path / "repo" / SHARD)
    with serving(tmp_path / "repo") as served:
        yield served


def url(hub):
    return f"{hub.endpoint}/{REPO}/resolve/{COMMIT}/{SHARD}"


def opened(hub, monkeypatch, *, piece=1000, **options):
    """(tensors, read-ahead) of the hub's shard, in small pieces; what is there as it is on disk."""
    monkeypatch.setattr(remote, "PIECE", piece)
    monkeypatch.setattr(remote, "FIRST", 100)  # less than the header
    monkeypatch.setattr(remote, "RESTARTS", 200)
    size = (hub.folder / SHARD).stat().st_size
    ahead = ReadAhead(Transport(**({"pause": 0.001, "timeout": 5.0} | options)))
    tensors = RemoteShard(url(hub), size, ahead).directory(Path(SHARD))
    ahead.expect(tensors.values())
    return tensors, ahead


def check(hub, tensors):
    stored = read_safetensors(hub.folder / SHARD)
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.data, stored[name].data)
        rows = tensor.shape[0]
        for start in range(0, rows, 3):
            stop = min(start + 3, rows)
            assert np.array_equal(tensor.rows(start, stop), stored[name].rows(start, stop))


FAULTS = {
    "well": [],
    "dropping": [hub_server.dropping(3)],
    "dropping always": [hub_server.dropping(1)],
    "busy": [hub_server.once(503)],
    "too many": [hub_server.once(429, {"Retry-After": "0.01"})],
    "slow": [hub_server.slow],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_arrives_is_what_is_there(hub, monkeypatch, fault):
    hub.faults = FAULTS[fault]
    tensors, _ = opened(hub, monkeypatch, attempts=12)
    check(hub, tensors)
    if fault != "well":
        assert hub.requests


def test_every_byte_comes_once_and_small_neighbours_together(hub, monkeypatch):
    tensors, _ = opened(hub, monkeypatch, piece=1 << 20)
    for tensor in tensors.values():
        for start in range(tensor.shape[0]):
            tensor.rows(start, start + 1)
    header, rest, *others = [tuple(map(int, asked.removeprefix("bytes=").split("-"))) for _, asked, *_ in hub.requests]
    first = min(t.offset for t in tensors.values())
    assert (header, rest) == ((0, 99), (100, first - 1))
    assert others == [(first, first + sum(t.nbytes for t in tensors.values()) - 1)]


def test_what_was_not_announced_can_be_read_too(hub, monkeypatch):
    tensors, ahead = opened(hub, monkeypatch)
    ahead.expect([tensors["t3"]])
    check(hub, tensors)


def test_memory_is_bounded(hub, monkeypatch):
    monkeypatch.setattr(remote, "KEPT", 4)
    monkeypatch.setattr(remote, "AHEAD", 2)
    tensors, ahead = opened(hub, monkeypatch, piece=256)
    check(hub, tensors)
    assert len(ahead._held) <= 4 + 1 + 2


def test_readers_in_parallel(hub, monkeypatch):
    tensors, _ = opened(hub, monkeypatch, piece=300, attempts=20)
    hub.faults = [hub_server.dropping(5)]
    stored, wrong = read_safetensors(hub.folder / SHARD), []

    def read(seed):
        draw = np.random.default_rng(seed)
        for _ in range(20):
            name = f"t{draw.integers(6)}"
            start, stop = sorted(draw.choice(tensors[name].shape[0] + 1, 2, replace=False))
            if not np.array_equal(tensors[name].rows(start, stop), stored[name].rows(start, stop)):
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def changed(total):
    return lambda h, name, start, stop: hub_server.part(h, name, start, stop, stop - start, total=total)


def shifted(h, name, start, stop):
    return hub_server.part(h, name, start, stop, stop - start, claim=f"bytes {start + 1}-{stop}/{10**6}")


def whole(h, name, start, stop):
    h.send(200, (h.hub.folder / name).read_bytes())
    return True


REFUSALS = {
    "another size": (changed(10**6), "the file has changed on the server"),
    "another range": (shifted, "gave up after 3 attempts: the server sent another range"),
    "no ranges": (whole, "does not serve parts of files"),
    "truncating": (lambda h, n, a, b: hub_server.part(h, n, a, b, 0), r"gave up after 3 attempts: .*(closed|more expected)"),
    "denied": (lambda h, n, a, b: h.send(401, b"no") or True, "access is denied; a token in HF_TOKEN may help"),
    "gone": (lambda h, n, a, b: h.send(404, b"no") or True, "there is no such file"),
    "broken": (lambda h, n, a, b: h.send(500, b"no") or True, "gave up after 3 attempts: status 500"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_servers_that_cannot_be_used(hub, monkeypatch, kind):
    tensors, _ = opened(hub, monkeypatch, attempts=3)
    fault, message = REFUSALS[kind]
    hub.faults = [fault]
    with pytest.raises(MillError, match=message) as raised:
        tensors["t2"].rows(0, 2)
    assert "\n" not in str(raised.value)
    hub.faults = []
    check(hub, tensors)  # a failure is not remembered


def test_a_server_that_does_not_answer(hub, monkeypatch):
    tensors, _ = opened(hub, monkeypatch, attempts=2, timeout=0.1)
    hub.faults = [lambda h, n, a, b: time.sleep(0.5) or True]
    began = time.monotonic()
    with pytest.raises(MillError, match="gave up after 2 attempts: .*timed out"):
        tensors["t0"].rows(0, 1)
    assert time.monotonic() - began < 3


def test_the_token_stays_with_the_server_that_was_asked(hub, monkeypatch, tmp_path):
    with serving(hub.folder) as other:

        def redirect(handler, name, start, stop):
            handler.send(302, b"", headers={"Location": f"{other.endpoint}/elsewhere/{name}?signature=abc"})
            return True

        hub.faults = [redirect]
        tensors, _ = opened(hub, monkeypatch, token="hf_secret")
        check(hub, tensors)
        assert all(headers["Authorization"] == "Bearer hf_secret" for *_, headers in hub.requests)
        assert other.requests
        assert not any("Authorization" in headers for *_, headers in other.requests)
        other.faults = [lambda h, n, a, b: h.send(403, b"no") or True]
        with pytest.raises(MillError) as raised:
            Transport("hf_secret").fetch(url(hub), 0, 10, (hub.folder / SHARD).stat().st_size)
        assert "secret" not in str(raised.value)
        assert "signature" not in str(raised.value)


def test_a_header_that_lies(hub, monkeypatch):
    path = hub.folder / SHARD
    path.write_bytes((10**9).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(FormatError, match="a header of 1000000000 bytes"):
        opened(hub, monkeypatch)
