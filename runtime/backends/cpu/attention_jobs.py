"""Flash attention of a pass: its tasks, and how they are divided among threads before each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .flash import split_up
from .kernels.attention import flash
from .kernels.attention.cache_rows import KINDS
from .memory import View
from .schedule import Group

if TYPE_CHECKING:
    from .passes import Batch, Pass

_COLUMNS = {name: i for i, name in enumerate(flash.JOB_FIELDS)}


class _Alike:
    """Attention of one sequence in layers that are divided in the same way."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.groups: list[tuple[Group, Group]] = []  # attention, and what joins its splits
        self.programs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # a program, its rows of the two
        self.tasks: np.ndarray | None = None
        self.memory = np.empty(0, np.float32)


class AttentionJobs:
    """One job (see kernels.attention.flash) for each sequence and each layer with attention."""

    def __init__(self, owner: Pass, layers: int):
        self._owner, self._used = owner, 0
        self._jobs = np.zeros((len(owner.counts), layers, len(flash.JOB_FIELDS)), np.int64)
        self._read = np.zeros((layers, 3), np.int64)  # layer, numbers of the names of keys and values
        self._alike: list[dict[tuple[int, ...], _Alike]] = [{} for _ in owner.counts]
        self._where: list[np.ndarray | None] = [None] * len(owner.counts)

    def add(
        self,
        layer: int,
        q: View,
        out: View,
        names: tuple[str, str],
        kv_heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> None:
        """Attention of q [n, heads, width] over what is cached under two names, into out [n, heads, width of values]: dense."""
        owner, number = self._owner, self._used
        self._used += 1
        self._read[number] = layer, *(owner.names.index(name) for name in names)
        kinds = [KINDS[owner.executable.part(name).type] for name in names]
        row = 0
        for sequence, n in enumerate(owner.counts):
            heads, k_width, v_width = q.heads, q.width, out.width
            queries, results = q.some_rows(row, n), out.some_rows(row, n)
            row += n
            job = self._jobs[sequence, number]
            words = {"q": queries.address, "out": results.address, "n": n, "group": heads // kv_heads, "kv_heads": kv_heads}
            words |= {"k_width": k_width, "v_width": v_width, "k_kind": kinds[0], "v_kind": kinds[1], "window": window}
            words |= {"sinks": 0 if sinks is None else owner.constant(sinks)}
            for name, word in words.items():
                job[_COLUMNS[name]] = word
            job.view(np.float64)[-2:] = scale, softcap
            shape = (n, heads // kv_heads, kv_heads, window, k_width, v_width)
            alike = self._alike[sequence].setdefault(shape, _Alike())
            splits = owner.cache_view(-1 - sequence, str(shape))  # what layers that are divided alike use in turn
            alike.jobs.append(number)
            reads = (queries, *(owner.cache_view(layer, name) for name in dict.fromkeys(names)))
            address = job.ctypes.data
            alike.groups.append(
                (
                    owner.schedule.place(flash.attend.address, address, 0, reads, (results, splits)),
                    owner.schedule.place(flash.merge.address, address, 0, (splits,), (results, splits)),
                )
            )

    def finish(self) -> None:
        for by_shape in self._alike:
            for alike in by_shape.values():
                rows: dict[int, tuple[np.ndarray, list[int], list[int]]] = {}
                for attend, merge in alike.groups:
                    assert attend.program is not None
                    rows.setdefault(id(attend.program), (attend.program, [], []))[1].append(attend.row)
                    rows[id(attend.program)][2].append(merge.row)
                alike.programs = [(program, np.array(a), np.array(m)) for program, a, m in rows.values()]

    def patch(self, batch: Batch) -> None:
        """Fills in where the sequences' rows lie, and how their attention is divided."""
        if not self._used:
            return
        layers, names = self._read[: self._used, 0], self._read[: self._used, 1:]
        for sequence, (cache, at) in enumerate(batch):
            jobs = self._jobs[sequence, : self._used]
            where = cache.table(at.stop - at.start)
            if where is not self._where[sequence]:
                self._where[sequence] = where
                for i, name in enumerate("kv"):
                    for field, end in enumerate(("", "_row", "_head")):
                        jobs[:, _COLUMNS[name + end]] = where[layers, names[:, i], field]
            jobs[:, _COLUMNS["past"]] = cache.length
            for shape, alike in self._alike[sequence].items():
                self._divide(jobs, shape, alike, cache.length)

    def _divide(self, jobs: np.ndarray, shape: Sequence[int], alike: _Alike, past: int) -> None:
        n, group, kv_heads, window, k_width, v_width = shape
        tasks, splits = split_up(n, group, kv_heads, past, window, k_width, v_width, self._owner.threads)
        if tasks is alike.tasks:
            return
        alike.tasks = tasks  # may leave split_up's own memory at any time
        results = n * group * kv_heads
        needed = results * (2 * splits + (splits - 1) * v_width)
        if needed > alike.memory.size:
            alike.memory = np.empty(needed, np.float32)
        top = alike.memory.ctypes.data
        for name, word in (
            ("tasks", tasks.ctypes.data),
            ("splits", splits),
            ("top", top),
            ("total", top + 4 * splits * results),
            ("out_splits", top + 8 * splits * results),
        ):
            jobs[alike.jobs, _COLUMNS[name]] = word
        for program, attend, merge in alike.programs:
            program[attend, 3], program[merge, 3] = len(tasks), n if splits > 1 else 0
