"""What a worker does of a job that writes a model: it makes the same plan of the same inputs, and the rows asked for.

Everything here runs in the process of a worker; instances are made by the process that gives the work, and sent.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ...data_classes import dataclass
from ...errors import MillError
from ...formats.file_range import HASH_BLOCK_BYTES, read_range
from ...jobs.execute import encoded_rows, row_chunks
from ...jobs.journal import journal_path
from ...jobs.outputs import Location, Output
from ...jobs.plan import Plan
from ...operating_system.files import BINARY, NO_FOLLOW, sync_file, write_at
from ...request_fields import values_of
from .drift_files import DriftAddress
from .models import worker_threads
from .ordered_map import UnfitWorker
from .pieces import Cut, Span
from .sent_files import SentFile

if TYPE_CHECKING:
    from ...quantize.followers import Followers

Counts = dict[str, int]


@dataclass(frozen=True)
class WorkerJob:
    """The request that a plan was made of, so that a worker can make it again.

    plan         makes the plan of the request
    request      with absolute paths, or files that were sent
    fingerprint  of the plan that has to come of it
    """

    plan: Callable[[Any], Plan]
    request: Any = field(repr=False)
    fingerprint: str

    def opened(self) -> _OpenJob:
        """The plan, made once in a process. Raises UnfitWorker if it is another than that of the one who gives the work."""
        key = repr((self.plan.__qualname__, self.request, self.fingerprint))
        with _opening:
            job = _open_jobs.get(key)
            if job is None:
                job = _OpenJob(self)
                _open_jobs.clear()  # a worker is at one job at a time, and a plan of a large model is large
                _open_jobs[key] = job
            return job


class _OpenJob:
    """A plan that was made again."""

    def __init__(self, job: WorkerJob):
        try:
            here = {k: v.path() for k, v in values_of(job.request).items() if isinstance(v, SentFile)}
            with _quiet():
                self.plan = job.plan(replace(job.request, **here))
        except MillError as error:
            raise UnfitWorker(str(error)) from None
        if self.plan.fingerprint != job.fingerprint:
            raise UnfitWorker(
                f"the plan made there is another: {job.request.source}, the recipe or importance data differ from those "
                "here (names, sizes, modification times, contents)"
            )
        self._replaced = self.plan.replaced
        self._lock = Lock()
        self._followers: tuple[DriftAddress, Followers] | None = None
        pairs = zip(self.plan.outputs, self.plan.locations, strict=True)
        self.outputs: dict[str, tuple[Output, Location]] = {o.name: (o, location) for o, location in pairs}

    def rows(self, span: Span, drifts: DriftAddress | None = None) -> Iterator[np.ndarray]:
        """The encoded chunks of a span, in order; drifts: what it is encoded for."""
        output = self.outputs[span.tensor][0]
        if drifts is not None:
            output = replace(output, produce=self._followers_of(drifts).rows_of(output.produce))
        for start, stop in row_chunks(output):
            if span.start <= start < span.stop:
                yield encoded_rows(output, start, stop)

    def _followers_of(self, drifts: DriftAddress) -> Followers:
        """What encodes the tensors of one input; that of the last one is kept."""
        from ...quantize.covariance.drift import Drift
        from ...quantize.followers import Followers

        with self._lock:
            if self._followers is None or self._followers[0] != drifts:
                made = Followers(lambda number: Drift.load(drifts.path(number)), drifts.matrices, worker_threads())
                self._followers = drifts, made
            return self._followers[1]

    def replaced(self, cut: Cut) -> Counts:
        """Weights that were written as 0 in these tensors since the last call."""
        if not self._replaced:
            return {}
        names, counts = {span.tensor for span in cut.spans}, Counter[str]()
        with self._lock:
            for name, count in self._replaced:
                counts[name] += count * (name in names)
            self._replaced[:] = [entry for entry in self._replaced if entry[0] not in names]
        return {name: count for name, count in counts.items() if count}


_open_jobs: dict[str, _OpenJob] = {}
_opening = Lock()


class _quiet:
    """No notes and warnings of ours in this process: the client has said them already."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("ggufmill")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)

    def __exit__(self, *error: object) -> None:
        self._logger.setLevel(self._level)


@dataclass(frozen=True)
class Collected:
    """Encoded rows of each span, uint8, and what was replaced."""

    data: list[np.ndarray]
    replaced: Counts


@dataclass(frozen=True)
class Stored:
    """xxh3-64 of the bytes of each span, which are on disk, and what was replaced."""

    digests: list[str]
    replaced: Counts


@dataclass(frozen=True)
class Preparation:
    """Makes the plan, and nothing else: it fails before anything is written where it would fail later."""

    job: WorkerJob

    def run(self) -> None:
        self.job.opened()


@dataclass(frozen=True)
class Collect:
    """Makes rows and sends them back."""

    job: WorkerJob
    cut: Cut

    def __str__(self) -> str:
        return str(self.cut)

    def run(self) -> Collected:
        job = self.job.opened()
        return Collected([np.concatenate([c.reshape(-1) for c in job.rows(s)]) for s in self.cut.spans], job.replaced(self.cut))


@dataclass(frozen=True)
class Store:
    """Makes rows and writes them into the .part files, which lie in a folder that all machines share. drifts: of what they are
    encoded for; None: for their own weights."""

    job: WorkerJob
    cut: Cut
    drifts: DriftAddress | None = None

    def __str__(self) -> str:
        return str(self.cut)

    def run(self) -> Stored:
        job = self.job.opened()
        digests = []
        for span in self.cut.spans:
            output, location = job.outputs[span.tensor]
            fd = _open_part(job.plan, location.file, self.job.fingerprint)
            try:
                offset = location.offset + span.start * output.type.row_bytes(output.shape[0])
                digest = xxhash.xxh3_64()
                for chunk in job.rows(span, self.drifts):
                    view = memoryview(chunk.reshape(-1).data)
                    digest.update(view)
                    while view:
                        count = write_at(fd, view, offset)
                        offset, view = offset + count, view[count:]
                sync_file(fd)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(job.plan.files[location.file].part)) from None
            finally:
                os.close(fd)
            digests.append(digest.hexdigest())
        return Stored(digests, job.replaced(self.cut))


@dataclass(frozen=True)
class Checksum:
    """Reads a tensor that several pieces wrote: its checksum, if every piece is there as it was written.

    digests: of the spans, in order.
    """

    job: WorkerJob
    spans: tuple[Span, ...]
    digests: tuple[str, ...]

    def __str__(self) -> str:
        return self.spans[0].tensor

    def run(self) -> str:
        job = self.job.opened()
        output, location = job.outputs[self.spans[0].tensor]
        path, row_bytes = job.plan.files[location.file].part, output.type.row_bytes(output.shape[0])
        whole = xxhash.xxh3_64()
        for span, expected in zip(self.spans, self.digests, strict=True):
            part, start = xxhash.xxh3_64(), location.offset + span.start * row_bytes
            for at in range(start, start + span.nbytes, HASH_BLOCK_BYTES):
                block = read_range(path, at, min(HASH_BLOCK_BYTES, start + span.nbytes - at)).data
                part.update(block)
                whole.update(block)
            if part.hexdigest() != expected:
                raise MillError(f"{path}: rows {span.start} to {span.stop} of {span.tensor} are not what was written there")
        return whole.hexdigest()


def run(work: Preparation | Collect | Store | Checksum) -> Any:
    """The function that workers are given pieces for."""
    return work.run()


def _open_part(plan: Plan, index: int, fingerprint: str) -> int:
    """A descriptor of a .part file of this job. Raises UnfitWorker where that is not the file of the one who gives the work.

    The journal next to it says whose it is: so a worker that was frozen while the job was given up, or another was begun in its
    place, does not write into it.
    """
    file = plan.files[index]
    try:
        with journal_path(plan).open("rb") as journal:
            belongs = json.loads(journal.readline()).get("fingerprint") == fingerprint
        fd = os.open(file.part, os.O_RDWR | NO_FOLLOW | BINARY)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the journal cannot be read"
        raise UnfitWorker(_not_shared(file.part, str(reason))) from None
    if not belongs or os.fstat(fd).st_size != file.nbytes:
        os.close(fd)
        raise UnfitWorker(_not_shared(file.part, "another job's file"))
    return fd


def _not_shared(part: Path, reason: str) -> str:
    return (
        f"{part}: {reason}; --cluster-output shared needs a folder that all machines see under the same path: "
        "take another, or --cluster-output collect"
    )
