"""What a processor reaches at best: products of bytes and of floats in registers, and bytes read from memory.

    python benchmarks/peak.py

One thread multiplies and adds vectors that never leave the registers, with as many sums as hide the instruction's latency. A
program that multiplies matrices reaches a share of this; what it lacks are the loads, the unpacking of weights and the scales.
"""

from __future__ import annotations

import json
import time
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import for_range

from ggufmill.simd.compile import intrinsic, kernel
from ggufmill.simd.instructions.dot_products import add_byte_dots
from ggufmill.simd.llvm import F32, I8, I32, LANES, constant, fma, vector
from ggufmill.simd.target import target

_SUMS = 12  # independent ones: latency of 4 to 5 cycles, up to two instructions in each
_BYTES = 4 * LANES


def _loop(builder: Any, count: Any, first: Any, step: Any) -> Any:
    """Runs `step` on each of the sums `count` times; returns the sum of all of them."""
    places = [builder.alloca(first.type) for _ in range(_SUMS)]
    for place in places:
        builder.store(first, place)
    with for_range(builder, count):
        for place in places:
            builder.store(step(builder.load(place)), place)
    values = [builder.load(place) for place in places]
    total = values[0]
    for value in values[1:]:
        total = builder.xor(total, value) if isinstance(first.type.element, ir.IntType) else builder.fadd(total, value)
    return total


@intrinsic
def _bytes(typingctx, count, one):
    """Products of bytes, `count` times; `one` is 1, which LLVM must not know."""

    def generate(context, builder, signature, args):
        of = target()
        one = builder.trunc(args[1], ir.IntType(8))
        empty = ir.Constant(vector(I8, _BYTES), ir.Undefined)
        splat = builder.shuffle_vector(
            builder.insert_element(empty, one, ir.IntType(32)(0)), empty, ir.Constant(vector(I32, _BYTES), [0] * _BYTES)
        )
        total = _loop(builder, args[0], constant(I32, [0] * LANES), lambda t: add_byte_dots(builder, t, splat, splat, 63, of))
        return builder.sext(builder.extract_element(total, ir.IntType(32)(0)), ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _floats(typingctx, count, one):
    """Products of float32, as `_bytes`."""

    def generate(context, builder, signature, args):
        empty = ir.Constant(vector(F32, LANES), ir.Undefined)
        one = builder.sitofp(args[1], F32)
        splat = builder.shuffle_vector(
            builder.insert_element(empty, one, ir.IntType(32)(0)), empty, ir.Constant(vector(I32, LANES), [0] * LANES)
        )
        total = _loop(builder, args[0], constant(F32, [0.0] * LANES), lambda t: fma(builder, splat, splat, t))
        return builder.fptosi(builder.extract_element(total, ir.IntType(32)(0)), ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


@kernel(fastmath=True)
def read_all(words):
    """Reads int64 [n] as fast as memory allows (LLVM makes vectors of a loop over a whole array, not over a part of one)."""
    total = 0
    for i in range(len(words)):
        total += words[i]
    return total


@kernel
def _run_bytes(count, one):
    return _bytes(count, one)


@kernel
def _run_floats(count, one):
    return _floats(count, one)


def peak(run: Any, products: int, seconds: float = 0.5) -> float:
    """Products per second of one thread: the best of runs within so many seconds. products: of one instruction's worth."""
    count = 1 << 18
    run(1, 1)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.thread_time()
        run(count, 1)
        best = min(best, time.thread_time() - began)
    return count * _SUMS * products / best


def peaks() -> dict[str, float]:
    """Products per second of one thread: of 'bytes' (8-bit activations and codes) and of 'floats' (float32)."""
    return {"bytes": peak(_run_bytes, _BYTES), "floats": peak(_run_floats, LANES)}


if __name__ == "__main__":
    print(json.dumps({"level": target().level, **{name: f"{value / 1e9:.1f} G/s" for name, value in peaks().items()}}))
