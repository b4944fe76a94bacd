"""What a text tells of the inputs of matrices, in files beside the output, for the workers that encode these matrices."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_classes import dataclass
from ...formats.types import dims
from ...jobs.execute import Pending
from ...jobs.plan import Plan
from .pieces import Cut

if TYPE_CHECKING:
    from ...quantize.covariance.drift import Drift


@dataclass(frozen=True)
class DriftAddress:
    """Where workers find it. first: tensor of those that have the input; matrices: that have inputs of their own."""

    folder: str
    first: str
    matrices: int

    def path(self, number: int) -> Path:
        """The file of one matrix."""
        return Path(self.folder, f"{number}.npz")

    def numbers(self, cut: Cut, rows: dict[str, int]) -> list[int]:
        """Of the files that a piece needs. rows: name of a tensor -> of a matrix of it."""
        if self.matrices == 1:
            return [0]
        spans = ((span.start // rows[span.tensor], (span.stop - 1) // rows[span.tensor]) for span in cut.spans)
        return sorted({number for first, last in spans for number in range(first, last + 1)})


class DriftFiles:
    """The files of one input: each is written before the first piece that needs it, and removed after the last one."""

    def __init__(self, address: DriftAddress, pending: Pending, cuts: Sequence[Cut], drift_of: Callable[[int], Drift]):
        self.address, self._drift_of = address, drift_of
        self._rows = {output.name: dims(output.shape)[1] for output, _ in pending}
        self._needed = Counter(number for one in cuts for number in address.numbers(one, self._rows))
        self._there = set[int]()

    def write(self, piece: Cut) -> None:
        """Writes what a piece needs and is not there."""
        for number in self.address.numbers(piece, self._rows):
            if number not in self._there:
                self._there.add(number)
                self._drift_of(number).save(self.address.path(number))

    def remove(self, piece: Cut) -> None:
        """Removes what no other piece needs, after one that is finished."""
        for number in self.address.numbers(piece, self._rows):
            self._needed[number] -= 1
            if not self._needed[number]:
                self.address.path(number).unlink()


@contextmanager
def drift_files(
    plan: Plan, pending: Pending, cuts: Sequence[Cut], matrices: int, drift_of: Callable[[int], Drift]
) -> Iterator[DriftFiles]:
    """The files of the input of some tensors, in a folder of their own that ends with the context. One that a job left that was
    killed is replaced."""
    folder = plan.files[0].path.absolute().with_name(f"{plan.files[0].path.name}.drifts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield DriftFiles(DriftAddress(str(folder), pending[0][0].name, matrices), pending, cuts, drift_of)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
