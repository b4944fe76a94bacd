"""Kills, signals and failed system calls: `python tests/torture/kills.py [TRIALS [JOB ...]]`.

A job is killed at random moments or at its n-th system call of a kind, gets an error from that call (strace does both), or is
asked to end by a signal. Then no final name may hold anything but the whole output, an error or a signal has its exit code and
its one line, and resuming ends with exit code 0 and the bytes of an undisturbed job.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from jobs import DEMO, JOBS, SECONDS, Result, Trial, last_line, make_sources, undisturbed

# system call -> errors that it may end with
CALLS = {
    "pwrite64": ("ENOSPC", "EIO", "EDQUOT"),
    "write": ("ENOSPC", "EIO", "EDQUOT"),
    "pread64": ("EIO",),
    "preadv": ("EIO",),
    "read": ("EIO",),
    "mmap": ("ENOMEM", "EMFILE"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("EIO", "ENOSPC"),
    "ftruncate": ("EIO", "ENOSPC"),
    "fallocate": ("ENOSPC", "EDQUOT"),
    "unlink": ("EIO",),
    "flock": ("ENOLCK",),
    "openat": ("EMFILE", "EIO"),
}
_WRITING = ("pwrite64", "write", "fsync", "rename", "ftruncate", "fallocate", "unlink")  # worth being killed at
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
_STRACE = ("strace", "-f", "-qq", "--seccomp-bpf")
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")
_INTERNAL = ("internal error", "Traceback")
_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)


def count_calls(trial: Trial, sources: Path, log: Path) -> dict[str, list[int]]:
    """System call -> numbers (counted from 1, per thread) of those that concern the job's own folder, or its sources."""
    trial.run((*_STRACE, "-y", "-e", f"trace={','.join(CALLS)}", "-o", str(log)))
    seen: Counter[tuple[str, str]] = Counter()
    numbers: dict[str, set[int]] = {}
    for line in log.read_text("utf-8", errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        seen[match[1], match[2]] += 1
        if any(f"{folder}/" in match[3] or f"{folder}>" in match[3] for folder in (trial.folder, sources, DEMO)):
            numbers.setdefault(match[2], set()).add(seen[match[1], match[2]])
    return {call: sorted(found) for call, found in numbers.items()}


def kill_at_random(trial: Trial, draw: random.Random, seconds: float) -> str:
    """Kills the job, and the resumed one, at up to three moments. Returns what is wrong, or ''."""
    for attempt in range(draw.randrange(1, 4)):
        process = subprocess.Popen(trial.command(resume=attempt > 0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(seconds * draw.random())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        problem = trial.problem_now()
        if problem:
            return problem
    return trial.problem_after_resuming()


def end_at_random(trial: Trial, draw: random.Random, seconds: float) -> str:
    """Sends a signal once the program has its handlers. Returns what is wrong, or ''."""
    number = draw.choice(SIGNALS)
    process = subprocess.Popen(trial.command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    while process.poll() is None and not _catches(process.pid, number):
        time.sleep(0.002)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds * draw.random())
    process.send_signal(number)
    _, said = process.communicate(timeout=SECONDS)
    problem = ""
    if process.returncode not in (0, 128 + number):
        problem = f"exit code {process.returncode}: {last_line(said)}"
    elif process.returncode and (said.count("ggufmill: ") != 1 or "ggufmill: interrupted" not in last_line(said)):
        problem = f"more or less than its line: {said[-300:]!r}"
    problem = problem or _internal(said) or trial.problem_now() or trial.problem_after_resuming()
    return f"{number.name}: {problem}" if problem else ""


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
    except OSError:  # it has ended, or there is no /proc
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return int(caught, 16) >> (number - 1) & 1 == 1 and int(caught, 16) >> (signal.SIGTERM - 1) & 1 == 1


def _internal(said: str) -> str:
    return next((f"{word}: {last_line(said)}" for word in _INTERNAL if word in said), "")


def failed_before(said: str) -> bool:
    """Whether Python itself failed, before a line of the program ran: when it opened __main__.py, for example. A number counts
    in each thread, so it may be that of an early call too."""
    frames = _FRAME.findall(said)
    return bool(frames) and all(frame.startswith("<frozen ") for frame in frames)


def disturb_call(trial: Trial, call: str, number: int, effect: str) -> str:
    """effect: signal=KILL or error=NAME, at the number-th such call of a thread. Returns what is wrong, or ''."""
    done = trial.run((*_STRACE, "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{effect}:when={number}"))
    problem = ""
    if effect.startswith("error") and not failed_before(done.stderr):
        lines = sum(line.startswith("ggufmill: ") for line in done.stderr.replace("\r", "\n").splitlines())
        is_told = done.returncode in (0, 1) and lines == done.returncode
        problem = _internal(done.stderr) or ("" if is_told else f"exit code {done.returncode}: {last_line(done.stderr)}")
        if not problem and done.returncode == 0:
            problem = trial.problem_at_the_end()
    problem = problem or trial.problem_now() or trial.problem_after_resuming()
    return f"{call} {number} {effect}: {problem}" if problem else ""


def torture(trials: int, names: list[str] | None = None, report=print, seed: int = 1) -> Iterator[tuple[str, ...]]:
    """Rows (job, what was done, trials, problems) for so many trials of each kind of disturbance."""
    has_strace = shutil.which("strace") is not None
    with tempfile.TemporaryDirectory(prefix="torture-") as tmp:
        sources = make_sources(Path(tmp) / "sources")
        for name in names or JOBS:
            draw = random.Random(f"{seed} {name}")
            began = time.monotonic()
            made = undisturbed(name, sources, Path(tmp) / "trial")  # the same folder: manifests name it
            seconds = min(time.monotonic() - began, SECONDS / 2)

            def trial(name: str = name, made: Result = made) -> Trial:
                return Trial(name, sources, Path(tmp) / "trial", made)

            results = {
                "killed at random moments": [kill_at_random(trial(), draw, seconds) for _ in range(trials)],
                "signals at random moments": [end_at_random(trial(), draw, seconds) for _ in range(trials)],
            }
            if has_strace:
                numbers = count_calls(trial(), sources, Path(tmp) / "log")
                kills, errors = [], []
                for _ in range(trials):
                    call = draw.choice([c for c in numbers if c in _WRITING])
                    kills.append(disturb_call(trial(), call, draw.choice(numbers[call]), "signal=KILL"))
                    call = draw.choice(list(numbers))
                    error = f"error={draw.choice(CALLS[call])}"
                    errors.append(disturb_call(trial(), call, draw.choice(numbers[call]), error))
                results |= {"killed at a system call": kills, "system call failed": errors}
            for what, problems in results.items():
                row = (name, what, str(len(problems)), "; ".join(filter(None, problems)))
                report(*row)
                yield row


if __name__ == "__main__":
    found = list(torture(int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2:] or None))
    sys.exit(any(row[-1] for row in found))
