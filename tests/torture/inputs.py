"""Damaged files of every kind that is read: `python tests/torture/inputs.py [EXAMPLES [TARGET ...]]`.

Each target of tests/fuzz runs in a process of its own: a signal, a hang or memory without bound ends that process alone, and
the input is written to the folder for temporary files.
"""

import contextlib
import hashlib
import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FUZZ = Path(__file__).parent.parent / "fuzz"
SECONDS = 5  # of processor time for one input
MEMORY = 1 << 30  # bytes beyond what the process has once whole files have been read
CONFIRMATIONS = 2  # runs of an input that took too long, of which the fastest counts


def run_target(name: str, examples: int) -> None:
    """Feeds damaged files to one target; prints how many, the longest time of one and the largest memory."""
    sys.path.insert(0, str(FUZZ))
    import targets

    for seed in targets.TARGETS[name].seeds:
        targets.survive(name, seed)
    targets.SECONDS = float("inf")  # measured here, several times
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    current = targets.folder() / "current"
    longest = 0.0
    for number in range(examples):
        data = targets.damaged(name, number)
        current.write_bytes(data)
        signal.setitimer(signal.ITIMER_VIRTUAL, 4 * SECONDS)  # ends the process: SIGVTALRM
        seconds = [_timed(targets, name, data)]
        while seconds[-1] > SECONDS and len(seconds) <= CONFIRMATIONS:
            seconds.append(_timed(targets, name, data))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if min(seconds) > SECONDS:
            raise AssertionError(f"input {number} takes {min(seconds):.1f} s")
        longest = max(longest, min(seconds))
    print(f"figures {examples} {longest:.2f} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}")


def _timed(targets, name: str, data: bytes) -> float:
    began = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):
        targets.survive(name, data)
    return time.process_time() - began


def torture(examples: int, names: list[str] | None = None, report=print) -> Iterator[tuple[str, ...]]:
    """Rows (target, inputs, seconds in all, longest seconds, MiB, finding or '') of all targets, or of those that are named."""
    sys.path.insert(0, str(FUZZ))
    from targets import TARGETS

    for name in names or TARGETS:
        with tempfile.TemporaryDirectory(prefix="torture-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as tmp:
            began = time.monotonic()
            command = [sys.executable, __file__, "--target", name, str(examples)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"TMPDIR": tmp})
            figures = next((line.split()[1:] for line in done.stdout.splitlines() if line.startswith("figures ")), None)
            finding = "" if figures else _finding(name, done, Path(tmp))
        tried, longest, mebibytes = figures or (str(examples), "", "")
        row = (name, tried, f"{time.monotonic() - began:.0f}", longest, mebibytes, finding)
        report(*row)
        yield row


def _finding(name: str, done: subprocess.CompletedProcess, folder: Path) -> str:
    """What ended a target, and where its last input was kept."""
    last = next(folder.glob("**/current"), None)
    data = last.read_bytes() if last else b""
    kept = Path(tempfile.gettempdir()) / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}.bin"
    kept.write_bytes(data)
    lines = done.stderr.strip().splitlines() or [""]
    what = f"signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else lines[-1]
    return f"{what} ({kept})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        run_target(sys.argv[2], int(sys.argv[3]))
    else:
        found = list(torture(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, sys.argv[2:] or None))
        sys.exit(any(row[-1] for row in found))
