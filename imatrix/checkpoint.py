"""What a collection needs to go on where it was: its sums in full, kept in a file beside the result until that is done."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..formats import FormatError, PlanError
from ..jobs.atomic_write import atomic_file


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
        """Writes the file whole or not at all. Raises MillError when it cannot be written."""
        about = {"fingerprint": self.fingerprint, "done": self.done, "names": list(self.sums)}
        about |= {"losses": self.losses, "window_losses": self.window_losses, "seconds": self.seconds}
        arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), "used": self.used}
        for i, name in enumerate(self.sums):
            arrays |= {f"sums{i}": self.sums[name], f"counts{i}": self.counts[name]}
        # What a kill leaves of this one may be large: the next takes its place.
        with atomic_file(path, path.with_name(path.name + ".part")) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def load_state(path: Path) -> State:
    """Raises FormatError for a file that is damaged or something else."""
    try:
        with zipfile.ZipFile(path) as file:
            if sum(entry.file_size for entry in file.infolist()) > path.stat().st_size:
                raise ValueError  # it is compressed, which `save` does not do
            return _state({name.removesuffix(".npy"): file.read(name) for name in file.namelist()})
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except Exception:  # zipfile, numpy's reader of headers and json raise what they like
        raise FormatError(f"{path}: not the state of a collection, or damaged: remove it, or give --force") from None


def _state(parts: Mapping[str, bytes]) -> State:
    about = json.loads(_array(parts["about"], np.uint8, 1).tobytes())
    names, done, losses = about["names"], about["done"], about["losses"]
    sums = {name: _array(parts[f"sums{i}"], np.float64, 2) for i, name in enumerate(names)}
    counts = {name: _array(parts[f"counts{i}"], np.int64, 1) for i, name in enumerate(names)}
    texts = [about["fingerprint"], *names]
    numbers = [done, losses[0], *map(float, (*losses[1:], *about["window_losses"], about["seconds"]))]
    fits = len(losses) == 3 and all(isinstance(text, str) for text in texts) and all(type(n) in (int, float) for n in numbers)
    if not fits or type(done) is not int or any(len(counts[name]) != len(sums[name]) for name in names):
        raise ValueError
    used, window_losses = _array(parts["used"], np.int64, 1), tuple(about["window_losses"])
    return State(about["fingerprint"], done, sums, counts, used, tuple(losses), window_losses, float(about["seconds"]))


def _array(data: bytes, dtype: type, dimensions: int) -> np.ndarray:
    """An array in numpy's format. numpy's own reader would take the memory that the header tells, before it looks for data."""
    stream = io.BytesIO(data)
    np.lib.format.read_magic(stream)
    shape, by_column, found = np.lib.format.read_array_header_1_0(stream)
    if found != dtype or len(shape) != dimensions or (by_column and dimensions > 1):
        raise ValueError
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy()
