"""Functions for workers in tests, who import this module by its name."""

import os
import signal
import time
from pathlib import Path

from ggufmill.errors import MillError


def square(number):
    return number * number


def slow_first(number):
    """The first piece takes longest."""
    time.sleep(3 if number == 0 else 0.01)
    return number


def fail_at_three(number):
    if number == 3:
        raise MillError("this piece is bad")
    return number


def full_disk(number):
    raise OSError(28, "No space left on device", "out.gguf")


def kill_once(marker):
    """The worker dies of the first call, marked by a file that does not exist yet."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def kill_always(piece):
    os.kill(os.getpid(), signal.SIGKILL)
