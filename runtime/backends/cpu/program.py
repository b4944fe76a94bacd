"""The program of a single token's pass (see `single`): what its parts need while they write themselves down, and its run.

Whatever changes from token to token, the place in the cache and the ranges of keys, is patched in before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ....formats import TYPES
from ....simd import team
from .attention import Span
from .decoder import Decoder
from .flash import split_up
from .kernels.attention import flash
from .kernels.attention.cache_rows import KEEP_FIELDS, KINDS, keep
from .kv_cache import KVCache
from .norms import LayerNorm, RMSNorm, WholeNorm
from .rope import Rope
from .weights import Linear
from .writer import Task, Writer

_COLUMNS = {name: i for i, name in enumerate(flash.JOB_FIELDS)}
_RMS = {"store", "name", "weight", "epsilon"}
# What instances may hold: with anything else (an option that came later) they are not taken for known.
_KNOWN = {RMSNorm: _RMS, WholeNorm: _RMS, LayerNorm: {"rms", "bias"}, Rope: {"frequencies", "magnitude", "interleaved"}}


class UnknownError(Exception):
    """Something that cannot be written down."""


def check_known(value: Any, fields: set[str]) -> None:
    """Raises UnknownError for something that holds more than these."""
    if not vars(value).keys() <= fields:
        raise UnknownError(type(value).__name__)


class Program(Writer):
    """Stages, and the memory that they use.

    x             float32 [n_embd]: what the layers add to
    input         float32 [n_embd]: x as the norm of the part that is being written down leaves it
    mend          tasks that have to be done to x before it is read
    not_now       each says whether something keeps the program from being used for now
    """

    def __init__(self, decoder: Decoder):
        if not decoder.settings.flash:
            raise UnknownError("attention that stores its scores")
        self.workers, self.parts = decoder.store.workers, decoder.new_cache(1).parts
        if not all(TYPES[part.type].is_float for part in self.parts.values()):
            raise UnknownError("the cache")
        super().__init__()
        self.held.append(decoder)
        layers = len(decoder.blocks)
        self.x, self._normed = self.room(decoder.embedding.columns), self.room(decoder.embedding.columns)
        self.input, self.mend = self.x, list[Task]()
        self.not_now: list[Callable[[], bool]] = []
        self._stages: list[list[Task]] = []
        self._turns: dict[Rope, np.ndarray] = {}
        self._names = tuple(self.parts)
        self._keeps = self.hold(np.zeros((layers, len(self._names), len(KEEP_FIELDS)), np.int64))
        self.jobs = self.hold(np.zeros((layers, len(flash.JOB_FIELDS)), np.int64))
        self._where = np.zeros(0, np.int64)  # the cache's table that is written into these
        self._read = np.zeros((layers, 2), np.int64)  # under which names each layer's keys and values lie
        self._shapes: dict[tuple[int, ...], list[int]] = {}  # layers by what decides how their attention is cut up
        self._attends: list[int] = []  # the stages of attention; that which joins its splits comes next
        self._cut: dict[tuple[int, ...], np.ndarray] = {}

    def finish(self) -> None:
        """To be called when all layers are written down."""
        self.stage([self.in_turn(self.mend)])
        rows = [(stage, *task) for stage, tasks in enumerate(self._stages) for task in tasks]
        self._program = np.array(rows, np.int64)
        self._attend_rows = np.searchsorted(self._program[:, team.STAGE], self._attends)

    def run(self, x: np.ndarray, cache: KVCache) -> bool:
        """As `Single`."""
        past = cache.length
        if cache.parts != self.parts or any(is_so() for is_so in self.not_now):
            return False
        where = cache.table(1)
        if where is not self._where:
            self._where, own = where, np.arange(len(self.jobs))
            self._keeps[:, :, 6:8] = where[:, :, 1:]
            for i, name in enumerate("kv"):
                for field, end in enumerate(("", "_row", "_head")):
                    self.jobs[:, _COLUMNS[name + end]] = where[own, self._read[:, i], field]
        self._keeps[:, :, 1] = where[:, :, 0] + past * where[:, :, 1]
        self.jobs[:, _COLUMNS["past"]] = past
        for shape, layers in self._shapes.items():
            group, kv_heads, window, k_width, v_width = shape
            tasks, splits = split_up(1, group, kv_heads, past, window, k_width, v_width, self.workers.count)
            if tasks is not self._cut.get(shape):
                self._cut[shape] = tasks  # may leave split_up's own memory at any time
                self.jobs[layers, _COLUMNS["tasks"]], self.jobs[layers, _COLUMNS["splits"]] = tasks.ctypes.data, splits
                self._program[self._attend_rows[layers], team.PARTS] = len(tasks)
                self._program[self._attend_rows[layers] + 1, team.PARTS] = splits > 1
        for rope, turns in self._turns.items():
            turns[:] = rope.table(np.array([past]))[0]
        self.x[:] = x[0]
        team.run(self.workers.ready(), self._program)
        x[0] = self.x
        return True

    # --- tasks --------------------------------------------------------------------------------------------------------

    def stage(self, *tasks: list[Task]) -> None:
        """What runs side by side; may be nothing."""
        self._stages.append([task for some in tasks for task in some])

    def begin(self, norm: Any, plans: Iterable[np.ndarray]) -> dict[int, tuple]:
        """A stage that mends x and makes the input of a block's first products of it."""
        self.input, tasks, self.mend = self.x if norm is None else self._normed, self.mend, []
        if norm is not None:
            tasks += self.normalised(norm, self.x.ctypes.data, self.input.ctypes.data, 1, self.x.size)
        inputs, quantise = self.quantised(self.input, plans)
        self.stage([self.in_turn([*tasks, *quantise])])
        return inputs

    def plan(self, linear: Linear) -> np.ndarray:
        if linear.plan is None:
            raise UnknownError(linear.name)
        return linear.plan[0]

    def normalised(self, norm: Any, x: int, out: int, rows: int, size: int) -> list[Task]:
        """`rows` rows at the address x go through a norm, to out."""
        check_known(norm, _KNOWN.get(type(norm), set()))
        if isinstance(norm, LayerNorm):
            tasks = [self.centre(x, out, rows, size), *self.normalised(norm.rms, out, out, rows, size)]
            bias = [] if norm.bias is None else [self.add(norm.bias, out + 4 * size * row, size) for row in range(rows)]
            return tasks + bias
        if isinstance(norm, WholeNorm):
            rows, size = 1, rows * size
        return [self.normalise(x, norm.weight, norm.epsilon, out, rows, size)]

    def rotated(self, rope: Rope, at: int, heads: int, width: int) -> Task:
        check_known(rope, _KNOWN[Rope])
        turns = self._turns.setdefault(rope, np.zeros(len(rope.frequencies), np.complex64))
        return self.rotate(at, heads, width, turns, rope.interleaved)

    def kept(self, layer: int, name: str, at: int) -> Task:
        """The row of each head at an address goes into the cache."""
        part, table = self.parts[name], self._keeps[layer, self._names.index(name)]
        table[:6] = at, 0, KINDS[part.type], 1, part.heads, part.width
        return keep.address, table.ctypes.data, 1

    def attended(
        self, layer: int, q: int, names: tuple[str, str], heads: tuple[int, int], widths: tuple[int, int], span: Span
    ) -> np.ndarray:
        """The stages of attention over what is cached under two names; float32 [heads * width of values], where its result will
        be. heads: of queries and of keys; widths: of keys and of values."""
        (n, n_kv), (k_width, v_width) = heads, widths
        splits = 2 * self.workers.count  # at most
        out, sums = self.room(splits * n * v_width), self.room(2 * splits * n)
        sinks = None if span.sinks is None else self.hold(np.ascontiguousarray(span.sinks, np.float32))
        top = sums.ctypes.data
        job = {
            "q": q,
            "out": out.ctypes.data,
            "out_splits": out.ctypes.data + 4 * n * v_width,
            "top": top,
            "total": top + 4 * splits * n,
        }
        job |= {"sinks": 0 if sinks is None else sinks.ctypes.data, "n": 1, "group": n // n_kv}
        job |= {"kv_heads": n_kv, "k_width": k_width, "v_width": v_width, "window": span.window}
        job |= {f"{part}_kind": KINDS[self.parts[name].type] for part, name in zip("kv", names, strict=True)}
        for field, value in job.items():
            self.jobs[layer, _COLUMNS[field]] = value
        self.jobs[layer].view(np.float64)[-2:] = span.scale, span.softcap
        self._read[layer] = [self._names.index(name) for name in names]
        self._shapes.setdefault((n // n_kv, n_kv, span.window, k_width, v_width), []).append(layer)
        self._attends.append(len(self._stages))
        address = self.jobs[layer].ctypes.data
        self.stage([(flash.attend.address, address, 0)])
        self.stage([(flash.merge.address, address, 0)])
        return out[: n * v_width]

    def biased(self, bias: np.ndarray | None, out: np.ndarray) -> list[Task]:
        return [] if bias is None else [self.add(bias, out.ctypes.data, out.size)]
