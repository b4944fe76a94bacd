"""A scheduler and workers of dask as processes of their own, as users start them, and workers that misbehave."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

QUICK = {  # settings of dask, so that faults are noticed in seconds
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "20s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "50ms",
}


class Processes:
    """folder: of the scheduler file and the logs; ttl: how long a worker may be silent, as one that compiles on a busy machine
    is for seconds."""

    def __init__(self, folder, ttl):
        self.folder, self.file, self.ttl = folder, folder / "scheduler.json", ttl
        self.all = {}

    def start(self, name, *arguments):
        log = (self.folder / f"{name}.log").open("w")
        command = [sys.executable, "-m", "dask", *map(str, arguments)]
        self.all[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.settings, cwd=self.folder)
        log.close()
        return self.all[name]

    @property
    def settings(self):
        return os.environ | QUICK | {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": self.ttl}

    def scheduler(self):
        started = self.start(
            "scheduler", "scheduler", "--scheduler-file", self.file, *["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        )
        while not self.file.exists():
            assert started.poll() is None, self.log("scheduler")
            time.sleep(0.05)

    def worker(self, name, preload="", *options, nanny=False):
        """preload: Python code that the worker runs first; nanny: a process that watches it, which takes as long to start."""
        fixed = [
            "--scheduler-file",
            self.file,
            "--name",
            name,
            "--nthreads",
            1,
            "--no-dashboard",
            "--local-directory",
            self.folder,
            "--nanny" if nanny else "--no-nanny",
        ]
        code = self.folder / f"preload_{name}.py"
        code.write_text(preload)
        return self.start(name, "worker", *fixed, "--preload", code, *options)

    def wait_for_workers(self, count):
        from distributed import Client

        with Client(scheduler_file=str(self.file), set_as_default=False) as client:
            client.wait_for_workers(count, timeout=300)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def end(self):
        for process in self.all.values():
            process.kill()
        for process in self.all.values():
            process.wait()


@contextmanager
def processes(folder, ttl="120s"):
    running = Processes(folder, ttl)
    try:
        running.scheduler()
        yield running
    finally:
        running.end()


def before_calls(module, name, action, marker=None):
    """Code to preload: the worker does an action before it calls a function of a module of pipeline/cluster.

    marker: a file that is made the first time; later calls, of whatever process, are left alone."""
    once = f"""
    try:
        Path({str(marker)!r}).touch(exist_ok=False)
    except FileExistsError:
        return unchanged(*arguments)"""
    return f"""
import os, signal, time
from pathlib import Path
from ggufmill.pipeline.cluster import {module}

unchanged = {module}.__dict__.setdefault("unchanged_{name}", {module}.{name})  # code is loaded twice under a nanny

def changed(*arguments):{once if marker is not None else ""}
    {action}
    return unchanged(*arguments)

{module}.{name} = changed
"""


def at_first_rows(marker, action):
    """Code to preload: the first time that the worker makes rows, it does this before."""
    return before_calls("worker_job", "encoded_rows", action, marker)


def at_first_windows(marker, action):
    """The first time that the worker runs windows for covariances."""
    return before_calls("covariance", "_sums_here", action, marker)


SLOWLY = before_calls("worker_job", "encoded_rows", "time.sleep(0.1)")
