"""Runs chat templates in a process of their own, whose memory and processor time the operating system limits.

The process runs `template_sandbox.py`. It is started for the first template and ends with this program.
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
from . import template_sandbox


class _TemplateProcess:
    """One process for all templates and threads: a request takes milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id of the parent: a fork of it must not use the same pipes

    def send(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of `template_sandbox.run_template`; an error of the same form if the process did not survive it."""
        try:
            line = json.dumps(request, default=str).encode("ascii") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # keys that are not strings, circular or too deep lists
            return {"error": type(error).__name__, "message": f"{error}"}
        with self._lock:
            process = self._ensure_started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                result = process.stdout.readline()
            except OSError:
                result = b""
            except BaseException:  # Ctrl-C: the result would be taken for that of the next request
                self.stop()
                raise
            if not result.endswith(b"\n"):
                self.stop()
                return {"error": "refused", "message": "it takes too long, or too much memory"}
        return json.loads(result)

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            search_path = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-P", str(Path(template_sandbox.__file__))]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": search_path},
                )
            except (OSError, ValueError) as error:
                raise MillError(f"no process can be started for the chat template: {error}") from None
            self._owner = os.getpid()
        return self._process

    def stop(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None


_process = _TemplateProcess()
atexit.register(_process.stop)


def run_template(text: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Renders a template; the result is that of `template_sandbox.run_template`.

    variables: plain JSON values; None: the template is only compiled. Raises MillError if no process can be started.
    """
    return _process.send({"text": text, "variables": variables, "seconds": template_sandbox.SECONDS})
