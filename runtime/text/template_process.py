"""Chat templates in a process of their own, whose memory and time the operating system limits.

The process is started for the first template, and ends with this one. `sandbox.py` is what runs in it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...formats import MillError
from . import template_sandbox as sandbox


class _Process:
    """One for all templates: an answer takes milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._of = 0  # the process that started it: pipes are of no use to a fork of that

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """`sandbox.answer`, with an answer as well where the process did not survive it."""
        try:
            line = json.dumps(asked, default=str).encode("ascii") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # keys that are no texts, lists in themselves or too deep
            return {"wrong": type(error).__name__, "said": f"{error}"}
        with self._lock:
            running = self._started()
            assert running.stdin is not None
            assert running.stdout is not None
            try:
                running.stdin.write(line)
                running.stdin.flush()
                told = running.stdout.readline()
            except OSError:
                told = b""
            except BaseException:  # Ctrl-C: the answer would come to the next question
                self.end()
                raise
            if not told.endswith(b"\n"):
                self.end()
                return {"wrong": "refused", "said": "it takes too long, or too much memory"}
        return json.loads(told)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._of != os.getpid() or self._running.poll() is not None:
            paths = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-P", str(Path(sandbox.__file__))]
            try:
                self._running = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": paths},
                )
            except (OSError, ValueError) as error:
                raise MillError(f"no process can be started for the chat template: {error}") from None
            self._of = os.getpid()
        return self._running

    def end(self) -> None:
        if self._running is not None and self._of == os.getpid():
            self._running.kill()
            self._running.communicate()
        self._running = None


_process = _Process()
atexit.register(_process.end)


def answer(text: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """What comes of a template, as `sandbox.answer` says it. variables: plain JSON values; None: it is only compiled."""
    return _process.ask({"text": text, "variables": variables, "seconds": sandbox.SECONDS})
