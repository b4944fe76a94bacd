"""Flash attention of a pass: its jobs, and how they are divided among threads before each run."""

from __future__ import annotations

import numpy as np

from ....data_classes import dataclass
from .attention import AttentionParams
from .flash import NOTHING, AttentionShape, Division, divide, padded_width
from .kernels.attention import flash
from .kernels.attention.cache_rows import TYPE_IDS
from .kernels.attention.job_parts import parts_of
from .memory import View
from .pass_tasks import Batch, PassTasks
from .schedule import Group

_COLUMNS = {name: i for i, name in enumerate(flash.JOB_FIELDS)}


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """Attention of queries over what one layer's caches hold.

    q         [n, heads, width], dense
    result    [n, heads, width of values], dense: where the result is written
    keys      the name of the keys in the caches
    values    the name of the values, whose rows may be longer than those of the result
    kv_heads  key heads that the heads of q share
    until     tokens of a sequence that has so many before them are left out: their results come from elsewhere; 0: none are
    """

    layer: int
    q: View
    result: View
    keys: str
    values: str
    kv_heads: int
    params: AttentionParams
    until: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """What the division into tasks depends on, beside the tokens: group, kv_heads, window, widths of keys and values,
        until."""
        sizes = self.q.heads // self.kv_heads, self.kv_heads, self.params.span, self.q.width, self.result.width
        return *sizes, self.until


class _JobGroup:
    """The jobs of one sequence that are divided in the same way, and memory that they use one after the other."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.tasks: list[tuple[Group, Group]] = []  # attention, and what merges its splits
        self.programs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # a program, its rows of the two
        self.division: Division | None = None
        self.memory = np.empty(0, np.float32)


class AttentionJobs:
    """One job (see kernels.attention.flash) for each sequence and each layer with attention."""

    def __init__(self, owner: PassTasks, layers: int):
        self._owner, self._used = owner, 0
        self._jobs = np.zeros((len(owner.counts), layers, len(flash.JOB_FIELDS)), np.int64)
        self._read = np.zeros((layers, 3), np.int64)  # layer, numbers of the names of keys and values
        self._groups: list[dict[tuple[int, ...], _JobGroup]] = [{} for _ in owner.counts]
        self._cache_tables: list[np.ndarray | None] = [None] * len(owner.counts)

    def add(self, attention: CachedAttention) -> None:
        """Adds the jobs of a layer's attention to the schedule of the pass."""
        owner, number, params = self._owner, self._used, attention.params
        self._used += 1
        names = attention.keys, attention.values
        self._read[number] = attention.layer, *(owner.names.index(name) for name in names)
        k_type, v_type = (TYPE_IDS[owner.compiled.part(attention.layer, name).type] for name in names)
        group, kv_heads, window, k_width, v_width, _ = attention.shape
        parts = parts_of(k_type, v_type, owner.gemv, group, k_width, owner.settings.rounds)
        cached = [owner.cache_view(attention.layer, name) for name in dict.fromkeys(names)]
        row = 0
        for sequence, n in enumerate(owner.counts):
            queries, results = attention.q.row_range(row, n), attention.result.row_range(row, n)
            row += n
            job = self._jobs[sequence, number]
            words = {"q": queries.address, "out": results.address, "n": n, "group": group, "kv_heads": kv_heads}
            words |= {"k_width": k_width, "v_width": v_width, "v_type": v_type, "window": window, **parts._asdict()}
            words |= {name: owner.constant(x) for name in ("sinks", "slopes") if (x := getattr(params, name)) is not None}
            words["ahead"] = params.ahead(n)
            for name, word in words.items():
                job[_COLUMNS[name]] = word
            job.view(np.float64)[-2:] = params.scale, params.softcap
            shape = (n, *attention.shape)
            jobs = self._groups[sequence].setdefault(shape, _JobGroup())
            jobs.jobs.append(number)
            splits = owner.cache_view(-1 - sequence, str(shape))  # the memory of the group
            reads = (queries, *cached)
            address = job.ctypes.data
            attend = owner.schedule.place(flash.attend_of(parts.k_type, v_type).address, address, 0, reads, (results, splits))
            merge = owner.schedule.place(flash.merge.address, address, 0, (splits,), (results, splits))
            jobs.tasks.append((attend, merge))

    def finish(self) -> None:
        """To be called when the programs are written: looks up where the tasks stand in them."""
        for groups in self._groups:
            for jobs in groups.values():
                rows: dict[int, tuple[np.ndarray, list[int], list[int]]] = {}
                for attend, merge in jobs.tasks:
                    assert attend.program is not None
                    rows.setdefault(id(attend.program), (attend.program, [], []))[1].append(attend.row)
                    rows[id(attend.program)][2].append(merge.row)
                jobs.programs = [(program, np.array(a), np.array(m)) for program, a, m in rows.values()]

    def patch(self, batch: Batch) -> None:
        """Fills in the addresses of the sequences' cached rows, and how their attention is divided."""
        if not self._used:
            return
        layers, names = self._read[: self._used, 0], self._read[: self._used, 1:]
        for sequence, (cache, at) in enumerate(batch):
            fields = self._jobs[sequence, : self._used]
            table = cache.table(at.stop - at.start)
            if table is not self._cache_tables[sequence]:
                self._cache_tables[sequence] = table
                for i, name in enumerate("kv"):
                    for j, suffix in enumerate(("", "_row_bytes", "_head_bytes")):
                        fields[:, _COLUMNS[name + suffix]] = table[layers, names[:, i], j]
            fields[:, _COLUMNS["past"]] = cache.length
            for (n, group, kv_heads, window, k_width, v_width, until), jobs in self._groups[sequence].items():
                sizes = n, group, kv_heads, cache.length, window, k_width, v_width
                shape = AttentionShape(*sizes, self._owner.threads, self._owner.gemv)
                division = NOTHING if until and cache.length >= until else divide(shape)
                if division is not jobs.division:
                    _set_division(fields, jobs, division, n * group * kv_heads, v_width)


def _set_division(fields: np.ndarray, jobs: _JobGroup, division: Division, rows: int, v_width: int) -> None:
    """Writes a division to the jobs of a group and to their programs. rows: results of a split, of v_width numbers."""
    jobs.division = division
    splits = division.splits
    needed = splits * rows * (2 + (padded_width(v_width) if splits > 1 else 0))
    if needed > jobs.memory.size:
        jobs.memory = np.empty(needed, np.float32)
    maxima = jobs.memory.ctypes.data
    for name, word in (
        ("tasks", division.tasks.ctypes.data),
        ("splits", splits),
        ("split_blocks", division.split_blocks),
        ("first_split", division.first_split),
        ("merge_heads", division.merge_heads),
        ("maxima", maxima),
        ("sums", maxima + 4 * splits * rows),
        ("split_values", maxima + 8 * splits * rows),
    ):
        fields[jobs.jobs, _COLUMNS[name]] = word
    for program, attend, merge in jobs.programs:
        program[attend, 3], program[merge, 3] = len(division.tasks), division.merge_parts
