"""A pytest plugin: the marks that say which tests `make test` leaves to `make test-all`, and how many run at a time.

oracle    compares with torch or transformers, or runs on torch
process   kills, starts and watches processes; clusters; browsers
slow      takes seconds, and what it covers is also covered, less thoroughly, by a test that is not slow.
torture   takes longest; only `make torture` runs it

keep=[...] of a mark: patterns of the ids of those parameters that it does not apply to
"""

import gc
import os
import sys
from fnmatch import fnmatchcase

import pytest

from ggufmill.operating_system.processors import allowed_cpus

for library in ("OMP", "OPENBLAS"):  # for the processes that pytest-xdist and tests start
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Modules stay compiled, as they do for users: tests start hundreds of processes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for mark in [mark for mark in item.own_markers if "keep" in mark.kwargs]:
            if any(fnmatchcase(item.callspec.id, pattern) for pattern in mark.kwargs["keep"]):
                item.own_markers.remove(mark)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that is collected is garbage: looking for cycles in it takes a quarter of the time, then and during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(100_000, *gc.get_threshold()[1:])  # as in the command line: compiling takes a tenth less


def pytest_collect_directory(path, parent):
    """The folder of the repository is no package of tests, though it has __init__.py; its name may be none: ggufmill-main."""
    return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`-n auto`: a process for each processor, each on its own, so that no test waits for the threads of another."""
    return len(allowed_cpus())


def pytest_configure(config):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw")[2:]
    if worker and hasattr(os, "sched_setaffinity"):
        processors = allowed_cpus()
        os.sched_setaffinity(0, {processors[int(worker) % len(processors)]})
