"""Executing a plan: chunks of rows are made by a pool of threads in any order and written at their planned offsets.

Each output file is allocated as NAME.part. The journal records every complete tensor with a checksum, so a killed job leaves
the .part files and the journal, and resuming verifies what the journal claims and continues. Finished files are synced and
renamed, so a reader never sees a part of one. Memory is bounded by the threads, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import field
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError, MillError, PlanError
from ..formats.file_range import range_checksum
from ..formats.types import dims
from ..operating_system.files import BINARY, NO_FOLLOW, reserve_space, sync_file, sync_folder, write_at
from ..operating_system.memory import retain_free_memory, trim_free_memory
from ..operating_system.processors import available_cpus
from ..simd.compile.compile_time import compiling_for
from .journal import Journal, JournalRecords, journal_path
from .ordered_writer import OrderedWriter, Sink
from .outputs import Location, Output
from .plan import Plan
from .preflight import is_as_planned
from .steps import hearing

CHUNK_ELEMENTS = 1 << 20  # float32 elements of a chunk: 4 MiB; a thread needs about 20 times that at the worst
CHUNKS_PER_THREAD = 3  # in flight: being made, or waiting for those before them to be written
MIN_DIRECT_BYTES = 256 << 20  # of a job: a smaller output should stay in the page cache, for what reads it next

Progress = Callable[[int, str], None]  # (bytes written since the last call, tensor name; with 0 bytes a step within it)
# (tensor name -> checksum of all complete tensors, a function that brings them and the journal to disk)
OnFinished = Callable[[Mapping[str, str], Callable[[], None]], None]
Pending = list[tuple[Output, Location]]


@dataclass(frozen=True)
class JobResult:
    """What a job wrote.

    paths      the files
    nbytes     their size together
    checksums  tensor name -> xxh3-64 of its bytes, in hex
    resumed    how many tensors an interrupted job had completed before
    """

    paths: list[Path]
    nbytes: int
    checksums: dict[str, str]
    resumed: int


@dataclass
class OpenFiles:
    """The .part files of a plan that are being written, index -> file descriptor, and the journal."""

    plan: Plan
    journal: Journal
    fds: dict[int, int] = field(default_factory=dict)

    def sync(self) -> None:
        """Brings what was written so far to disk, and after that what the journal says of it. Raises OSError; the journal then
        says so, since the system may forget that these bytes are not on disk once it has reported the failure."""
        try:
            for fd in self.fds.values():
                sync_file(fd)
            sync_folder(self.journal.path.resolve().parent)  # the names, without which a power cut leaves the journal alone
            self.journal.sync()
        except OSError:
            self.journal.sync_failed()
            raise

    def check_untouched(self) -> None:
        """Raises MillError for a .part file that another program has cut, removed or replaced meanwhile: later writes would
        give a file that was cut its size again, and end with zeros where it lost bytes."""
        for index, fd in self.fds.items():
            file, opened = self.plan.files[index], os.fstat(fd)
            try:
                named = file.part.stat()
            except OSError:
                named = None
            if named is None or not os.path.samestat(opened, named):
                raise MillError(f"{file.part} was removed or replaced by another program while it was written")
            if opened.st_size < file.nbytes:
                left = f"{opened.st_size} of {file.nbytes} bytes are left"
                raise MillError(f"{file.part} was cut by another program while it was written: {left}")

    def sink(self, output: Output, location: Location) -> Sink:
        """Where the bytes of a tensor go."""
        return Sink(output.name, self.fds[location.file], location.offset, output.nbytes)

    def close(self) -> None:
        """Closes the files; what was written stays in them."""
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


# (files, tensors to write, record, progress): writes them, and calls record(tensor name, checksum) for each when its last byte
# is written, never in two threads at once. After an error tensors that are being written may still be finished.
WriteTensors = Callable[[OpenFiles, Pending, Callable[[str, str], None], Progress], None]
FinishTensors = Callable[[OpenFiles, Callable[[str, str], None]], None]


def execute(
    plan: Plan,
    *,
    threads: int | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    existing: Collection[int] = (),
    on_finished: OnFinished | None = None,
    verify_inputs: Callable[[], None] | None = None,
    write: WriteTensors | None = None,
    on_bytes: Callable[[str, memoryview], None] | None = None,
    finish: FinishTensors | None = None,
) -> JobResult:
    """Writes the files of a plan. Call `preflight` first.

    threads        by default one per processor
    resume         continue from the journal of an interrupted job, if there is one; force: start over whatever is there
    existing       indexes of files that are complete already; they are neither written nor read
    on_finished    called by one thread at a time as tensors are completed, for a job that frees disk space as it goes on: the
                   output is then not allocated in advance
    on_bytes       called with a tensor's name and its next bytes, where threads of this process write it
    write          makes and writes the tensors; None: threads of this process do, with `write_by_threads`
    finish         changes what is written, of tensors whose checksums it records again; it gives the same for the same tensors,
                   also for those that it has changed already
    verify_inputs  called when everything is written, before a file gets its name; raises MillError if the inputs have changed

    Raises what a tensor's `produce` raises; .part files and journal then stay, and resume=True continues from them. Raises
    PlanError when the journal belongs to another plan or another process holds it.
    """
    threads = threads or available_cpus()
    journal_path(plan).resolve().parent.mkdir(parents=True, exist_ok=True)
    files = OpenFiles(plan, Journal(plan))
    try:
        records = files.journal.resume() if resume and not force else None
        if records is not None and records.complete and _covers(records, plan, existing):
            return _give_names(files, existing, dict(records.tensors), len(records.tensors), recorded=True)
        done = _open_parts(files, existing, records, allocate=on_finished is None)
        resumed = len(done)
        tensors = [(o, loc) for o, loc in zip(plan.outputs, plan.locations, strict=True) if loc.file not in existing]
        pending = [(o, loc) for o, loc in tensors if o.name not in done]
        if progress is not None:
            progress(plan.total_bytes - sum(o.nbytes for o, _ in pending), "")
        if on_finished is not None:
            on_finished(done, files.sync)

        def record(name: str, checksum: str) -> None:
            files.check_untouched()
            done[name] = checksum
            files.journal.add(name, checksum)
            if on_finished is not None:
                on_finished(done, files.sync)

        trim_free_memory()  # of planning and of timing, which would stay otherwise
        retain_free_memory()
        try:
            (write or partial(write_by_threads, threads=threads, on_bytes=on_bytes))(
                files, pending, record, progress or (lambda count, name: None)
            )
            if finish is not None:
                finish(files, record)
            files.sync()
        except (MillError, OSError) as error:
            if isinstance(error, OSError):
                reason = f"{plan.files[next(iter(files.fds), 0)].part}: {error.strerror or error}"
            else:
                reason = str(error)
            raise MillError(f"{reason} ({len(done)} of {len(tensors)} tensors are kept; --resume continues)") from error
        if verify_inputs is not None:
            verify_inputs()
        return _give_names(files, existing, done, resumed)
    finally:
        files.close()
        files.journal.close()
        trim_free_memory()


def _covers(records: JournalRecords, plan: Plan, existing: Collection[int]) -> bool:
    """Whether a journal names every tensor of the files that are not there yet. One that calls itself complete without them was
    damaged or edited, and the tensors are written."""
    named = {name for name, _ in records.tensors}
    return all(o.name in named for o, loc in zip(plan.outputs, plan.locations, strict=True) if loc.file not in existing)


def _give_names(
    files: OpenFiles, existing: Collection[int], done: dict[str, str], resumed: int, *, recorded: bool = False
) -> JobResult:
    """Records that the .part files are complete and on disk (unless it is `recorded`), renames them, and removes the journal.
    Raises PlanError if one is not there with its size and header, MillError if something cannot be written."""
    plan = files.plan
    files.close()
    try:
        if not recorded:
            files.journal.complete()
        for index, file in enumerate(plan.files):
            if index in existing:
                continue
            whole = file.part if file.part.exists() else file.path
            if not is_as_planned(file, whole):
                raise PlanError(f"{whole} was complete, and has changed since; --force starts over")
            if whole != file.path:
                os.replace(file.part, file.path)
        sync_folder(plan.files[0].path.resolve().parent)
        files.journal.delete()
    except OSError as error:
        reason = f"{error.filename or plan.files[0].path}: {error.strerror or error}"
        raise MillError(f"{reason} (all tensors are kept, only names are missing; --resume continues)") from error
    return JobResult([f.path for f in plan.files], plan.file_bytes, done, resumed)


def _open_parts(
    files: OpenFiles, existing: Collection[int], records: JournalRecords | None, *, allocate: bool
) -> dict[str, str]:
    """Opens the .part files and writes their headers; returns the verified tensors of an interrupted job, name -> checksum.

    records: of the job that is continued; None: a new one begins.
    """
    plan = files.plan
    if records is None:
        files.journal.start()
    for index, file in enumerate(plan.files):
        if index in existing:
            continue
        if records is None:
            file.part.unlink(missing_ok=True)  # never written through: it may have another name (a hard link)
        flags = os.O_RDWR | os.O_CREAT | NO_FOLLOW | BINARY | (os.O_TRUNC if records is None else 0)
        fd = os.open(file.part, flags, 0o644)
        files.fds[index] = fd
        try:
            if allocate:
                reserve_space(fd, file.nbytes)
            os.ftruncate(fd, file.nbytes)
        except OSError as error:
            if records is None:
                opened = list(files.fds)
                files.close()
                for i in opened:
                    plan.files[i].part.unlink()
                files.journal.delete()
            raise PlanError(f"{file.part}: {file.nbytes / 1e9:.2f} GB cannot be allocated ({error.strerror})") from None
        write_at(fd, memoryview(file.header), 0)
    return {} if records is None else _verified(plan, existing, records)


def _verified(plan: Plan, existing: Collection[int], records: JournalRecords) -> dict[str, str]:
    """The tensors of the journal whose bytes in the .part file still have the recorded checksum, name -> checksum."""
    planned = {o.name: (o, loc) for o, loc in zip(plan.outputs, plan.locations, strict=True)}
    verified: dict[str, str] = {}
    for name, checksum in records.tensors:
        output, location = planned.get(name, (None, None))
        if output is None or location is None or location.file in existing:
            continue
        if range_checksum(plan.files[location.file].part, location.offset, output.nbytes) == checksum:
            verified[output.name] = checksum
    return verified


def row_chunks(output: Output) -> Iterator[tuple[int, int]]:
    """Runs of rows (start, stop) that cross no matrix and cut no group of interleaved rows: those of the output's cuts, else
    such as have about CHUNK_ELEMENTS elements, or as many as `produce` says (`elements_at_once`)."""
    columns, rows, matrices = dims(output.shape)
    step = max(1, (getattr(output.produce, "elements_at_once", None) or CHUNK_ELEMENTS) // columns)
    step = max(output.type.rows, step // 16 * 16 if step >= 16 else step // output.type.rows * output.type.rows)
    starts = output.cuts or range(0, rows, step)
    for matrix in range(matrices):
        for start, stop in pairwise([*starts, rows]):
            yield matrix * rows + start, matrix * rows + stop


def write_by_threads(
    files: OpenFiles,
    pending: Pending,
    record: Callable[[str, str], None],
    progress: Progress,
    *,
    threads: int,
    on_bytes: Callable[[str, memoryview], None] | None = None,
) -> None:
    """Keeps a few chunks per thread in flight, and records each tensor when its last byte is written; on_bytes: see `execute`.

    After an error no new chunk is started, but those in flight are finished and recorded; then the first error is raised.
    """

    telling = Lock()

    def tell(nbytes: int, name: str) -> None:
        with telling:
            progress(nbytes, name)

    def make_chunk(number: int, sink: Sink, output: Output, start: int, stop: int) -> None:
        def on_step(name: str) -> None:
            tell(0, f"{output.name}, rows {start:,} to {stop - 1:,}: {name}")

        try:
            with hearing(on_step):
                data = encoded_rows(output, start, stop)
        except BaseException as error:
            writer.fail(number, sink, error)
        else:
            writer.put(number, sink, data)

    writer = ordered_writer(pending, CHUNKS_PER_THREAD * threads, record, tell, on_bytes)
    number = 0
    with closing(writer), ThreadPoolExecutor(threads) as pool:
        for output, location in pending:
            sink = files.sink(output, location)
            for start, stop in row_chunks(output):
                writer.slots.acquire()
                if writer.failures:
                    break
                pool.submit(make_chunk, number, sink, output, start, stop)
                number += 1
            if writer.failures:
                break
    if writer.failures:
        raise writer.failures[0]


def ordered_writer(
    pending: Pending,
    slots: int,
    record: Callable[[str, str], None],
    progress: Progress,
    on_bytes: Callable[[str, memoryview], None] | None = None,
) -> OrderedWriter:
    """A writer of these tensors that records each when it is finished; slots: chunks in flight."""
    is_direct = goes_past_the_cache(sum(output.nbytes for output, _ in pending))
    return OrderedWriter(
        slots, lambda sink: record(sink.name, sink.digest.hexdigest()), progress, direct=is_direct, on_bytes=on_bytes
    )


def goes_past_the_cache(nbytes: int) -> bool:
    """Whether the large tensors of a job of so many bytes are written by `DirectWriter`."""
    return nbytes >= MIN_DIRECT_BYTES


def encoded_rows(output: Output, start: int, stop: int) -> np.ndarray:
    """uint8 [rows, row_bytes], C-contiguous. Raises FormatError if `produce` returns another shape."""
    with compiling_for(output.type.name):
        encoded = output.produce(start, stop)
    row_bytes = output.type.row_bytes(output.shape[0])
    if encoded.shape != (stop - start, row_bytes):
        raise FormatError(f"{output.name}: {encoded.shape} bytes came for rows {start} to {stop} of {row_bytes} bytes each")
    return np.ascontiguousarray(encoded)
