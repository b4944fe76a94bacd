"""Real jobs on the small model that comes along: what is run, what it writes, and how it is resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ggufmill.recipes import FOLDER

MILL = [sys.executable, "-m", "ggufmill"]
SECONDS = 300  # that a job may take on a loaded machine
DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
_RECIPE = """
[source]
model = '{demo}'
[imatrix]
text = '{demo}/calibration.txt'
ctx = 64
chunks = 4
[quantize]
type = "q8_0"
rules = "exps=q4_0"
"""
_WINDOWS = ["-f", str(TEXT), "-c", "64", "-b", "64", "--chunks", "8", "--output-frequency", "2"]


@dataclass(frozen=True)
class Job:
    """A command, with OUT for its folder and IN for that of the sources.

    outputs  files that it leaves in OUT; reports are left out, which have times in them
    resume   what is added when it is run again
    """

    command: list[str]
    outputs: list[str]
    resume: list[str] = field(default_factory=lambda: ["--resume"])


JOBS = {
    "quantize": Job(["quantize", str(DEMO), "OUT/m.gguf", "q8_0", "--custom-q", "exps=q4_0"], ["m.gguf"]),
    "convert": Job(["convert", str(DEMO), "OUT/m.gguf", "--outtype", "bf16"], ["m.gguf"]),
    "repack": Job(["repack", "IN/whole.gguf", "OUT/m.gguf"], ["m.gguf"]),
    "split": Job(
        ["split", "IN/whole.gguf", "OUT/m", "--split-max-tensors", "30"], [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    ),
    "merge": Job(["merge", "IN/split-00001-of-00002.gguf", "OUT/m.gguf"], ["m.gguf"]),
    "imatrix": Job(["imatrix", "IN/whole.gguf", "-o", "OUT/m.imatrix", *_WINDOWS], ["m.imatrix"]),
    "covariance": Job(
        ["imatrix", "IN/whole.gguf", "-o", "OUT/m.imatrix", "--covariance", "OUT/m.cov", *_WINDOWS], ["m.imatrix", "m.cov"]
    ),
    "run": Job(["run", "IN/short.toml", "-o", "OUT"], ["short.gguf", "short.imatrix"], []),
}


def make_sources(folder: Path) -> Path:
    """A GGUF, a split one and a recipe, which the jobs read."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*MILL, "convert", DEMO, folder / "whole.gguf", "--outtype", "q8_0"], check=True, capture_output=True)
    split = ["split", folder / "whole.gguf", folder / "split", "--split-max-tensors", "40"]
    subprocess.run([*MILL, *split], check=True, capture_output=True)
    (folder / "short.toml").write_text(_RECIPE.replace("{demo}", str(DEMO)))
    return folder


class Trial:
    """A folder in which a job is disturbed, resumed and checked."""

    def __init__(self, name: str, sources: Path, folder: Path, undisturbed: dict[str, bytes] | None = None):
        self.job, self.folder, self.undisturbed = JOBS[name], folder, undisturbed or {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        places = {"IN/": f"{sources}/", "OUT/": f"{folder}/"}
        self.arguments = [str(folder) if a == "OUT" else a for a in self.job.command]
        for key, value in places.items():
            self.arguments = [a.replace(key, value, 1) if a.startswith(key) else a for a in self.arguments]

    def command(self, *, resume: bool = False) -> list[str]:
        return [*MILL, *self.arguments, *(self.job.resume if resume else [])]

    def run(self, prefix: tuple[str, ...] = (), *, resume: bool = False) -> subprocess.CompletedProcess[str]:
        command = [*prefix, *self.command(resume=resume)]
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS)

    def outputs(self) -> dict[str, bytes]:
        """The outputs that have their final name."""
        return {name: (self.folder / name).read_bytes() for name in self.job.outputs if (self.folder / name).exists()}

    def problem_now(self) -> str:
        """What is wrong with the outputs that have their names already; '' if nothing is."""
        return next((f"{name} is not whole" for name, data in self.outputs().items() if data != self.undisturbed[name]), "")

    def problem_after_resuming(self) -> str:
        """What is wrong once the job has been resumed to its end."""
        done = self.run(resume=True)
        if done.returncode:
            return f"resume ends with {done.returncode}: {last_line(done.stderr)}"
        if self.outputs().keys() != self.undisturbed.keys():
            return f"{self.undisturbed.keys() - self.outputs().keys()} missing"
        left = [n for n in os.listdir(self.folder) if n.endswith((".part", ".journal", ".state", ".lock"))]
        return self.problem_now() or (f"left behind: {left}" if left else "")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][-300:]


def undisturbed(name: str, sources: Path, folder: Path) -> dict[str, bytes]:
    """Output -> bytes of a job that is let alone. Raises RuntimeError if it fails."""
    trial = Trial(name, sources, folder)
    done = trial.run()
    made = trial.outputs()
    if done.returncode or len(made) != len(trial.job.outputs):
        raise RuntimeError(f"{name}: {last_line(done.stderr)} {sorted(os.listdir(folder))}")
    return made
