"""A scheduler and workers of dask as processes of their own, as users start them, and workers that misbehave."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

QUICK = {  # settings of dask, so that faults are noticed in seconds
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "3s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "20s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "50ms",
}


class Processes:
    """folder: of the scheduler file and the logs."""

    def __init__(self, folder):
        self.folder, self.file = folder, folder / "scheduler.json"
        self.all = {}

    def start(self, name, *arguments):
        log = (self.folder / f"{name}.log").open("w")
        command = [sys.executable, "-m", "dask", *map(str, arguments)]
        self.all[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | QUICK, cwd=self.folder)
        log.close()
        return self.all[name]

    def scheduler(self):
        started = self.start(
            "scheduler", "scheduler", "--scheduler-file", self.file, *["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        )
        while not self.file.exists():
            assert started.poll() is None, self.log("scheduler")
            time.sleep(0.05)

    def worker(self, name, preload="", *options):
        """preload: Python code that the worker runs first."""
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
        ]
        code = self.folder / f"preload_{name}.py"
        code.write_text(preload)
        return self.start(name, "worker", *fixed, "--preload", code, *options)

    def wait_for_workers(self, count):
        from distributed import Client

        with Client(scheduler_file=str(self.file), set_as_default=False) as client:
            client.wait_for_workers(count, timeout=60)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def end(self):
        for process in self.all.values():
            process.kill()
        for process in self.all.values():
            process.wait()


@contextmanager
def processes(folder):
    running = Processes(folder)
    try:
        running.scheduler()
        yield running
    finally:
        running.end()


def at_first_rows(marker, action):
    """Code to preload: the first time that the worker makes rows, it does this instead; once, whatever processes there are."""
    return f"""
import os, signal, time
from pathlib import Path
from ggufmill.pipeline.cluster import worker_job

make = worker_job.__dict__.setdefault("unchanged", worker_job.encoded_rows)  # code is loaded twice under a nanny

def encoded_rows(output, start, stop):
    try:
        Path({str(marker)!r}).touch(exist_ok=False)
    except FileExistsError:
        return make(output, start, stop)
    {action}
    return make(output, start, stop)

worker_job.encoded_rows = encoded_rows
"""


SLOWLY = """
import time
from ggufmill.pipeline.cluster import worker_job

make = worker_job.__dict__.setdefault("unchanged", worker_job.encoded_rows)  # code is loaded twice under a nanny

def encoded_rows(*rows):
    time.sleep(0.1)
    return make(*rows)

worker_job.encoded_rows = encoded_rows
"""
