"""A pytest plugin: SIGTERM and Ctrl-C end a run of tests, also while a test runs the command line in this process.

The command line sets handlers of its own where there are Python's, and turns a signal into the end of the verb: the test that
runs it would fail, and the run would go on. Tests of that ask for `python_handlers`.
"""

import os
import signal

import pytest

_interrupted = False


def pytest_sessionstart(session):
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _interrupt)


def pytest_runtest_logfinish():
    if _interrupted:
        raise KeyboardInterrupt


@pytest.fixture
def python_handlers():
    """Within the test the signals have Python's own handlers, as in a process that has just begun."""
    before = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _terminate(number, frame):
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _interrupt(number, frame):
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt
