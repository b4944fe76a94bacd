"""Real jobs on the bundled small model: what is run, what it writes, and how it is resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ggufmill.formats import MillError, open_gguf
from ggufmill.recipes import FOLDER

MILL = [sys.executable, "-m", "ggufmill"]
_TIME = 10**18  # ns; when the files that a job changes were last changed
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
    before   name in OUT -> source that is copied there before the job, which changes or deletes it
    """

    command: list[str]
    outputs: list[str]
    resume: list[str] = field(default_factory=lambda: ["--resume"])
    before: Mapping[str, str] = field(default_factory=dict)


_WHOLE = {"m.gguf": "whole.gguf"}
_PARTS = [f"split-{i:05d}-of-00002.gguf" for i in (1, 2)]
_SHARDS = [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
JOBS = {
    "quantize": Job(["quantize", str(DEMO), "OUT/m.gguf", "q8_0", "--custom-q", "exps=q4_0"], ["m.gguf"]),
    "convert": Job(["convert", str(DEMO), "OUT/m.gguf", "--outtype", "bf16"], ["m.gguf"]),
    "repack": Job(["repack", "IN/whole.gguf", "OUT/m.gguf"], ["m.gguf"]),
    "split": Job(["split", "IN/whole.gguf", "OUT/m", "--split-max-tensors", "30"], _SHARDS),
    "merge": Job(["merge", "IN/split-00001-of-00002.gguf", "OUT/m.gguf"], ["m.gguf"]),
    "manifest": Job(
        ["merge", "IN/split-00001-of-00002.gguf", "OUT/m.gguf", "--manifest", "--verify"], ["m.gguf", "m.gguf.manifest"]
    ),
    "merge-and-delete": Job(
        ["merge", f"OUT/{_PARTS[0]}", "OUT/m.gguf", "--delete-splits"], ["m.gguf"], before={name: name for name in _PARTS}
    ),
    "hash": Job(["hash", "IN/whole.gguf", "--all", "-o", "OUT/m.manifest"], ["m.manifest"], ["--force"]),
    "metadata-in-place": Job(["metadata", "OUT/m.gguf", "--set", "general.name=Omed"], ["m.gguf"], [], _WHOLE),
    "metadata-rewritten": Job(["metadata", "OUT/m.gguf", "--set", f"a.text={'x' * 5000}"], ["m.gguf"], [], _WHOLE),
    "convert-endian": Job(["convert-endian", "IN/whole.gguf", "OUT/m.gguf"], ["m.gguf"], ["--force"]),
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


@dataclass(frozen=True)
class Result:
    """What a job that was let alone has made. outputs: name -> bytes; names: of all files in its folder."""

    outputs: dict[str, bytes]
    names: set[str]


class Trial:
    """A folder in which a job is disturbed, resumed and checked. before: name -> bytes of what the job changes or deletes."""

    def __init__(self, name: str, sources: Path, folder: Path, undisturbed: Result | None = None):
        self.job, self.folder, self.undisturbed = JOBS[name], folder, undisturbed or Result({}, set())
        self.before = {name: (sources / source).read_bytes() for name, source in self.job.before.items()}
        self.fill(self.before)
        places = {"IN/": f"{sources}/", "OUT/": f"{folder}/"}
        self.arguments = [str(folder) if a == "OUT" else a for a in self.job.command]
        for key, value in places.items():
            self.arguments = [a.replace(key, value, 1) if a.startswith(key) else a for a in self.arguments]

    def fill(self, files: Mapping[str, bytes]) -> None:
        """The folder has these files and no others."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            if name in self.before:
                os.utime(path, ns=(_TIME, _TIME))  # a job goes on with the source that it began with

    def command(self, *, resume: bool = False) -> list[str]:
        return [*MILL, *self.arguments, *(self.job.resume if resume else [])]

    def run(self, prefix: tuple[str, ...] = (), *, resume: bool = False) -> subprocess.CompletedProcess[str]:
        command = [*prefix, *self.command(resume=resume)]
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.glob("**/*") if path.is_file()}

    def outputs(self) -> dict[str, bytes]:
        """The outputs that have their final name."""
        return {name: (self.folder / name).read_bytes() for name in self.job.outputs if (self.folder / name).exists()}

    def problem_now(self) -> str:
        """What is wrong with the outputs that have their names already; '' if nothing is."""
        for name, data in self.outputs().items():
            if data not in (self.undisturbed.outputs[name], self.before.get(name)) and not self._is_refused(name):
                return f"{name} is not whole"
        return ""

    def _is_refused(self, name: str) -> bool:
        """Whether a file that is changed in place is not taken for a model until the change is complete."""
        try:
            open_gguf(self.folder / name)
        except MillError as error:
            return "interrupted" in str(error)
        return False

    def problem_after_resuming(self) -> str:
        """What is wrong once the job has been resumed to its end."""
        done = self.run(resume=True)
        if done.returncode:
            return f"resume ends with {done.returncode}: {last_line(done.stderr)}"
        return self.problem_at_the_end()

    def problem_at_the_end(self, durable: bool = False) -> str:
        """What is wrong where the job has ended with 0. durable: after a power cut, which may bring back what was removed."""
        outputs = self.outputs()
        if missing := sorted(self.undisturbed.outputs.keys() - outputs.keys()):
            return f"{missing} missing"
        if changed := [name for name, data in outputs.items() if data != self.undisturbed.outputs[name]]:
            return f"{changed} with other bytes"
        left = [] if durable else sorted(self.names() - self.undisturbed.names)
        return f"left behind: {left}" if left else ""


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][-300:]


def undisturbed(name: str, sources: Path, folder: Path) -> Result:
    """What comes of a job that is let alone. Raises RuntimeError if it fails."""
    trial = Trial(name, sources, folder)
    done = trial.run()
    made = trial.outputs()
    if done.returncode or len(made) != len(trial.job.outputs) or made == trial.before:
        raise RuntimeError(f"{name}: {last_line(done.stderr)} {sorted(trial.names())}")
    return Result(made, trial.names())
