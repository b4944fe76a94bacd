"""sha256 of what a job writes, by tensor and by file, taken while it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ..formats.hashes import DigestThreads, Hash, escape_line_breaks
from .plan import Plan


class WrittenHashes:
    """The hashes that `formats.hashes.hash_file` reads a file for, of tensors that are written in order, front to back.

    threads: of the job, see `DigestThreads`
    """

    def __init__(self, plan: Plan, threads: int = 1):
        self._plan, self._hashing = plan, DigestThreads(threads)
        self._file_of = {o.name: loc.file for o, loc in zip(plan.outputs, plan.locations, strict=True)}
        self._files = [hashlib.sha256() for _ in plan.files]
        self._tensors = {}
        self._bytes = 0

    def update(self, name: str, data: memoryview) -> None:
        """The next bytes of a tensor."""
        if name not in self._tensors:
            self._tensors[name] = hashlib.sha256()
        self._hashing.update((self._files[self._file_of[name]], self._tensors[name]), data)
        self._bytes += len(data)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes of all files came, so that none of them is of an earlier job or was written elsewhere."""
        return self._bytes == self._plan.total_bytes and list(self._tensors) == [output.name for output in self._plan.outputs]

    def each(self) -> Iterator[Hash]:
        """As `hash_file` of all files."""
        self._hashing.finish()
        for index, file in enumerate(self._plan.files):
            path = escape_line_breaks(str(file.path))
            for name, digest in self._tensors.items():
                if self._file_of[name] == index:
                    yield Hash("sha256", digest.hexdigest(), path, escape_line_breaks(name))
            yield Hash("sha256", self._files[index].hexdigest(), path)
