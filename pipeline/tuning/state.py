"""What an interrupted `tune` goes on from: a file beside the output."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .descent import Progressed

_SHARE = 0.05  # of the time that writing may take


class TuningState:
    """The file of a job. fingerprint: of its plan, and of what else decides its steps."""

    def __init__(self, path: Path, fingerprint: str):
        self.path, self._fingerprint = path, fingerprint
        self._next = 0.0  # when it is worth writing again

    def load(self) -> tuple[Progressed, dict[str, np.ndarray]] | None:
        """How far the job had come, and the numbers that changes are relative to; None where no such job was interrupted."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                head = json.loads(str(stored["head"]))
                if head["fingerprint"] != self._fingerprint:
                    return None
                parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in head["parts"]}
                for number, (part, name) in enumerate(head["names"]):
                    parts[part][name] = stored[str(number)]
        except (OSError, ValueError, KeyError, EOFError):  # also of a damaged file: the job begins again
            return None
        given = parts.pop("given")
        return Progressed(head["step"], head["losses"], parts), given

    def save(self, progressed: Progressed, given: Mapping[str, np.ndarray], *, now: bool = False) -> None:
        """Writes it, unless it was written too recently. Raises OSError."""
        started = time.monotonic()
        if not now and started < self._next:
            return
        parts = {**progressed.arrays, "given": given}
        names = [(part, name) for part, arrays in parts.items() for name in arrays]
        head = {"fingerprint": self._fingerprint, "step": progressed.step, "losses": progressed.losses}
        text = json.dumps(head | {"parts": list(parts), "names": names})
        written = self.path.with_name(f"{self.path.name}.part")
        with written.open("wb") as file:
            np.savez(file, head=np.array(text), **{str(i): parts[part][name] for i, (part, name) in enumerate(names)})
            file.flush()
            os.fsync(file.fileno())
        written.replace(self.path)
        finished = time.monotonic()
        self._next = finished + (finished - started) / _SHARE

    def forget(self) -> None:
        """Removes the file, once the output has its name."""
        self.path.unlink(missing_ok=True)
        self.path.with_name(f"{self.path.name}.part").unlink(missing_ok=True)
