"""What a collection needs to go on where it was: its sums in full, kept in a file beside the result until that is done."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..formats import FormatError, PlanError


@dataclass(frozen=True)
class State:
    """fingerprint: of the job; done: windows that are in; sums float64, counts int64: by name, a row per matrix; used: int64,
    how often each embedding was looked up; losses, window_losses, seconds: of the perplexity so far."""

    fingerprint: str
    done: int
    sums: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    used: np.ndarray
    losses: tuple[int, float, float]
    window_losses: tuple[float, ...]
    seconds: float

    def check(self, fingerprint: str, total: int) -> None:
        """Raises PlanError if this is the state of another job."""
        if fingerprint != self.fingerprint or self.done > total:
            raise PlanError(
                f"the interrupted run was of another job (model, texts, windows or settings differ; it had done {self.done} "
                "windows): give the same arguments, or --force to start afresh"
            )

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        about = {"fingerprint": self.fingerprint, "done": self.done, "names": list(self.sums)}
        about |= {"losses": self.losses, "window_losses": self.window_losses, "seconds": self.seconds}
        arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), "used": self.used}
        for i, name in enumerate(self.sums):
            arrays |= {f"sums{i}": self.sums[name], f"counts{i}": self.counts[name]}
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


def load_state(path: Path) -> State:
    """Raises FormatError for a file that is damaged or something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            names = about["names"]
            return State(
                about["fingerprint"],
                int(about["done"]),
                {name: file[f"sums{i}"] for i, name in enumerate(names)},
                {name: file[f"counts{i}"] for i, name in enumerate(names)},
                file["used"],
                tuple(about["losses"]),
                tuple(about["window_losses"]),
                float(about["seconds"]),
            )
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, EOFError, AttributeError, zipfile.BadZipFile):
        raise FormatError(f"{path}: not the state of a collection, or damaged: remove it, or give --force") from None
