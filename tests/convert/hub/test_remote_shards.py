"""Tensors by HTTP range requests, from servers that are slow, drop connections, answer wrongly, or redirect."""

import threading
import time
from pathlib import Path

import hub_server
import numpy as np
import pytest
from hub_server import COMMIT, REPO, serving

from ggufmill.convert.hub import http_ranges, remote_shards
from ggufmill.convert.hub.http_ranges import Transport
from ggufmill.convert.hub.remote_shards import Prefetcher, RemoteShard
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


def open_shard(hub, monkeypatch, *, chunk=1000, **options):
    """(tensors, prefetcher) of the hub's shard, read in small chunks."""
    monkeypatch.setattr(remote_shards, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(remote_shards, "HEADER_GUESS_BYTES", 100)  # less than the header
    monkeypatch.setattr(http_ranges, "PROGRESS_BYTES", 200)
    size = (hub.folder / SHARD).stat().st_size
    prefetcher = Prefetcher(Transport(**({"pause": 0.001, "timeout": 5.0} | options)))
    tensors = RemoteShard(url(hub), size, prefetcher).read_header(Path(SHARD))
    prefetcher.plan(tensors.values())
    return tensors, prefetcher


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
    "none": [],
    "dropping": [hub_server.dropping(3)],
    "dropping always": [hub_server.dropping(1)],
    "busy": [hub_server.once(503)],
    "too many": [hub_server.once(429, {"Retry-After": "0.01"})],
    "slow": [hub_server.slow],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_equal_those_on_disk(hub, monkeypatch, fault):
    hub.faults = FAULTS[fault]
    tensors, _ = open_shard(hub, monkeypatch, attempts=12)
    check(hub, tensors)
    if fault != "none":
        assert hub.requests


def test_each_byte_is_fetched_once_and_small_tensors_together(hub, monkeypatch):
    tensors, _ = open_shard(hub, monkeypatch, chunk=1 << 20)
    for tensor in tensors.values():
        for start in range(tensor.shape[0]):
            tensor.rows(start, start + 1)
    ranges = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for _, text, *_ in hub.requests]
    header, rest, *others = ranges
    first = min(t.offset for t in tensors.values())
    assert (header, rest) == ((0, 99), (100, first - 1))
    assert others == [(first, first + sum(t.nbytes for t in tensors.values()) - 1)]


def test_tensors_that_were_not_planned(hub, monkeypatch):
    tensors, prefetcher = open_shard(hub, monkeypatch)
    prefetcher.plan([tensors["t3"]])
    check(hub, tensors)


def test_memory_is_bounded(hub, monkeypatch):
    monkeypatch.setattr(remote_shards, "MAX_CACHED", 4)
    monkeypatch.setattr(remote_shards, "MAX_IN_FLIGHT", 2)
    tensors, prefetcher = open_shard(hub, monkeypatch, chunk=256)
    check(hub, tensors)
    assert len(prefetcher._cache) <= 4 + 1 + 2


def test_readers_in_parallel(hub, monkeypatch):
    tensors, _ = open_shard(hub, monkeypatch, chunk=300, attempts=20)
    hub.faults = [hub_server.dropping(5)]
    stored, mismatches = read_safetensors(hub.folder / SHARD), []

    def read(seed):
        draw = np.random.default_rng(seed)
        for _ in range(20):
            name = f"t{draw.integers(6)}"
            start, stop = sorted(draw.choice(tensors[name].shape[0] + 1, 2, replace=False))
            if not np.array_equal(tensors[name].rows(start, stop), stored[name].rows(start, stop)):
                mismatches.append(name)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not mismatches
    assert not any(t.is_alive() for t in threads)


def other_size(total):
    return lambda h, name, start, stop: hub_server.part(h, name, start, stop, stop - start, total=total)


def shifted_range(h, name, start, stop):
    return hub_server.part(h, name, start, stop, stop - start, claim=f"bytes {start + 1}-{stop}/{10**6}")


def complete_file(h, name, start, stop):
    h.send(200, (h.hub.folder / name).read_bytes())
    return True


REFUSALS = {
    "another size": (other_size(10**6), "the file has changed on the server"),
    "another range": (shifted_range, "gave up after 3 attempts: the server sent another range"),
    "no ranges": (complete_file, "does not serve parts of files"),
    "truncating": (lambda h, n, a, b: hub_server.part(h, n, a, b, 0), r"gave up after 3 attempts: .*(closed|more expected)"),
    "denied": (lambda h, n, a, b: h.send(401, b"no") or True, "access is denied; a token in HF_TOKEN may help"),
    "gone": (lambda h, n, a, b: h.send(404, b"no") or True, "there is no such file"),
    "broken": (lambda h, n, a, b: h.send(500, b"no") or True, "gave up after 3 attempts: status 500"),
}


@pytest.mark.parametrize("failure", REFUSALS)
def test_failures_of_the_server(hub, monkeypatch, failure):
    tensors, _ = open_shard(hub, monkeypatch, attempts=3)
    fault, message = REFUSALS[failure]
    hub.faults = [fault]
    with pytest.raises(MillError, match=message) as raised:
        tensors["t2"].rows(0, 2)
    assert "\n" not in str(raised.value)
    hub.faults = []
    check(hub, tensors)  # the failure is not cached


def test_a_server_that_does_not_answer(hub, monkeypatch):
    tensors, prefetcher = open_shard(hub, monkeypatch, attempts=2)
    prefetcher.transport._timeout = 0.1  # the header has been read
    hub.faults = [lambda h, n, a, b: time.sleep(0.5) or True]
    with pytest.raises(MillError, match="gave up after 2 attempts: .*timed out"):
        tensors["t0"].rows(0, 1)


def test_the_token_is_not_sent_to_other_servers(hub, monkeypatch, tmp_path):
    with serving(hub.folder) as other:

        def redirect(handler, name, start, stop):
            handler.send(302, b"", headers={"Location": f"{other.endpoint}/elsewhere/{name}?signature=abc"})
            return True

        hub.faults = [redirect]
        tensors, _ = open_shard(hub, monkeypatch, token="hf_secret")
        check(hub, tensors)
        assert all(headers["Authorization"] == "Bearer hf_secret" for *_, headers in hub.requests)
        assert other.requests
        assert not any("Authorization" in headers for *_, headers in other.requests)
        other.faults = [lambda h, n, a, b: h.send(403, b"no") or True]
        with pytest.raises(MillError) as raised:
            Transport("hf_secret").fetch(url(hub), 0, 10, (hub.folder / SHARD).stat().st_size)
        assert "secret" not in str(raised.value)
        assert "signature" not in str(raised.value)


def test_a_wrong_header_length(hub, monkeypatch):
    path = hub.folder / SHARD
    path.write_bytes((10**9).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(FormatError, match="a header of 1000000000 bytes"):
        open_shard(hub, monkeypatch)
