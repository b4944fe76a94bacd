"""A pytest plugin: the seconds that each file of tests takes, and the processor seconds in which numba compiles in it.

PYTHONPATH=tests/helpers pytest -p compile_times ...      writes build/compile_times/PROCESS.json
"""

import json
import os
import time
from collections import Counter
from pathlib import Path

from numba.core import event

FOLDER = Path("build/compile_times")
_seconds: Counter[str] = Counter()
_compiled: Counter[str] = Counter()
_now = ""


class _Timer(event.Listener):
    depth = 0
    began = 0.0

    def on_start(self, event):
        if not self.depth:
            self.began = time.process_time()
        self.depth += 1

    def on_end(self, event):
        self.depth -= 1
        if not self.depth:
            _compiled[_now] += time.process_time() - self.began


event.register("numba:compile", _Timer())


def pytest_runtest_logstart(nodeid, location):
    global _now
    _now = location[0]


def pytest_runtest_logreport(report):
    _seconds[report.location[0]] += report.duration


def pytest_sessionfinish():
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("PYTEST_XDIST_WORKER", "main")
    (FOLDER / f"{name}.json").write_text(json.dumps({n: [s, _compiled[n]] for n, s in _seconds.items()}))
