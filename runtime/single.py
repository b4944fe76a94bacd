"""The pass of a single token through all layers as one program for the team of threads: what generation runs, token by token.

Between two products of a token Python takes as long as a thread takes for a hundred kilobytes of weights; on small models that
adds up to a fifth of the time. So the stages of all layers are written down once, with the addresses of everything that they
read and write, by the parts that the layers themselves would run, in the same order: the numbers are the same. What changes
from token to token, the place in the cache and the ranges of keys, is patched in.

Layers that this does not know (latent attention, unusual norms and blocks), caches of types in blocks and passes that somebody
observes take the usual way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np

from ..formats import TYPES
from .cache import KVCache
from .decoder import Block, Decoder
from .feedforward import LIMIT, GatedFeedForward
from .flash import split_up
from .grouped import GroupedAttention
from .kernels import flash, products, team
from .kernels.flash_rows import KEEP_FIELDS, KINDS, keep
from .kernels.single import CHOICE_FIELDS, choose
from .moe import SIGMOID, MixtureOfExperts, Router
from .norms import RMSNorm
from .rope import Rope
from .weights import Linear
from .writer import Task, Writer

_COLUMNS = {name: i for i, name in enumerate(flash.JOB_FIELDS)}
# What instances may hold: with anything else (an option that came later) they are not taken for known.
_KNOWN = {
    Block: {"attn_norm", "attention", "ffn_norm", "feed_forward", "attn_post", "ffn_post", "scale", "parallel"},
    GroupedAttention: {"input", "fused", "ends", "output", "bias", "norm"}
    | {"layer", "heads", "rope", "span", "norm_after_rope"},
    GatedFeedForward: {"gate", "up", "down", "activation", "bias", "_plans"},
    MixtureOfExperts: {"router", "experts", "shared", "reduction"},
    Router: {"linear", "used", "gating", "bias", "groups", "groups_used", "normalise", "scale", "offset"},
    RMSNorm: {"store", "name", "weight", "epsilon"},
    Rope: {"frequencies", "magnitude", "interleaved"},
}


class _UnknownError(Exception):
    """Something that cannot be written down."""


def _known(value: Any, kind: type) -> Any:
    if type(value) is not kind or not vars(value).keys() <= _KNOWN[kind]:
        raise _UnknownError(type(value).__name__)
    return value


class Single:
    """The layers of a decoder, for single tokens."""

    def __init__(self, decoder: Decoder):
        self._decoder, self._lock = decoder, threading.Lock()
        self._program: _Program | None = None
        self._tried = False

    def __call__(self, x: np.ndarray, cache: KVCache) -> bool:
        """x float32 [1, n_embd], overwritten with the last layer's output; the cache gets the token's rows, not yet committed.

        False, and nothing done, where that cannot be, or another thread is at it.
        """
        decoder, store = self._decoder, self._decoder.store
        if store.observer is not None or store.watch or decoder.on_layer or not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._tried:
                self._tried = True
                with suppress(_UnknownError):
                    self._program = _Program(decoder)
            return self._program is not None and self._program.run(x, cache)
        finally:
            self._lock.release()


class _Program(Writer):
    """Stages, and the memory that they use."""

    def __init__(self, decoder: Decoder):
        if not decoder.settings.flash:
            raise _UnknownError("attention that stores its scores")
        self.workers, self.parts = decoder.store.workers, decoder.new_cache(1).parts
        if self.parts.keys() != {"k", "v"} or not all(TYPES[part.type].is_float for part in self.parts.values()):
            raise _UnknownError("the cache")
        super().__init__()
        self.held.append(decoder)
        layers = len(decoder.blocks)
        self._stages: list[list[Task]] = []
        self._first = self.hold(np.zeros(1, np.int64))
        self.mixtures: list[MixtureOfExperts] = []
        self.turns: dict[Rope, np.ndarray] = {}
        self.keeps = self.hold(np.zeros((layers, 2, len(KEEP_FIELDS)), np.int64))
        self.jobs = self.hold(np.zeros((layers, len(flash.JOB_FIELDS)), np.int64))
        self.shapes: dict[tuple[int, ...], list[int]] = {}  # layers by what decides how their attention is cut up
        self.attends: list[int] = []  # the stages of attention; that which joins its splits comes next
        n_embd = decoder.embedding.columns
        self.x, self.normed, self.added = (self.room(n_embd) for _ in range(3))
        self._pending: list[Task] = []  # what is to be done to x before it is read
        for number, block in enumerate(decoder.blocks):
            self._layer(number, _known(block, Block))
        self._stages.append([self.in_turn(self._pending)])
        rows = [(stage, *task) for stage, tasks in enumerate(self._stages) for task in tasks]
        self.program = np.array(rows, np.int64)
        self.attend_rows = np.searchsorted(self.program[:, team.STAGE], self.attends)
        self.cut: dict[tuple[int, ...], np.ndarray] = {}

    def run(self, x: np.ndarray, cache: KVCache) -> bool:
        if cache.parts != self.parts or any(mixture.reduction is not None for mixture in self.mixtures):
            return False
        past, column = cache.length, _COLUMNS
        places = [cache.rows(layer, name, 1) for layer in range(len(self.jobs)) for name in ("k", "v")]
        where = np.array([(p.address, p.row_bytes, p.head_bytes) for p in places], np.int64).reshape(-1, 2, 3)
        self.keeps[:, :, 1] = where[:, :, 0] + past * where[:, :, 1]
        self.keeps[:, :, 6:8] = where[:, :, 1:]
        for i, name in enumerate("kv"):
            for field, end in enumerate(("", "_row", "_head")):
                self.jobs[:, column[name + end]] = where[:, i, field]
        self.jobs[:, column["past"]] = past
        for shape, layers in self.shapes.items():
            group, kv_heads, window, k_width, v_width = shape
            tasks, splits = split_up(1, group, kv_heads, past, window, k_width, v_width, self.workers.count)
            self.cut[shape] = tasks  # may leave split_up's own memory at any time
            self.jobs[layers, column["tasks"]], self.jobs[layers, column["splits"]] = tasks.ctypes.data, splits
            self.program[self.attend_rows[layers], team.PARTS] = len(tasks)
            self.program[self.attend_rows[layers] + 1, team.PARTS] = splits > 1
        for rope, turns in self.turns.items():
            turns[:] = rope.table(np.array([past]))[0]
        self.x[:] = x[0]
        team.run(self.workers.ready(), self.program)
        x[0] = self.x
        return True

    # --- layers -------------------------------------------------------------------------------------------------------

    def _layer(self, number: int, block: Block) -> None:
        if block.scale != 1 or block.parallel:
            raise _UnknownError("the frame of the layer")
        self._attention(number, block)
        self._to_be_added(block.attn_post)
        if type(block.feed_forward) is MixtureOfExperts:
            self._mixture(block)
        else:
            ffn = _known(block.feed_forward, GatedFeedForward)
            plans = [self._plan(linear) for linear in (ffn.gate, ffn.up, ffn.down)]
            inputs = self._begin(block.ffn_norm, plans[:2])
            self._stages += self._gated(ffn, plans, inputs, self.added)
            self._pending = self._down_bias(ffn)
        self._to_be_added(block.ffn_post)

    def _down_bias(self, ffn: GatedFeedForward) -> list[Task]:
        return [self.add(ffn.bias["down"][0], self.added.ctypes.data, self.added.size)] if "down" in ffn.bias else []

    def _to_be_added(self, post: Any) -> None:
        """Has what a block made added to x, after a norm if it has one."""
        at, size = self.added.ctypes.data, self.added.size
        if post is not None:
            self._pending.append(self._normalise(post, at, at, 1, size))
        self._pending.append(self.add(self.added, self.x.ctypes.data, size))

    def _begin(self, norm: Any, plans: Iterable[np.ndarray]) -> dict[int, tuple]:
        """A stage that makes the input of a block's first products."""
        tasks = [*self._pending, self._normalise(norm, self.x.ctypes.data, self.normed.ctypes.data, 1, self.x.size)]
        inputs, quantise = self.quantised(self.normed, plans)
        self._stages.append([self.in_turn([*tasks, *quantise])])
        return inputs

    def _attention(self, number: int, block: Block) -> None:
        attention = _known(block.attention, GroupedAttention)
        heads, span = attention.heads, attention.span
        widths = {"q": heads.k_width, "k": heads.k_width, "v": heads.v_width}
        counts = {"q": heads.n, "k": heads.n_kv, "v": heads.n_kv}
        plans = [self._plan(linear) for linear in attention.input.linears]
        inputs = self._begin(block.attn_norm, plans)
        row = self.room(sum(int(plan[products.ROWS]) for plan in plans))
        stage, at = [], row.ctypes.data
        for plan in plans:
            stage.append(self.product(plan, inputs, at))
            at += 4 * int(plan[products.ROWS])
        self._stages.append(stage)
        stage, at = [], row.ctypes.data
        places = {}
        for name in "qkv":
            places[name] = at
            stage.append(self.in_turn(self._heads(attention, number, name, at, counts[name], widths[name])))
            at += 4 * counts[name] * widths[name]
        self._stages.append(stage)
        splits = 2 * self.workers.count  # at most
        out, sums = self.room(splits * heads.n * heads.v_width), self.room(2 * splits * heads.n)
        sinks = None if span.sinks is None else self.hold(np.ascontiguousarray(span.sinks, np.float32))
        top = sums.ctypes.data
        job = {"q": places["q"], "out": out.ctypes.data, "top": top, "total": top + 4 * splits * heads.n}
        job |= {"sinks": 0 if sinks is None else sinks.ctypes.data, "n": 1, "group": heads.n // heads.n_kv}
        job |= {"kv_heads": heads.n_kv, "k_width": heads.k_width, "v_width": heads.v_width, "window": span.window}
        job |= {f"{name}_kind": KINDS[self.parts[name].type] for name in "kv"}
        for field, value in job.items():
            self.jobs[number, _COLUMNS[field]] = value
        self.jobs[number].view(np.float64)[-2:] = span.scale, span.softcap
        shape = (heads.n // heads.n_kv, heads.n_kv, span.window, heads.k_width, heads.v_width)
        self.shapes.setdefault(shape, []).append(number)
        self.attends.append(len(self._stages))
        address = self.jobs[number].ctypes.data
        self._stages += [[(flash.attend.address, address, 0)], [(flash.merge.address, address, 0)]]
        plan = self._plan(attention.output)
        inputs, quantise = self.quantised(out[: heads.n * heads.v_width], [plan])
        self._stages += [quantise] if quantise else []
        self._stages.append([self.product(plan, inputs, self.added.ctypes.data)])
        bias, to = attention.bias.get("output"), self.added
        self._pending = [] if bias is None else [self.add(bias, to.ctypes.data, to.size)]

    def _heads(self, attention: GroupedAttention, layer: int, name: str, at: int, count: int, width: int) -> list[Task]:
        """What queries, keys or values at an address go through; the last two into the cache."""
        tasks = [self.add(attention.bias[name], at, count * width)] if name in attention.bias else []
        if name != "v":
            norm = [self._normalise(attention.norm[name], at, at, count, width)] if name in attention.norm else []
            rotate = [] if attention.rope is None else [self._rotate(_known(attention.rope, Rope), at, count, width)]
            tasks += rotate + norm if attention.norm_after_rope else norm + rotate
        if name != "q":
            table = self.keeps[layer, "kv".index(name)]
            table[:6] = at, 0, KINDS[self.parts[name].type], 1, count, width
            tasks.append((keep.address, table.ctypes.data, 1))
        return tasks

    def _normalise(self, norm: Any, x: int, out: int, rows: int, size: int) -> Task:
        norm = _known(norm, RMSNorm)
        return self.normalise(x, norm.weight, norm.epsilon, out, rows, size)

    def _rotate(self, rope: Rope, at: int, heads: int, width: int) -> Task:
        turns = self.turns.setdefault(rope, np.zeros(len(rope.frequencies), np.complex64))
        return self.rotate(at, heads, width, turns, rope.interleaved)

    def _plan(self, linear: Linear) -> np.ndarray:
        if linear.plan is None:
            raise _UnknownError(linear.name)
        return linear.plan[0]

    def _gated(
        self, ffn: GatedFeedForward, plans: list[np.ndarray], inputs: dict[int, tuple], out: np.ndarray,
        jobs: np.ndarray | None = None, matrices: np.ndarray | None = None,
    ) -> list[list[Task]]:  # fmt: skip
        """The stages of a gated block, or of several experts' (as for `products.feed_forward`)."""
        rows, hidden = 1 if matrices is None else len(matrices), int(plans[0][products.ROWS])
        gate, up = self.room(rows * hidden), self.room(rows * hidden)
        first, second = (None, None) if jobs is None else (jobs[0], jobs[1])
        matrices = self._first if matrices is None else matrices
        behind, _ = self.quantised(gate, plans[2:])
        ((block, quantised),) = behind.items()
        bias = [self.hold(np.ascontiguousarray(ffn.bias[p], np.float32)).ctypes.data if p in ffn.bias else 0
                for p in ("gate", "up")]  # fmt: skip
        table = self.table(
            *(gate.ctypes.data, *quantised, block, hidden, up.ctypes.data, ffn.activation.kind, 0, *bias, matrices.ctypes.data),
            _8=LIMIT,
        )
        return [
            [self.product(plan, inputs, to.ctypes.data, first) for plan, to in zip(plans[:2], (gate, up), strict=True)],
            [(products.gate_part.address, table, rows * -(-hidden // products.CHUNK))],
            [self.product(plans[2], behind, out.ctypes.data, second)],
        ]

    def _mixture(self, block: Block) -> None:
        mixture = _known(block.feed_forward, MixtureOfExperts)
        router, experts = _known(mixture.router, Router), _known(mixture.experts, GatedFeedForward)
        if "down" in experts.bias:
            raise _UnknownError("biases of experts")
        self.mixtures.append(mixture)
        plans = [self._plan(linear) for linear in (experts.gate, experts.up, experts.down)]
        shared, route = mixture.shared, self._plan(router.linear)
        shared_plans = []
        if shared is not None:
            shared = _known(shared, GatedFeedForward)
            shared_plans = [self._plan(linear) for linear in (shared.gate, shared.up, shared.down)]
        inputs = self._begin(block.ffn_norm, [route, *plans[:2], *shared_plans[:2]])
        count, used, size = router.linear.rows, router.used, self.added.size
        scores, factors = self.room(count), self.room(used)
        matrices, jobs = self.hold(np.zeros(used, np.int64)), self.hold(np.zeros((2, used, 4), np.int64))
        bias = 0 if router.bias is None else self.hold(np.ascontiguousarray(router.bias, np.float32)).ctypes.data
        words = {"scores": scores.ctypes.data, "experts": count, "sigmoid": router.gating == SIGMOID, "bias": bias}
        words |= {"groups": router.groups, "groups_used": router.groups_used, "normalised": router.normalise, "scale": 0}
        words |= {"used": used, "factors": factors.ctypes.data, "matrices": matrices.ctypes.data, "jobs": jobs.ctypes.data}
        words |= {"sums": self.added.ctypes.data, "n_sums": size if shared is None else 0}
        choice = choose.address, self.table(*(words[field] for field in CHOICE_FIELDS), _7=router.scale), 1
        offset = [] if router.offset is None else [self.add(router.offset, scores.ctypes.data, count)]
        results = self.room(used * size)
        own = [[self.product(route, inputs, scores.ctypes.data)], [self.in_turn([*offset, choice])]]
        own += self._gated(experts, plans, inputs, results, jobs, matrices)
        beside = self._gated(shared, shared_plans, inputs, self.added) if shared is not None else []
        self._stages += [[*first, *second] for first, second in zip_longest(own, beside, fillvalue=[])]
        self._pending = self._down_bias(shared) if shared is not None else []
        self._pending.append(self.add(results, self.added.ctypes.data, size, factors))
