"""Carrying out a plan: order-free, memory-bounded, resumable writing.

Each output file is allocated as NAME.part, workers encode row chunks, which are written at their planned offsets, and a
journal records every finished tensor with a checksum. A killed job leaves the .part and the journal; resuming verifies what
the journal claims and goes on. The finished file is synced and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import FormatError, MillError, PlanError
from ..formats.file_range import span_checksum
from ..formats.types import dims
from .allocator import keep_freed, release_freed
from .ordered_writer import OrderedWriter, Sink
from .plan import Output, Place, Plan, PlannedFile

CHUNK_ELEMENTS = 1 << 20  # float32 elements of a chunk: 4 MiB, about 20 chunks of memory per worker at the worst

CHUNKS_PER_WORKER = 3  # under way at once, being made or waiting for those before them to be written

DIRECT_BYTES = 256 << 20  # to write: what is smaller is better found in memory by who reads it next

Progress = Callable[[int, str], None]  # (bytes written since the last call, tensor name)
# (tensor name -> checksum of all that are finished, a call that brings them and their record to disk)
Finished = Callable[[Mapping[str, str], Callable[[], None]], None]


@dataclass(frozen=True)
class Result:
    """What a finished job says of itself. checksums: tensor name -> xxh3-64 of its bytes, in hex."""

    paths: list[Path]
    nbytes: int
    checksums: dict[str, str]
    resumed: int


@dataclass
class _Files:
    """The open .part files of a plan and its journal; the lock on the journal keeps a second job away."""

    plan: Plan
    journal_path: Path
    journal: IO[str] | None = None
    kept: Collection[int] = ()  # files that are there already and stay as they are
    handles: dict[int, int] = field(default_factory=dict)  # of the others

    def part(self, index: int) -> Path:
        path = self.plan.files[index].path
        return path.with_name(path.name + ".part")

    def write_line(self, record: dict[str, object]) -> None:
        assert self.journal is not None
        self.journal.write(json.dumps(record) + "\n")
        self.journal.flush()

    def sync(self) -> None:
        """Brings to disk what was written so far, and after that what the journal says of it."""
        for handle in self.handles.values():
            os.fsync(handle)
        assert self.journal is not None
        os.fsync(self.journal.fileno())

    def close(self) -> None:
        for handle in self.handles.values():
            os.close(handle)
        if self.journal is not None:
            self.journal.close()


def journal_path(plan: Plan) -> Path:
    first = plan.files[0].path
    return first.with_name(first.name + ".journal")


def preflight(
    plan: Plan,
    *,
    force: bool = False,
    resume: bool = False,
    inputs: list[Path] | None = None,
    kept: Collection[int] = (),
    needed: int | None = None,
) -> None:
    """Refuses, before anything is written, what could only fail or destroy later. Raises PlanError.

    Checked: an output (or its .part or journal) that is an input, an output that exists (unless force) or is no ordinary file,
    left-overs of another job (unless resume or force), a folder that cannot be written, and free disk space against the exact
    size of the plan. kept: files of the plan that are there already and stay (`finished_files`). needed: bytes of disk space,
    if not the size of the plan, for a job that frees space as it goes on.
    """
    files = _Files(plan, journal_path(plan))
    journal, parts = files.journal_path, [files.part(i) for i in range(len(plan.files))]
    sources = {p.resolve() for p in inputs or []}
    for path in [f.path for f in plan.files] + [*parts, journal]:
        if path.is_dir():
            raise PlanError(f"{path} is a folder; choose another output")
        if path.resolve() in sources:
            raise PlanError(f"{path} is an input of this job; choose another output")
        if path.exists() and not path.is_file():
            raise PlanError(f"{path} is a device or pipe; give the name of a file")
    for path in (*parts, journal):
        if path.is_symlink():
            raise PlanError(f"{path} is a link; this job would write through it: remove it, or choose another output")
    resumable = resume and journal.exists()
    existing = [f.path for i, f in enumerate(plan.files) if i not in kept and f.path.exists()]
    if existing and not force and not resumable:
        raise PlanError(f"{existing[0]} exists; use --force to replace it")
    if journal.exists() and _is_locked(journal):
        raise PlanError(f"another job is writing {plan.files[0].path} just now (it holds {journal})")
    if journal.exists() and not (resume or force):
        raise PlanError(f"{journal} is left from an unfinished job; --resume goes on with it, --force starts afresh")
    parent = plan.files[0].path.resolve().parent
    while not parent.exists():  # `execute` makes what is missing below it
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise PlanError(f"the folder {parent} cannot be written to")
    held = sum(part.stat().st_blocks * 512 for part in parts if part.exists())
    if needed is None:
        needed = sum(f.nbytes for i, f in enumerate(plan.files) if i not in kept)
    missing = needed - held - shutil.disk_usage(parent).free
    if missing > 0:
        raise PlanError(f"the output takes {needed:,} bytes, and {parent} has {missing:,} bytes too few free for it")


def finished_files(plan: Plan) -> set[int]:
    """Indexes of the plan's files that are there already, with the very header and size that are planned.

    Raises PlanError for one that is there and is another: with other tensors, types or metadata.
    """
    found = set()
    for index, file in enumerate(plan.files):
        same = _is_as_planned(file)
        if same is False:
            raise PlanError(f"{file.path} is there, but is not what this job would write; remove it, or choose another output")
        if same:
            found.add(index)
    return found


def is_finished(plan: Plan, inputs: Collection[Path] = ()) -> bool:
    """Whether the plan is carried out already: its files are there with the very headers and sizes that are planned, nothing is
    left of a job, and none of the inputs that are still there is newer. Weights are not looked at."""
    files = _Files(plan, journal_path(plan))
    left = [files.journal_path, *(files.part(i) for i in range(len(plan.files)))]
    if any(path.exists() for path in left) or not all(_is_as_planned(file) for file in plan.files):
        return False
    oldest = min(file.path.stat().st_mtime_ns for file in plan.files)
    return all(path.stat().st_mtime_ns <= oldest for path in inputs if path.exists())


def _is_as_planned(file: PlannedFile) -> bool | None:
    """Whether the file that is there has the planned size and header; None: there is none."""
    if not file.path.is_file():
        return None
    with file.path.open("rb") as there:
        return os.fstat(there.fileno()).st_size == file.nbytes and there.read(len(file.header)) == file.header


def _is_locked(journal: Path) -> bool:
    with journal.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def execute(
    plan: Plan,
    *,
    threads: int | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    kept: Collection[int] = (),
    finished: Finished | None = None,
    unchanged: Callable[[], None] | None = None,
) -> Result:
    """Writes the files of the plan. Call `preflight` first.

    threads: workers, by default one per processor. Memory is bounded by the workers and CHUNK_ELEMENTS, whatever the model's
    size. kept: files that are there already; they are neither written nor looked at. finished: called by one thread at a time
    as tensors are finished, for a job that frees space as it goes on: the output is then not allocated beforehand. unchanged:
    called when all is written, before a file gets its name; raises MillError if what was read is no longer the same.

    Raises what a tensor's `produce` raises; .part and journal then stay, and resume=True goes on from them. Raises PlanError
    when the journal belongs to another plan or another process holds it.
    """
    workers = threads or len(os.sched_getaffinity(0))
    files = _Files(plan, journal_path(plan), kept=kept)
    files.journal_path.resolve().parent.mkdir(parents=True, exist_ok=True)
    try:
        done = _open(files, resume=resume, force=force, allocate=finished is None)
        resumed = len(done)
        places = [(o, place) for o, place in zip(plan.outputs, plan.places, strict=True) if place.file not in kept]
        todo = [(o, place) for o, place in places if o.name not in done]
        if progress is not None:
            progress(plan.total_bytes - sum(o.nbytes for o, _ in todo), "")
        if finished is not None:
            finished(done, files.sync)
        keep_freed()
        try:
            _write_tensors(files, todo, done, workers, progress, finished)
            files.sync()
        except (MillError, OSError) as error:
            if isinstance(error, OSError):
                reason = f"{files.part(next(iter(files.handles), 0))}: {error.strerror or error}"
            else:
                reason = str(error)
            raise MillError(f"{reason} ({len(done)} of {len(places)} tensors are kept; --resume goes on)") from error
        if unchanged is not None:
            unchanged()
        for index in files.handles:
            os.replace(files.part(index), plan.files[index].path)
        _sync_folder(plan.files[0].path.resolve().parent)
        files.journal_path.unlink()
    finally:
        files.close()
        release_freed()
    return Result([f.path for f in plan.files], plan.file_bytes, done, resumed)


def _open(files: _Files, *, resume: bool, force: bool, allocate: bool) -> dict[str, str]:
    """Opens journal and .part files; returns the tensors that are finished and verified, name -> checksum."""
    plan = files.plan
    handle = os.open(files.journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    files.journal = os.fdopen(handle, "a+", encoding="utf-8", errors="surrogateescape")
    try:
        fcntl.flock(files.journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise PlanError(f"another job is writing {plan.files[0].path} (it holds {files.journal_path})") from None
    recorded = _journal_lines(files) if resume and not force else []
    fresh = not recorded
    if fresh:
        files.journal.truncate(0)
        files.write_line({"fingerprint": plan.fingerprint, "tensors": len(plan.outputs)})
    elif recorded[0].get("fingerprint") != plan.fingerprint:
        raise PlanError(
            f"{files.journal_path} belongs to a job with another source, recipe, imatrix or version; "
            "repeat the first command with --resume, or start afresh with --force"
        )
    for index, file in enumerate(plan.files):
        if index in files.kept:
            continue
        part = files.part(index)
        if not fresh and not part.exists() and file.path.exists():
            os.replace(file.path, part)  # the job was killed while it was renaming
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if fresh else 0), 0o644)
        files.handles[index] = handle
        try:
            if allocate:
                _allocate(handle, file.nbytes)
            os.truncate(handle, file.nbytes)
        except OSError as error:
            if fresh:
                for i in files.handles:
                    files.part(i).unlink()
                files.journal_path.unlink()
            raise PlanError(f"{part}: {file.nbytes / 1e9:.2f} GB cannot be allocated ({error.strerror})") from None
        os.pwrite(handle, file.header, 0)
    return {} if fresh else _verified(files, recorded[1:])


def _journal_lines(files: _Files) -> list[dict[str, str]]:
    """The whole lines of the journal; one torn by a kill is cut off. Raises PlanError for a journal that is not one."""
    journal = files.journal
    assert journal is not None
    journal.seek(0)
    text = journal.read()
    whole = text[: text.rfind("\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        known = all(isinstance(line.get("xxh3"), str) and isinstance(line.get("tensor"), str) for line in lines[1:])
        if not known or (lines and not isinstance(lines[0].get("fingerprint"), str)):
            raise ValueError
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise PlanError(f"{files.journal_path} is damaged, so nothing can be resumed; start afresh with --force") from None
    journal.truncate(len(whole.encode("utf-8", "surrogateescape")))
    return lines


def _allocate(handle: int, size: int) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # then the blocks come as they are written
            raise


def _verified(files: _Files, recorded: list[dict[str, str]]) -> dict[str, str]:
    """Tensors of the journal whose bytes in the .part still have the recorded checksum."""
    where = {o.name: (o, place) for o, place in zip(files.plan.outputs, files.plan.places, strict=True)}
    done: dict[str, str] = {}
    for record in recorded:
        output, place = where.get(record["tensor"], (None, None))
        if output is None or place is None or place.file in files.kept:
            continue
        if span_checksum(files.part(place.file), place.offset, output.nbytes) == record["xxh3"]:
            done[output.name] = record["xxh3"]
    return done


def row_chunks(output: Output) -> Iterator[tuple[int, int]]:
    """Runs of rows (start, stop) of about CHUNK_ELEMENTS elements that respect matrices and row groups."""
    columns, rows, matrices = dims(output.shape)
    step = max(1, CHUNK_ELEMENTS // columns)
    step = max(output.type.rows, step // 16 * 16 if step >= 16 else step // output.type.rows * output.type.rows)
    for matrix in range(matrices):
        for start in range(0, rows, step):
            yield matrix * rows + start, matrix * rows + min(start + step, rows)


def _write_tensors(
    files: _Files,
    todo: list[tuple[Output, Place]],
    done: dict[str, str],
    workers: int,
    progress: Progress | None,
    finished: Finished | None,
) -> None:
    """Feeds the pool with a few chunks per worker; a tensor is recorded when its last byte is written.

    After an error nothing new is begun, but what was under way is finished and recorded.
    """

    def record(sink: Sink) -> None:
        done[sink.name] = sink.digest.hexdigest()
        files.write_line({"tensor": sink.name, "xxh3": done[sink.name]})
        if finished is not None:
            finished(done, files.sync)

    def make(number: int, sink: Sink, output: Output, start: int, stop: int) -> None:
        try:
            data = _rows(output, start, stop)
        except BaseException as error:
            writer.fail(number, sink, error)
        else:
            writer.put(number, sink, data)

    is_large = sum(output.nbytes for output, _ in todo) >= DIRECT_BYTES
    writer = OrderedWriter(CHUNKS_PER_WORKER * workers, record, progress or (lambda count, name: None), direct=is_large)
    number = 0
    with ThreadPoolExecutor(workers) as pool:
        for output, place in todo:
            sink = Sink(output.name, files.handles[place.file], place.offset, output.nbytes)
            for start, stop in row_chunks(output):
                writer.slots.acquire()
                if writer.failures:
                    break
                pool.submit(make, number, sink, output, start, stop)
                number += 1
            if writer.failures:
                break
    if writer.failures:
        raise writer.failures[0]


def _rows(output: Output, start: int, stop: int) -> np.ndarray:
    """uint8 [rows, row_bytes], C-contiguous."""
    encoded = output.produce(start, stop)
    row_bytes = output.type.row_bytes(output.shape[0])
    if encoded.shape != (stop - start, row_bytes):
        raise FormatError(f"{output.name}: {encoded.shape} bytes came for rows {start} to {stop} of {row_bytes} bytes each")
    return np.ascontiguousarray(encoded)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
