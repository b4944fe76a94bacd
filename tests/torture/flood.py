"""A flood of requests: `python tests/torture/flood.py [REQUESTS [SECONDS [CLIENTS]]]`.

Many clients at once send requests to `ggufmill serve` with the small model that comes along: sound ones, streams, damaged and
oversized bodies, bytes that are no HTTP, headers and bodies that end in the middle, and clients that leave before their answer
does. It ends after so many requests or seconds. No answer may have the status 500 or one that the request does not deserve,
/health has to answer throughout, memory and log stay small, what clients have left unfinished ends, and so does the server
when it is asked to.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))
sys.path.insert(0, str(Path(__file__).parent))
import targets

from jobs import DEMO, MILL, last_line

SECONDS = 60.0  # in which a request is answered, or refused: a queue of short answers on a loaded machine
GRACE = 20.0  # seconds in which the work for clients that are gone ends
MEMORY = 256 << 20  # bytes by which the server may grow
BODY = 1 << 20  # bytes of a request at most, as the server is told
LONG = 3000  # tokens that are asked for by clients that leave: far more than there is time for
OPTIONS = [
    "-c",
    "4096",
    "-n",
    "12",
    "--parallel",
    "4",
    "--max-queue",
    "32",
    "--max-body",
    "1",
    "--metrics",
    "--no-warmup",
    "-t",
    "2",
]

Answer = int | None  # the status; None: the connection was closed without one


@dataclass(frozen=True)
class Request:
    """Bytes that a client sends, and the statuses that it may get. patience: seconds after which it leaves without an answer;
    None: it stays."""

    data: bytes
    statuses: frozenset[Answer]
    patience: float | None = None


def _http(path: str, body: bytes = b"", *headers: str, method: str = "POST", length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(body) if length is None else length}"]
    if not any(line.startswith("Host") for line in headers):
        lines.append("Host: 127.0.0.1")
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PATHS = (_CHAT, _COMPLETIONS, "/completion", "/v1/messages", "/v1/responses", "/v1/embeddings", "/infill", "/rerank")
_PATHS += ("/tokenize", "/detokenize", "/apply-template", "/slots/0?action=erase", "/embedding")
_ANSWERED, _REFUSED = frozenset({200, 503}), frozenset({400})
_ANY = frozenset({200, 400, 404, 405, 413, 501, 503})  # of a request that may be sound or not


def _sound(draw: random.Random) -> bytes:
    words = " ".join(draw.choices(("the", "list", "of", "Ünï", "a\n", "中文", "{", "\x00"), k=draw.randrange(1, 30)))
    more = {"max_tokens": draw.randrange(1, 12), "stream": draw.random() < 0.3, "seed": 1}
    if draw.random() < 0.5:
        return _http(_CHAT, json.dumps({"messages": [{"role": "user", "content": words}], **more}).encode())
    return _http(_COMPLETIONS, json.dumps({"prompt": words, **more}).encode())


def _long(draw: random.Random) -> bytes:
    body = {"prompt": f"The list {draw.random()}", "max_tokens": LONG, "ignore_eos": True, "stream": draw.random() < 0.5}
    return _http(_COMPLETIONS, json.dumps(body).encode())


def _damaged(draw: random.Random) -> bytes:
    """A request of tests/fuzz with a change, which may make its answer long."""
    return _http(draw.choice(_PATHS), targets.damaged("request", draw.randrange(1 << 60)))


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(1, len(data))]


_NO_HTTP = (
    lambda draw: draw.randbytes(200) + b"\r\n\r\n",
    lambda draw: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(50) + b"\r\n\r\n",  # TLS
    lambda draw: b"GET / HTTP/9.9\r\n\r\n",
    lambda draw: _http(_CHAT, b"{}", "Transfer-Encoding: chunked"),
    lambda draw: _http(_CHAT, b"{}", "Content-Length: -5"),
    lambda draw: _http(_CHAT, b"{}", "Content-Length: 7777777777777777777777777"),
    lambda draw: _http("/health", b"", "X: " + "y" * 200_000, method="GET"),
    lambda draw: _http("/health", b"", *("X: y" for _ in range(20_000)), method="GET"),
    lambda draw: b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
)
_REFUSALS: tuple[tuple[Callable[[], bytes], int], ...] = (
    (lambda: _http("/health", b"", "Host: attacker.example.com", method="GET"), 403),
    (lambda: _http(_CHAT, b"{}", "Origin: https://attacker.example.com"), 403),
    (lambda: _http("/nothing/../%2e%2e/etc/passwd", method="GET"), 404),
    (lambda: _http(_CHAT, method="DELETE"), 405),
    (lambda: _http(_CHAT, b"[" * 100_000), 400),
    (lambda: _http(_CHAT, b'{"messages": 5}'), 400),
    (lambda: _http(_COMPLETIONS, b'{"prompt": "' + b"word " * 100_000 + b'"}'), 400),
    (lambda: _http(_COMPLETIONS, b" " * (BODY + 1000)), 413),
)


def _refused(draw: random.Random) -> Request:
    make, status = draw.choice(_REFUSALS)
    return Request(make(), frozenset({status}))


# kind -> (how often, of all, the request)
KINDS: dict[str, tuple[int, Callable[[random.Random], Request]]] = {
    "sound": (30, lambda draw: Request(_sound(draw), _ANSWERED)),
    "damaged": (25, lambda draw: Request(_damaged(draw), _ANY, 2.0)),
    "refused": (15, _refused),
    "no HTTP": (8, lambda draw: Request(draw.choice(_NO_HTTP)(draw), frozenset({200, 400, 403, 431, None}), 2.0)),
    "header that ends in the middle": (6, lambda draw: Request(_cut(_http("/health", method="GET"), draw), _ANY, 0.1)),
    "body that ends in the middle": (6, lambda draw: Request(_cut(_sound(draw), draw), _ANY, 0.1)),
    "client that leaves at once": (5, lambda draw: Request(_long(draw), _ANSWERED, 0.0)),
    "client that leaves early": (5, lambda draw: Request(_long(draw), _ANSWERED, draw.random())),
}


@dataclass
class Flood:
    """What was sent and seen.

    asked     tokens that were asked for by clients that left
    slowest   seconds until the slowest answer, and until that of /health
    grown     bytes by which the server's memory has grown, at its peak
    finding   what is wrong; '' if nothing is
    """

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[Answer] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    asked: int = 0
    slowest: float = 0.0
    slowest_health: float = 0.0
    healthy: int = 0
    grown: int = 0
    log_lines: int = 0
    seconds: float = 0.0

    @property
    def finding(self) -> str:
        more = len(self.problems) - 5
        return "; ".join([*self.problems[:5], *([f"and {more} more"] if more > 0 else [])])


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _ask(port: int, data: bytes, patience: float | None = None) -> tuple[Answer, bytes]:
    """The status of an answer and what comes behind its status line, as much as comes while patience lasts."""
    received = b""
    with suppress(TimeoutError):
        async with _connected(port) as (reader, writer), asyncio.timeout(patience):
            with suppress(ConnectionError):  # what the server does not want to read to its end it may close
                writer.write(data)
                await writer.drain()
            with suppress(ConnectionError):
                while part := await reader.read(65536):
                    received += part
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
    return int(match[1]) if match else None, received.partition(b"\r\n")[2]


async def _client(port: int, flood: Flood, draw: random.Random, left: list[int], end: float) -> None:
    while left[0] > 0 and time.monotonic() < end and len(flood.problems) < 20:
        left[0] -= 1
        kind = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        request = KINDS[kind][1](draw)
        flood.sent[kind] += 1
        flood.asked += LONG if kind.startswith("client that leaves") else 0
        began = time.monotonic()
        try:
            status, rest = await asyncio.wait_for(_ask(port, request.data, request.patience), SECONDS)
        except (OSError, TimeoutError) as error:
            flood.problems.append(
                f"{kind}: {type(error).__name__} after {time.monotonic() - began:.0f} s: {request.data[:200]!r}"
            )
            continue
        flood.slowest = max(flood.slowest, time.monotonic() - began)
        flood.statuses[status] += 1
        if (status is None and request.patience is not None) or (status in request.statuses and b"internal error" not in rest):
            continue
        flood.problems.append(f"{kind}: status {status} for {request.data[:300]!r}")


async def _watch(port: int, flood: Flood, stop: asyncio.Event) -> None:
    """Asks for /health ten times a second."""
    while not stop.is_set():
        began = time.monotonic()
        try:
            status, _ = await asyncio.wait_for(_ask(port, _http("/health", method="GET")), SECONDS)
        except (OSError, TimeoutError) as error:
            status = None
            flood.problems.append(f"/health: {type(error).__name__}")
        if status is not None and status != 200:
            flood.problems.append(f"/health: status {status}")
        flood.healthy += status == 200
        flood.slowest_health = max(flood.slowest_health, time.monotonic() - began)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.1)


async def _end_of_work(port: int, flood: Flood) -> None:
    """What clients have left unfinished ends, and not by being computed to its end."""
    end = time.monotonic() + GRACE
    while True:
        _, rest = await asyncio.wait_for(_ask(port, _http("/health", method="GET")), SECONDS)
        counts = json.loads(rest.partition(b"\r\n\r\n")[2])
        if counts["slots_processing"] == counts["waiting"] == 0:
            break
        if time.monotonic() > end:
            flood.problems.append(f"still at work {GRACE:g} s after the last client: {counts}")
            break
        await asyncio.sleep(0.1)
    _, rest = await asyncio.wait_for(_ask(port, _http("/metrics", method="GET")), SECONDS)
    match = re.search(rb"llamacpp:tokens_predicted_total ([\d.e+]+)", rest)
    generated = float(match[1]) if match else 0.0
    sound = 12 * (flood.sent["sound"] + flood.sent["damaged"])
    if match is None or generated > sound + flood.asked / 2:
        flood.problems.append(f"{generated:.0f} tokens were generated; clients that left had asked for {flood.asked}")


async def _flooded(port: int, flood: Flood, requests: int, seconds: float, clients: int, seed: int) -> None:
    stop, left, end = asyncio.Event(), [requests], time.monotonic() + seconds
    watch = asyncio.create_task(_watch(port, flood, stop))
    draws = [random.Random(f"{seed} {i}") for i in range(clients)]
    await asyncio.gather(*(_client(port, flood, draw, left, end) for draw in draws))
    stop.set()
    await watch
    await _end_of_work(port, flood)


def _memory(pid: int, name: str) -> int:
    """VmRSS or VmHWM of a process in bytes; 0 where the system does not say."""
    with suppress(OSError):
        match = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("ascii", errors="replace"))
        return int(match[1]) << 10 if match else 0
    return 0


def flood_server(requests: int, seconds: float, clients: int = 64, seed: int = 1) -> Flood:
    """Floods a server of its own, which ends with this function."""
    flood, began = Flood(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as tmp:
        log = Path(tmp) / "log"
        with log.open("wb") as file:
            command = [*MILL, "serve", str(DEMO), "--port", "0", *OPTIONS]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        try:
            port = _port(process, log)
            first = _http(_CHAT, json.dumps({"messages": [{"role": "user", "content": "The"}], "max_tokens": 2}).encode())
            asyncio.run(asyncio.wait_for(_ask(port, first), 4 * SECONDS))  # may compile
            before, quiet = _memory(process.pid, "VmRSS"), log.read_bytes().count(b"\n")
            began = time.monotonic()
            try:
                asyncio.run(_flooded(port, flood, requests, seconds, clients, seed))
            except (OSError, TimeoutError, ValueError) as error:
                flood.problems.append(f"{type(error).__name__}: {error}")
            flood.seconds = time.monotonic() - began
            flood.grown = max(0, _memory(process.pid, "VmHWM") - before)
            _end(process, flood)
        finally:
            process.kill()
            process.wait()
        said = log.read_text("utf-8", errors="replace")
        flood.log_lines = said.count("\n") - quiet
    if flood.grown > MEMORY:
        flood.problems.append(f"the server has grown by {flood.grown >> 20} MiB")
    if bad := next((word for word in ("internal error", "Traceback", "a request failed") if word in said), ""):
        flood.problems.append(f"log: {bad}: {said[said.index(bad) :][:300]!r}")
    if flood.log_lines > 2 * (2 * 100 + 2 * 2 * (flood.seconds + SECONDS)) or len(said) > 500 * (flood.log_lines + 10):
        flood.problems.append(f"the log has {flood.log_lines} lines, {len(said)} characters")
    return flood


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    end = time.monotonic() + 4 * SECONDS
    while time.monotonic() < end:
        said = log.read_text("utf-8", errors="replace")
        if match := re.search(r"listening on http://127\.0\.0\.1:(\d+)", said):
            return int(match[1])
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server does not start: {last_line(log.read_text('utf-8', errors='replace'))}")


def _end(process: subprocess.Popen[bytes], flood: Flood) -> None:
    if process.poll() is not None:
        flood.problems.append(f"the server has ended with {process.returncode}")
        return
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        flood.problems.append(f"the server does not end within {SECONDS:g} s")
        return
    if code:
        flood.problems.append(f"the server ends with {code}")


def torture(requests: int = 3000, seconds: float = 60, clients: int = 64, report=print) -> list[tuple[str, int, str]]:
    """Rows (kind of request, how many, what is wrong); the findings of all of them stand in the first."""
    flood = flood_server(requests, seconds, clients)
    rows = [(kind, count, "") for kind, count in flood.sent.most_common()]
    rows = [(rows[0][0], rows[0][1], flood.finding), *rows[1:]] if rows else [("none", 0, flood.finding)]
    for row in rows:
        report(*row)
    statuses = ", ".join(f"{status or 'none'} {count}" for status, count in sorted(flood.statuses.items(), key=str))
    report(f"{flood.seconds:.0f} s; statuses: {statuses}; slowest {flood.slowest:.1f} s")
    report(f"/health answered {flood.healthy} times, at most after {flood.slowest_health:.2f} s")
    report(f"memory grew by {flood.grown >> 20} MiB; {flood.log_lines} lines in the log")
    return rows


if __name__ == "__main__":
    given = [*map(int, sys.argv[1:]), *(3000, 60, 64)[len(sys.argv) - 1 :]]
    sys.exit(any(row[-1] for row in torture(*given)))
