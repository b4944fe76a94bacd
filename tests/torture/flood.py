"""A flood of requests: `python tests/torture/flood.py [REQUESTS [SECONDS [CLIENTS [IDLE]]]]`.

Many clients at once send requests to `ggufmill serve` with the bundled small model: sound ones, streams, damaged and
oversized bodies, bytes that are no HTTP, headers and bodies that end in the middle, and clients that leave before their answer
does. Others, more than the server may open files, keep connections open and send too little (idle.py). It ends after so many
requests or seconds, and the time-outs of the connections that are open then. No answer may have the status 500 or one that the
request does not deserve, /health has to answer throughout and sound requests in time, idle connections are closed, memory and
log stay small, what clients have left unfinished ends, and so does the server when it is asked to.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))
sys.path.insert(0, str(Path(__file__).parent))
import targets
from idle import Idle, keep_idle
from server import SECONDS, Answer, ask, http, serving

from ggufmill.operating_system.process import raise_open_file_limit

GRACE = 20.0  # seconds in which the work for clients that are gone ends
MEMORY = 256 << 20  # bytes by which the server may grow
BODY = 1 << 20  # bytes of a request at most: an option of the server
FILES = 256  # descriptors that the server may have
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


@dataclass(frozen=True)
class Request:
    """Bytes that a client sends, and the statuses that it may get. patience: seconds after which it leaves without an answer;
    None: it stays."""

    data: bytes
    statuses: frozenset[Answer]
    patience: float | None = None


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PATHS = (_CHAT, _COMPLETIONS, "/completion", "/v1/messages", "/v1/responses", "/v1/embeddings", "/infill", "/rerank")
_PATHS += ("/tokenize", "/detokenize", "/apply-template", "/slots/0?action=erase", "/embedding")
_ANSWERED, _REFUSED = frozenset({200, 503}), frozenset({400})
_ANY = frozenset({200, 400, 404, 405, 413, 501, 503})  # of a request that may be sound or not


def _sound(draw: random.Random) -> bytes:
    words = " ".join(draw.choices(("the", "list", "of", "Ünï", "a\n", "中文", "{", "\x00"), k=draw.randrange(1, 30)))
    more = {"max_tokens": draw.randrange(1, 12), "stream": draw.random() < 0.3, "seed": 1}
    if draw.random() < 0.5:
        return http(_CHAT, json.dumps({"messages": [{"role": "user", "content": words}], **more}).encode())
    return http(_COMPLETIONS, json.dumps({"prompt": words, **more}).encode())


def _long(draw: random.Random) -> bytes:
    body = {"prompt": f"The list {draw.random()}", "max_tokens": LONG, "ignore_eos": True, "stream": draw.random() < 0.5}
    return http(_COMPLETIONS, json.dumps(body).encode())


def _damaged(draw: random.Random) -> bytes:
    """A request of tests/fuzz with a change, which may make its answer long."""
    return http(draw.choice(_PATHS), targets.damaged("request", draw.randrange(1 << 60)))


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(1, len(data))]


_NO_HTTP = (
    lambda draw: draw.randbytes(200) + b"\r\n\r\n",
    lambda draw: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(50) + b"\r\n\r\n",  # TLS
    lambda draw: b"GET / HTTP/9.9\r\n\r\n",
    lambda draw: http(_CHAT, b"{}", "Transfer-Encoding: chunked"),
    lambda draw: http(_CHAT, b"{}", "Content-Length: -5"),
    lambda draw: http(_CHAT, b"{}", "Content-Length: 7777777777777777777777777"),
    lambda draw: http("/health", b"", "X: " + "y" * 200_000, method="GET"),
    lambda draw: http("/health", b"", *("X: y" for _ in range(20_000)), method="GET"),
    lambda draw: b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
)
_REFUSALS: tuple[tuple[Callable[[], bytes], int], ...] = (
    (lambda: http("/health", b"", "Host: attacker.example.com", method="GET"), 403),
    (lambda: http(_CHAT, b"{}", "Origin: https://attacker.example.com"), 403),
    (lambda: http("/nothing/../%2e%2e/etc/passwd", method="GET"), 404),
    (lambda: http(_CHAT, method="DELETE"), 405),
    (lambda: http(_CHAT, b"[" * 100_000), 400),
    (lambda: http(_CHAT, b'{"messages": 5}'), 400),
    (lambda: http(_COMPLETIONS, b'{"prompt": "' + b"word " * 100_000 + b'"}'), 400),
    (lambda: http(_COMPLETIONS, b" " * (BODY + 1000)), 413),
)


def _refused(draw: random.Random) -> Request:
    make, status = draw.choice(_REFUSALS)
    return Request(make(), frozenset({status}))


# kind -> (how often, of all, the request)
KINDS: dict[str, tuple[int, Callable[[random.Random], Request]]] = {
    "sound": (30, lambda draw: Request(_sound(draw), _ANSWERED)),
    "damaged": (25, lambda draw: Request(_damaged(draw), _ANY, 2.0)),
    "refused": (15, _refused),
    "no HTTP": (8, lambda draw: Request(draw.choice(_NO_HTTP)(draw), frozenset({200, 400, 403, 408, 431, None}), 2.0)),
    "header that ends in the middle": (6, lambda draw: Request(_cut(http("/health", method="GET"), draw), _ANY, 0.1)),
    "body that ends in the middle": (6, lambda draw: Request(_cut(_sound(draw), draw), _ANY, 0.1)),
    "client that leaves at once": (5, lambda draw: Request(_long(draw), _ANSWERED, 0.0)),
    "client that leaves early": (5, lambda draw: Request(_long(draw), _ANSWERED, draw.random())),
}


@dataclass
class Flood:
    """What was sent and seen.

    asked     tokens that were asked for by clients that left
    answered  sound requests with status 200; others find the queue full
    slowest   seconds until the slowest answer, and until that of /health
    grown     bytes by which the server's memory has grown, at its peak
    finding   what is wrong; '' if nothing is
    """

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[Answer] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    asked: int = 0
    answered: int = 0
    slowest: float = 0.0
    slowest_health: float = 0.0
    idle: Idle = field(default_factory=Idle)
    healthy: int = 0
    grown: int = 0
    log_lines: int = 0
    seconds: float = 0.0

    @property
    def finding(self) -> str:
        more = len(self.problems) - 5
        return "; ".join([*self.problems[:5], *([f"and {more} more"] if more > 0 else [])])


async def _client(port: int, flood: Flood, draw: random.Random, left: list[int], end: float) -> None:
    while left[0] > 0 and time.monotonic() < end and len(flood.problems) < 20:
        left[0] -= 1
        kind = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        request = KINDS[kind][1](draw)
        flood.sent[kind] += 1
        flood.asked += LONG if kind.startswith("client that leaves") else 0
        began = time.monotonic()
        try:
            status, rest = await asyncio.wait_for(ask(port, request.data, request.patience), SECONDS)
        except (OSError, TimeoutError) as error:
            flood.problems.append(
                f"{kind}: {type(error).__name__} after {time.monotonic() - began:.0f} s: {request.data[:200]!r}"
            )
            continue
        flood.slowest = max(flood.slowest, time.monotonic() - began)
        flood.statuses[status] += 1
        flood.answered += kind == "sound" and status == 200
        if (status is None and request.patience is not None) or (status in request.statuses and b"internal error" not in rest):
            continue
        flood.problems.append(f"{kind}: status {status} for {request.data[:300]!r}")


async def _watch(port: int, flood: Flood, stop: asyncio.Event) -> None:
    """Asks for /health ten times a second."""
    while not stop.is_set():
        began = time.monotonic()
        try:
            status, _ = await asyncio.wait_for(ask(port, http("/health", method="GET")), SECONDS)
        except (OSError, TimeoutError) as error:
            status = type(error).__name__
        if status != 200:
            flood.problems.append(f"/health: {status} after {time.monotonic() - began:.1f} s")
        flood.healthy += status == 200
        flood.slowest_health = max(flood.slowest_health, time.monotonic() - began)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.1)


async def _end_of_work(port: int, flood: Flood) -> None:
    """What clients have left unfinished ends, and not by being computed to its end."""
    end = time.monotonic() + GRACE
    while True:
        _, rest = await asyncio.wait_for(ask(port, http("/health", method="GET")), SECONDS)
        counts = json.loads(rest.partition(b"\r\n\r\n")[2])
        if counts["slots_processing"] == counts["waiting"] == 0:
            break
        if time.monotonic() > end:
            flood.problems.append(f"still at work {GRACE:g} s after the last client: {counts}")
            break
        await asyncio.sleep(0.1)
    _, rest = await asyncio.wait_for(ask(port, http("/metrics", method="GET")), SECONDS)
    match = re.search(rb"llamacpp:tokens_predicted_total ([\d.e+]+)", rest)
    generated = float(match[1]) if match else 0.0
    sound = 12 * (flood.sent["sound"] + flood.sent["damaged"])
    if match is None or generated > sound + flood.asked / 2:
        flood.problems.append(f"{generated:.0f} tokens were generated; clients that left had asked for {flood.asked}")


async def _flooded(
    port: int, flood: Flood, requests: int, seconds: float, clients: int, idle: int, hold: bool, seed: int
) -> None:
    stop, end_of_idle, left, end = asyncio.Event(), asyncio.Event(), [requests], time.monotonic() + seconds
    keeping = [
        asyncio.create_task(keep_idle(port, flood.idle, random.Random(f"{seed} idle {i}"), end_of_idle)) for i in range(idle)
    ]
    watch = asyncio.create_task(_watch(port, flood, stop))
    draws = [random.Random(f"{seed} {i}") for i in range(clients)]
    await asyncio.gather(*(_client(port, flood, draw, left, end) for draw in draws))
    end_of_idle.set()
    for task in keeping if not hold else ():
        task.cancel()
    if keeping:
        await asyncio.wait(keeping)
    for task in keeping:
        if not task.cancelled():
            task.result()  # raises what is wrong with the client itself
    stop.set()
    await watch
    flood.problems += flood.idle.problems
    await _end_of_work(port, flood)


def flood_server(requests: int, seconds: float, clients: int = 64, idle: int = 400, hold: bool = True, seed: int = 1) -> Flood:
    """Floods a server of its own, which ends with this function. hold: idle clients stay until the server closes them."""
    flood = Flood()
    raise_open_file_limit(idle + clients + 256)
    with serving(OPTIONS, FILES) as server:
        first = http(_CHAT, json.dumps({"messages": [{"role": "user", "content": "The"}], "max_tokens": 2}).encode())
        asyncio.run(asyncio.wait_for(ask(server.port, first), 4 * SECONDS))  # may compile
        before, quiet = server.memory("VmRSS"), server.said().count("\n")
        began = time.monotonic()
        try:
            asyncio.run(_flooded(server.port, flood, requests, seconds, clients, idle, hold, seed))
        except (OSError, TimeoutError, ValueError) as error:
            flood.problems.append(f"{type(error).__name__}: {error}")
        flood.seconds = time.monotonic() - began
        flood.grown = max(0, server.memory("VmHWM") - before)
        if problem := server.problem_at_the_end():
            flood.problems.append(problem)
        said = server.said()
    flood.log_lines = said.count("\n") - quiet
    if flood.answered * 10 < flood.sent["sound"]:
        flood.problems.append(f"{flood.answered} of {flood.sent['sound']} sound requests were answered with 200")
    if flood.grown > MEMORY:
        flood.problems.append(f"the server has grown by {flood.grown >> 20} MiB")
    if bad := next((word for word in ("internal error", "Traceback", "a request failed") if word in said), ""):
        flood.problems.append(f"log: {bad}: {said[said.index(bad) :][:300]!r}")
    if flood.log_lines > 2 * (2 * 100 + 2 * 2 * (flood.seconds + SECONDS)) or len(said) > 500 * (flood.log_lines + 10):
        flood.problems.append(f"the log has {flood.log_lines} lines, {len(said)} characters")
    return flood


def torture(
    requests: int = 3000, seconds: float = 60, clients: int = 64, idle: int = 400, report=print
) -> list[tuple[str, int, str]]:
    """Rows (kind of request, how many, what is wrong); the findings of all of them stand in the first."""
    flood = flood_server(requests, seconds, clients, idle)
    rows = [(kind, count, "") for kind, count in flood.sent.most_common()]
    rows = [(rows[0][0], rows[0][1], flood.finding), *rows[1:]] if rows else [("none", 0, flood.finding)]
    for row in rows:
        report(*row)
    statuses = ", ".join(f"{status or 'none'} {count}" for status, count in sorted(flood.statuses.items(), key=str))
    report(f"{flood.seconds:.0f} s; statuses: {statuses}; slowest {flood.slowest:.1f} s")
    report(f"{flood.answered} of {flood.sent['sound']} sound requests were answered, others found the queue full")
    report(f"/health answered {flood.healthy} times, at most after {flood.slowest_health:.2f} s")
    for kind, count in flood.idle.opened.most_common():
        report(f"{kind}: {count} connections, open for {flood.idle.longest[kind]:.0f} s at most")
    report(f"memory grew by {flood.grown >> 20} MiB; {flood.log_lines} lines in the log")
    return rows


if __name__ == "__main__":
    given = [*map(int, sys.argv[1:]), *(3000, 60, 64, 400)[len(sys.argv) - 1 :]]
    sys.exit(any(row[-1] for row in torture(*given)))
