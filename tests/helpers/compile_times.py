"""A pytest plugin: the seconds that each file of tests takes, the processor seconds of its process and of processes that it has
started, and those in which numba compiles.

    PYTHONPATH=tests/helpers pytest -p compile_times ...      writes build/compile_times/PROCESS.json
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path

from numba.core import event

FOLDER = Path("build/compile_times")
_files: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "processor": 0.0, "compiling": 0.0})
_file, _began = "", 0.0


class _Timer(event.Listener):
    depth, began = 0, 0.0

    def on_start(self, event):
        if not self.depth:
            self.began = time.process_time()
        self.depth += 1

    def on_end(self, event):
        self.depth -= 1
        if not self.depth:
            _files[_file]["compiling"] += time.process_time() - self.began


event.register("numba:compile", _Timer())


def _processor_seconds():
    return sum(os.times()[:4])


def pytest_runtest_logstart(nodeid, location):
    global _file, _began
    _file, _began = location[0], _processor_seconds()


def pytest_runtest_logfinish(nodeid, location):
    _files[_file]["processor"] += _processor_seconds() - _began


def pytest_runtest_logreport(report):
    _files[report.location[0]]["seconds"] += report.duration


def pytest_sessionfinish():
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json").write_text(json.dumps(_files))
