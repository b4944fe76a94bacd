"""The scale search for tables of four values, exhaustive: iq2_k and iq2_ks (docs/formats/encoders.md, iq2_k and iq2_ks).

Whatever the scale, the weights of a block in ascending order fall into four segments, one per table value, ascending or (for a
negative scale) descending. ik_llama.cpp tries all 816 ways to cut a sorted block of 16 into four segments, the last not empty,
with two tables and two directions. But the best cut must be the nearest assignment for its own scale, and as the scale grows
from zero each weight changes its value at most twice, from an outer value to inner ones, at known scales. So it is enough to go
through these events in order: at most 32 cuts for each table and direction. The winners are then compared in the reference's
arithmetic.

Sixteen blocks are processed at a time, one per lane.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types

from ....simd.compile import intrinsic, kernel
from ....simd.lane_types import F32, FLOAT, element_pointer
from ....simd.lanes import LANES, fma_lanes, load, max_lanes, min_lanes, select, splat, store
from ....simd.llvm import I64, concat, shuffle
from ....simd.memory import view
from ....simd.target import target
from ....simd.team import TaskKernel
from .table_search import MIN_AMAX, SEARCH


def sorting_network(count: int) -> np.ndarray:
    """Comparators of Batcher's odd-even merge sort for 2 ** k elements: int64 [any, 2]."""
    pairs = []
    p = 1
    while p < count:
        k = p
        while k >= 1:
            pairs += [
                (i + j, i + j + k)
                for j in range(k % p, count - k, 2 * k)
                for i in range(min(k, count - j - k))
                if (i + j) // (2 * p) == (i + j + k) // (2 * p)
            ]
            k //= 2
        p *= 2
    return np.array(pairs)


@kernel
def _sort(network, x, w):
    """Sorts each lane of x in ascending order, along with w."""
    for c in range(network.shape[0]):
        i, j = LANES * network[c, 0], LANES * network[c, 1]
        a, b, wa, wb = load(x, i), load(x, j), load(w, i), load(w, j)
        swap = a > b
        store(x, i, min_lanes(a, b))
        store(x, j, max_lanes(a, b))
        store(w, i, select(swap, wb, wa))
        store(w, j, select(swap, wa, wb))


_RUN = 4  # events that are sorted in registers when they are gone through


_TWO, _FOUR = ((0, 1),), ((0, 2), (1, 3), (0, 1), (2, 3))  # comparators that sort so many elements if they are bitonic


def _parts():
    """Parts of lanes that fill a register each: the numbers of four events, three each, find registers then."""
    count = max(1, 32 * LANES // target().vector_bits)
    return [(LANES // count * part, LANES // count) for part in range(count)]


def _sorted_events(builder, comparators, events):
    """Events (key, gain, cost: vectors) sorted by key, lane by lane."""
    events = list(events)
    for i, j in comparators:
        a, b = events[i], events[j]
        swap, less = builder.fcmp_ordered(">", a[0], b[0]), builder.fcmp_ordered("<", a[0], b[0])
        keys = builder.select(less, a[0], b[0]), builder.select(swap, a[0], b[0])
        events[i] = [keys[0], *(builder.select(swap, b[k], a[k]) for k in (1, 2))]
        events[j] = [keys[1], *(builder.select(swap, a[k], b[k]) for k in (1, 2))]
    return events


def _pointers(context, builder, types_of, arrays, number, lane, size):
    """To `size` lanes, from `lane` on, of element `number` of arrays of lanes."""
    at = builder.add(builder.mul(number, I64(LANES)), I64(lane))
    return [element_pointer(context, builder, *each, at, FLOAT, size) for each in zip(types_of, arrays, strict=True)]


def _make_sort(count: int, comparators: tuple[tuple[int, int], ...]):
    @intrinsic
    def sort(typingctx, key, gain, cost, first, step):
        """Sorts `count` events, the numbers first, first + step ... of three arrays of lanes, lane by lane by key."""

        def generate(context, builder, signature, args):
            *arrays, first, step = args
            for lane, size in _parts():
                numbers = [builder.add(first, builder.mul(step, I64(i))) for i in range(count)]
                places = [_pointers(context, builder, signature.args[:3], arrays, number, lane, size) for number in numbers]
                events = [[builder.load(pointer, align=4) for pointer in event] for event in places]
                for pointers, event in zip(places, _sorted_events(builder, comparators, events), strict=True):
                    for pointer, number in zip(pointers, event, strict=True):
                        builder.store(number, pointer, align=4)
            return context.get_dummy_value()

        return types.void(key, gain, cost, types.intp, types.intp), generate

    return sort


_sort_two, _sort_four = _make_sort(2, _TWO), _make_sort(4, _FOUR)


@intrinsic
def _best_of_run(typingctx, key, gain, cost, first, sxq, sqq, best, best_sqq, scale):
    """Goes through the four events from number `first` on, of three arrays of lanes, which are bitonic, in the order of their
    keys. sxq, sqq: sums before them; best, best_sqq, scale: sxq^2, sqq and key of the best cut so far, that of the largest
    sxq^2 / sqq. Returns all five."""

    def generate(context, builder, signature, args):
        *arrays, first = args[:4]
        parts = []
        for lane, size in _parts():
            numbers = [builder.add(first, I64(i)) for i in range(_RUN)]
            places = [_pointers(context, builder, signature.args[:3], arrays, number, lane, size) for number in numbers]
            events = [[builder.load(pointer, align=4) for pointer in event] for event in places]
            sxq, sqq, best, best_sqq, scale = (shuffle(builder, arg, None, range(lane, lane + size)) for arg in args[4:])
            for event_key, event_gain, event_cost in _sorted_events(builder, _FOUR, events):
                sxq, sqq = builder.fadd(sxq, event_gain), builder.fadd(sqq, event_cost)
                square = builder.fmul(sxq, sxq)
                better = builder.fcmp_ordered(">", builder.fmul(square, best_sqq), builder.fmul(best, sqq))
                best, best_sqq = builder.select(better, square, best), builder.select(better, sqq, best_sqq)
                scale = builder.select(better, event_key, scale)
            parts.append((sxq, sqq, best, best_sqq, scale))
        return context.make_tuple(builder, signature.return_type, [concat(builder, each) for each in zip(*parts, strict=True)])

    return types.UniTuple(F32, 5)(key, gain, cost, types.intp, *[F32] * 5), generate


@kernel
def _merge(count, until, key, gain, cost):
    """Sorts events 0 ... count - 1 by key so far that each run of `until` of them, which is bitonic, follows those of smaller
    keys. The keys are bitonic: falling, then rising, or a rotation of that. count / until is a power of two.

    Two steps at a time: storing the events is what takes longest.
    """
    steps, size = 0, until
    while size < count:
        steps, size = steps + 1, 2 * size
    half = count // 2
    if steps % 2:
        for e in range(half):
            _sort_two(key, gain, cost, e, half)
        half //= 2
    while half >= until:
        for start in range(0, count, 2 * half):
            for e in range(start, start + half // 2):
                _sort_four(key, gain, cost, e, half // 2)
        half //= 4


@kernel
def _thresholds(values):
    """1 / (midpoint between neighbouring table values), positive: third and fourth, first and second, second and third."""
    one, half = np.float32(1), np.float32(0.5)
    top, bottom, low = half * (values[2] + values[3]), half * (values[0] + values[1]), half * (values[1] + values[2])
    return one / top, -one / bottom, -one / low


@kernel
def _best_scale(x, w, block, values, down, key, gain, cost):
    """The scale just after the event that leaves the best cut, for one direction and table.

    x: sorted, w: arrays of lanes; down: whether the values descend as the weights ascend. The largest weight keeps its
    outermost value: the last segment of the reference is never empty.
    """
    v0, v1, v2, v3 = values[0], values[1], values[2], values[3]
    from_top, from_bottom, from_low = _thresholds(values)
    zero = splat(np.float32(0))
    sxq = sqq = zero
    for i in range(block):
        y, wi = load(x, i * LANES), load(w, i * LANES)
        if down:
            y = -y
        positive, negative = y > np.float32(0), y < np.float32(0)
        outer_value = select(positive, splat(v3), select(negative, splat(v0), splat(v2)))
        inner_value = select(negative, splat(v1), splat(v2))
        if i == block - 1:
            outer_value = splat(v0) if down else splat(v3)
            inner_value, negative = outer_value, y < y
        wy = wi * y
        sxq, sqq = fma_lanes(wy, outer_value, sxq), fma_lanes(wi, outer_value * outer_value, sqq)
        at = i * LANES
        store(key, at, max_lanes(y * from_top, -y * from_bottom))
        store(gain, at, wy * (inner_value - outer_value))
        store(cost, at, wi * (inner_value * inner_value - outer_value * outer_value))
        # Falling keys after the rising ones of the first half: the sequence is bitonic.
        at = (2 * block - 1 - i if down else block + i) * LANES
        store(key, at, -y * from_low)
        store(gain, at, select(negative, wy * (v2 - v1), zero))
        store(cost, at, select(negative, wi * (v2 * v2 - v1 * v1), zero))
    _merge(block, 1, key, gain, cost)
    _merge(2 * block, _RUN, key, gain, cost)
    best, best_sqq, scale = sxq * sxq, sqq, splat(np.float32(-1))
    for first in range(0, 2 * block, _RUN):
        sxq, sqq, best, best_sqq, scale = _best_of_run(key, gain, cost, first, sxq, sqq, best, best_sqq, scale)
    return scale


@kernel
def search_boundaries(x, w, table, network, scales, flags):
    """Scale and flag of every block, for float32 x and weights w, both [blocks, elements per block, 16 or 32].

    table: float32 [2, at least 4]; network: sorting_network(elements per block). Writes float32 scales and uint8 flags (1:
    shifted table), both [blocks]; blocks of zeros get 0 and 0.
    """
    blocks, block = x.shape
    size = block * LANES
    xs, ws = np.empty(size, np.float32), np.empty(size, np.float32)
    sx, sw = np.empty(size, np.float32), np.empty(size, np.float32)  # sums of w x and w up to an element
    key, gain, cost = np.empty(2 * size, np.float32), np.empty(2 * size, np.float32), np.empty(2 * size, np.float32)
    scale_lanes, flag_lanes = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    zero = splat(np.float32(0))
    for start in range(0, blocks, LANES):
        count = min(LANES, blocks - start)
        if count < LANES:
            xs[:], ws[:] = 0, 0
        for b in range(count):
            for i in range(block):
                xs[i * LANES + b], ws[i * LANES + b] = x[start + b, i], w[start + b, i]
        _sort(network, xs, ws)
        sum_x = sum_w = zero
        for i in range(block):
            wi = load(ws, i * LANES)
            sum_x, sum_w = fma_lanes(wi, load(xs, i * LANES), sum_x), sum_w + wi
            store(sx, i * LANES, sum_x)
            store(sw, i * LANES, sum_w)
        scale, best, flag = zero, zero, zero
        for variant in range(4):
            shifted, down = variant % 2, variant >= 2
            values = table[shifted]
            v0, v1, v2, v3 = values[0], values[1], values[2], values[3]
            d = _best_scale(xs, ws, block, values, down, key, gain, cost)
            # Sums over the weights before the second, third and fourth run.
            x0 = w0 = x1 = w1 = x2 = w2 = zero
            from_top, from_bottom, from_low = _thresholds(values)
            for i in range(block - 1):
                y = load(xs, i * LANES)
                px, pw = load(sx, i * LANES), load(sw, i * LANES)
                if down:
                    y = -y
                top = (y > np.float32(0)) & (y * from_top > d)
                bottom = (y < np.float32(0)) & (-y * from_bottom > d)
                below = (y < np.float32(0)) & (-y * from_low > d)
                if down:
                    in0, in1, in2 = top, ~below, ~bottom
                else:
                    in0, in1, in2 = bottom, below, ~top
                x0, w0 = select(in0, px, x0), select(in0, pw, w0)
                x1, w1 = select(in1, px, x1), select(in1, pw, w1)
                x2, w2 = select(in2, px, x2), select(in2, pw, w2)
            if down:
                v0, v1, v2, v3 = v3, v2, v1, v0
            sxq = fma_lanes(sum_x - x2, splat(v3), fma_lanes(x2 - x1, splat(v2), fma_lanes(x1 - x0, splat(v1), x0 * v0)))
            sqq = fma_lanes(w1 - w0, splat(v1 * v1), w0 * (v0 * v0))
            sqq = fma_lanes(sum_w - w2, splat(v3 * v3), fma_lanes(w2 - w1, splat(v2 * v2), sqq))
            better = (sqq > np.float32(0)) & (sxq * sxq > best * sqq)
            scale = select(better, sxq / sqq, scale)
            best = select(better, scale * sxq, best)
            flag = select(better, splat(np.float32(shifted)), flag)
        all_zero = (abs(load(xs, 0)) < MIN_AMAX) & (abs(load(xs, (block - 1) * LANES)) < MIN_AMAX)
        store(scale_lanes, 0, select(all_zero, zero, scale))
        store(flag_lanes, 0, select(all_zero, zero, flag))
        for b in range(count):
            scales[start + b], flags[start + b] = scale_lanes[b], flag_lanes[b]


@partial(TaskKernel, dtype=SEARCH)
def search_of_boundaries(job, number):
    """`search_boundaries` of a record of SEARCH."""
    shape = job.blocks, job.block
    x, w = view(job.x, shape, np.float32), view(job.w, shape, np.float32)
    table, network = view(job.table, (2, job.entries), np.float32), view(job.network, (job.comparators, 2), np.int64)
    scales, flags = view(job.scales, job.blocks, np.float32), view(job.flags, job.blocks, np.uint8)
    search_boundaries(x, w, table, network, scales, flags)
