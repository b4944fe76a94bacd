"""A server of the flood's own: requests as bytes, their answers, and the process with its memory and its log."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ggufmill.operating_system.process import resource
from jobs import DEMO, MILL, last_line

SECONDS = 60.0  # in which a request is answered, or refused: a queue of short answers on a loaded machine

Answer = int | None  # the status; None: the connection was closed without one


def http(path: str, body: bytes = b"", *headers: str, method: str = "POST", length: int | None = None) -> bytes:
    """A request that ends its connection. length: what Content-Length says, if that is not the body's."""
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(body) if length is None else length}"]
    if not any(line.startswith("Host") for line in headers):
        lines.append("Host: 127.0.0.1")
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def ask(port: int, data: bytes, patience: float | None = None) -> tuple[Answer, bytes]:
    """The status of an answer and what comes behind its status line, as much as comes while patience lasts."""
    received = b""
    with suppress(TimeoutError):
        async with connected(port) as (reader, writer), asyncio.timeout(patience):
            with suppress(ConnectionError):  # what the server does not want to read to its end it may close
                writer.write(data)
                await writer.drain()
            with suppress(ConnectionError):
                while part := await reader.read(65536):
                    received += part
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
    return int(match[1]) if match else None, received.partition(b"\r\n")[2]


@dataclass
class Server:
    """`ggufmill serve` with the bundled small model."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    def memory(self, name: str) -> int:
        """VmRSS or VmHWM in bytes; 0 where the system does not say."""
        with suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text("ascii", errors="replace")
            match = re.search(rf"{name}:\s+(\d+) kB", status)
            return int(match[1]) << 10 if match else 0
        return 0

    def said(self) -> str:
        return _text(self.log)

    def problem_at_the_end(self) -> str:
        """What is wrong when it is asked to end; '' if nothing is."""
        if self.process.poll() is not None:
            return f"the server has ended with {self.process.returncode}"
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"the server does not end within {SECONDS:g} s"
        return f"the server ends with {code}" if code else ""


@contextmanager
def serving(options: list[str], files: int) -> Iterator[Server]:
    """A server that may open so many files (where there are such limits), and ends with this context.

    Raises RuntimeError if it does not start.
    """
    limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"] if resource is not None else []
    with tempfile.TemporaryDirectory(prefix="torture-") as tmp:
        log = Path(tmp) / "log"
        command = [*limited, *MILL, "serve", str(DEMO), "--port", "0", *options]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        try:
            yield Server(process, log, _port(process, log))
        finally:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    end = time.monotonic() + 4 * SECONDS
    while time.monotonic() < end:
        if match := re.search(r"listening on http://127\.0\.0\.1:(\d+)", _text(log)):
            return int(match[1])
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server does not start: {last_line(_text(log))}")


def _text(log: Path) -> str:
    return log.read_text("utf-8", errors="replace")
