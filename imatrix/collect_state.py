"""The state of an interrupted collection: its exact sums, in a file next to the result until that is complete."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..data_classes import dataclass
from ..formats import FormatError, PlanError
from ..jobs.atomic_write import atomic_file


@dataclass(frozen=True)
class CollectState:
    """What a collection needs to be resumed.

    fingerprint    of the job (`Calibration.fingerprint`)
    done           windows that are included
    sums, counts   tensor name -> float64 [matrices, columns] and int64 [matrices]
    token_counts   int64 [embeddings], how many times each was looked up
    losses, window_losses, seconds   of the perplexity so far
    """

    fingerprint: str
    done: int
    sums: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    token_counts: np.ndarray
    losses: tuple[int, float, float]
    window_losses: tuple[float, ...]
    seconds: float

    def check(self, fingerprint: str, total: int) -> None:
        """Raises PlanError if this is the state of another job; total: windows of the job."""
        if fingerprint != self.fingerprint or self.done > total:
            raise PlanError(
                f"the interrupted run was of another job (model, texts, windows or settings differ; it had done {self.done} "
                "windows): give the same arguments, or --force to start over"
            )

    def save(self, path: Path) -> None:
        """Writes the file atomically. Raises MillError if it cannot be written."""
        header = {"fingerprint": self.fingerprint, "done": self.done, "names": list(self.sums)}
        header |= {"losses": self.losses, "window_losses": self.window_losses, "seconds": self.seconds}
        arrays = {"about": np.frombuffer(json.dumps(header).encode(), np.uint8), "used": self.token_counts}
        for i, name in enumerate(self.sums):
            arrays |= {f"sums{i}": self.sums[name], f"counts{i}": self.counts[name]}
        # One name for the unfinished file: what a kill leaves may be large, and is overwritten by the next save.
        with atomic_file(path, path.with_name(path.name + ".part")) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def state_path(out: Path) -> Path:
    """Where the state of a collection into a file is."""
    return out.with_name(out.name + ".state")


def load_state(path: Path) -> CollectState:
    """Reads what `CollectState.save` wrote. Raises FormatError for a damaged file or one of another kind."""
    try:
        with zipfile.ZipFile(path) as file:
            if sum(entry.file_size for entry in file.infolist()) > path.stat().st_size:
                raise ValueError  # it is compressed, which `save` does not do
            return _parse({name.removesuffix(".npy"): file.read(name) for name in file.namelist()})
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except Exception:  # zipfile, numpy's header parser and json raise many types
        raise FormatError(f"{path}: not the state of a collection, or damaged: remove it, or give --force") from None


def _parse(members: Mapping[str, bytes]) -> CollectState:
    header = json.loads(_array(members["about"], np.uint8, 1).tobytes())
    names, done, losses = header["names"], header["done"], header["losses"]
    sums = {name: _array(members[f"sums{i}"], np.float64, 2) for i, name in enumerate(names)}
    counts = {name: _array(members[f"counts{i}"], np.int64, 1) for i, name in enumerate(names)}
    texts = [header["fingerprint"], *names]
    numbers = [done, losses[0], *map(float, (*losses[1:], *header["window_losses"], header["seconds"]))]
    are_texts, are_numbers = all(isinstance(t, str) for t in texts), all(type(n) in (int, float) for n in numbers)
    same_lengths = all(len(counts[name]) == len(sums[name]) for name in names)
    if len(losses) != 3 or not are_texts or not are_numbers or type(done) is not int or not same_lengths:
        raise ValueError
    token_counts, window_losses = _array(members["used"], np.int64, 1), tuple(header["window_losses"])
    seconds = float(header["seconds"])
    return CollectState(header["fingerprint"], done, sums, counts, token_counts, tuple(losses), window_losses, seconds)


def _array(data: bytes, dtype: type, dimensions: int) -> np.ndarray:
    """An array in .npy format. numpy's own reader would allocate what the header says before it looks at the data's size."""
    stream = io.BytesIO(data)
    np.lib.format.read_magic(stream)
    shape, fortran_order, stored_dtype = np.lib.format.read_array_header_1_0(stream)
    if stored_dtype != dtype or len(shape) != dimensions or (fortran_order and dimensions > 1):
        raise ValueError
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy()
