"""Kills and failed system calls: `python tests/torture/kills.py [TRIALS [JOB ...]]`.

A job is killed at random moments, at its n-th system call of a kind, or gets an error from that call (strace does both). Then
no final name may hold anything but the whole output, and resuming ends with exit code 0 and the bytes of an undisturbed job.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from jobs import JOBS, SECONDS, Trial, last_line, make_sources, undisturbed

# system call -> errors that it may end with
CALLS = {
    "pwrite64": ("ENOSPC", "EIO", "EDQUOT"),
    "write": ("ENOSPC", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
    "ftruncate": ("EIO", "ENOSPC"),
    "fallocate": ("ENOSPC", "EDQUOT"),
    "unlink": ("EIO",),
    "flock": ("ENOLCK",),
    "openat": ("EMFILE", "EIO"),
}
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")


def count_calls(trial: Trial, log: Path) -> dict[str, list[int]]:
    """System call -> numbers (counted from 1, per thread) of those that concern the job's own folder."""
    trial.run(("strace", "-f", "-qq", "-y", "-s0", "-e", f"trace={','.join(CALLS)}", "-o", str(log)))
    seen: Counter[tuple[str, str]] = Counter()
    numbers: dict[str, set[int]] = {}
    for line in log.read_text("utf-8", errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        seen[match[1], match[2]] += 1
        if str(trial.folder) in match[3] or match[2] in ("rename", "unlink"):
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


def disturb_call(trial: Trial, call: str, number: int, effect: str) -> str:
    """effect: signal=KILL or error=NAME, at the number-th such call of a thread. Returns what is wrong, or ''."""
    inject = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{effect}:when={number}")
    done = trial.run(inject)
    problem = ""
    if effect.startswith("error"):
        is_told = done.returncode in (0, 1) and "internal error" not in done.stderr and "Traceback" not in done.stderr
        problem = "" if is_told else f"exit code {done.returncode}: {last_line(done.stderr)}"
    problem = problem or trial.problem_now() or trial.problem_after_resuming()
    return f"{call} {number} {effect}: {problem}" if problem else ""


def torture(trials: int, names: list[str] | None = None, report=print, seed: int = 1) -> list[tuple[str, ...]]:
    """Rows (job, what was done, trials, problems) for so many trials of each kind of disturbance."""
    rows = []
    has_strace = shutil.which("strace") is not None
    with tempfile.TemporaryDirectory(prefix="torture-") as tmp:
        sources = make_sources(Path(tmp) / "sources")
        for name in names or JOBS:
            draw = random.Random(f"{seed} {name}")
            began = time.monotonic()
            made = undisturbed(name, sources, Path(tmp) / "undisturbed")
            seconds = min(time.monotonic() - began, SECONDS / 2)

            def trial(name: str = name, made: dict[str, bytes] = made) -> Trial:
                return Trial(name, sources, Path(tmp) / "trial", made)

            results = {"killed at random moments": [kill_at_random(trial(), draw, seconds) for _ in range(trials)]}
            if has_strace:
                numbers = count_calls(trial(), Path(tmp) / "log")
                kills, errors = [], []
                for _ in range(trials):
                    call = draw.choice([c for c in numbers if c != "openat"])
                    kills.append(disturb_call(trial(), call, draw.choice(numbers[call]), "signal=KILL"))
                    call = draw.choice(list(numbers))
                    error = f"error={draw.choice(CALLS[call])}"
                    errors.append(disturb_call(trial(), call, draw.choice(numbers[call]), error))
                results |= {"killed at a system call": kills, "system call failed": errors}
            for what, problems in results.items():
                rows.append((name, what, str(len(problems)), "; ".join(filter(None, problems))))
                report(*rows[-1])
    return rows


if __name__ == "__main__":
    found = torture(int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2:] or None)
    sys.exit(any(row[-1] for row in found))
