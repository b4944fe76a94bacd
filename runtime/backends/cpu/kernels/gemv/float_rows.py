"""The inner loop of a matrix-vector product on weights that are floats: bf16, f16, f32 and bf16_r16, activations float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ......data_classes import dataclass
from ......formats.layouts.reader.emitter import F32, I16, I32, I64, LANES, Emitter, constant, vector

_CHAINS = 4  # independent sums: each addition of a single one would wait for the one before


@dataclass(frozen=True)
class FloatType:
    """bytes: of a weight; columns: the row length has to be a multiple of it."""

    bytes: int
    columns: int


FLOATS = {"f32": FloatType(4, 1), "f16": FloatType(2, 1), "bf16": FloatType(2, 1), "bf16_r16": FloatType(2, 2)}


def _as_float(emit: Emitter, name: str, address: Any, count: int) -> Any:
    """<count x float> (count 0: one float) of weights at an address."""
    typed = (lambda element: vector(element, count)) if count else (lambda element: element)
    if name == "f32":
        return emit.load(address, 0, typed(F32))
    if name == "bf16" and count == LANES and emit.target.permutes_in_halves:
        return emit.concat([_permuted_to_floats(emit, address, 16 * half) for half in range(2)])
    words = emit.load(address, 0, typed(I16))
    if name == "f16":
        return emit.half_to_float(words)
    high = constant(I32, [16] * count) if count else I32(16)
    return emit.builder.bitcast(emit.builder.shl(emit.builder.zext(words, typed(I32)), high), typed(F32))


def _permuted_to_floats(emit: Emitter, address: Any, offset: int) -> Any:
    """<8 x float> of bf16. AVX2 loads them into both halves of a register and moves bytes within each: one instruction that
    computes, in place of two to extend and one to shift them, which LLVM would take if it saw where the bytes come from."""
    twice, kind = emit.shuffle(emit.load(address, offset, vector(I16, 8)), 2 * list(range(8))), vector(I16, LANES)
    hidden = emit.builder.asm(ir.FunctionType(kind, [kind]), "", "=x,0", [twice], side_effect=False)
    places = [12 * half + i // 2 if i % 2 else -1 for half in range(2) for i in range(8)]
    return emit.builder.bitcast(emit.shuffle(hidden, places), vector(F32, 8))


def emit_float_product(
    emit: Emitter, name: str, tokens: int, weights: list[Any], columns: Any, activations: Any, out: list[Any], stride: Any
) -> None:
    """As rows.emit_product, with activations the address of float32 [tokens, columns]."""
    builder = emit.builder
    row = builder.mul(columns, I64(4))
    inputs = [builder.add(activations, builder.mul(row, I64(t))) for t in range(tokens)]
    values = (
        _interleaved(emit, columns, weights, inputs) if name == "bf16_r16" else _plain(emit, name, columns, weights, inputs)
    )
    for number, value in enumerate(values):
        address = builder.add(out[number // tokens], builder.mul(stride, I64(number % tokens)))
        builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _new_sums(emit: Emitter, count: int) -> list[Any]:
    """Pointers to `count` vectors of zeros."""
    places = [cgutils.alloca_once(emit.builder, vector(F32, LANES)) for _ in range(count)]
    for place in places:
        emit.builder.store(constant(F32, [0.0] * LANES), place)
    return places


def _add(emit: Emitter, place: Any, a: Any, b: Any) -> None:
    """Adds a * b to the vector at a pointer."""
    emit.builder.store(emit.fma(a, b, emit.builder.load(place)), place)


def _plain(emit: Emitter, name: str, columns: Any, weights: list[Any], inputs: list[Any]) -> list[Any]:
    """Rows of f32, f16 or bf16 times each token: <1 x float> per row and token. weights, inputs: addresses of rows, of
    tokens."""
    builder, size = emit.builder, FLOATS[name].bytes
    chains = [[_new_sums(emit, _CHAINS) for _ in inputs] for _ in weights]
    done: Any = I64(0)
    for width in (LANES * _CHAINS, LANES):
        count = builder.udiv(builder.sub(columns, done), I64(width))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            column = builder.add(done, builder.mul(loop.index, I64(width)))
            for row, of_row in zip(weights, chains, strict=True):
                emit.prefetch_floats(builder.add(row, builder.mul(column, I64(size))), width * size)
                for c in range(width // LANES):
                    at = builder.add(column, I64(LANES * c))
                    weight = _as_float(emit, name, builder.add(row, builder.mul(at, I64(size))), LANES)
                    for sums, x in zip(of_row, inputs, strict=True):
                        value = emit.load(builder.add(x, builder.mul(at, I64(4))), 0, vector(F32, LANES))
                        _add(emit, sums[c], weight, value)
        done = builder.add(done, builder.mul(count, I64(width)))
    results = []
    for row, of_row in zip(weights, chains, strict=True):
        of_tokens = [cgutils.alloca_once(builder, vector(F32, 1)) for _ in inputs]
        for sums, result in zip(of_row, of_tokens, strict=True):
            low, high = (builder.fadd(builder.load(a), builder.load(b)) for a, b in (sums[:2], sums[2:]))
            builder.store(emit.fold(builder.fadd(low, high), [0] * LANES, 1), result)
        with cgutils.for_range(builder, builder.sub(columns, done), intp=I64) as loop:
            at = builder.add(done, loop.index)
            weight = _as_float(emit, name, builder.add(row, builder.mul(at, I64(size))), 1)
            for x, result in zip(inputs, of_tokens, strict=True):
                value = emit.load(builder.add(x, builder.mul(at, I64(4))), 0, vector(F32, 1))
                builder.store(emit.fma(weight, value, builder.load(result)), result)
        results += [builder.load(result) for result in of_tokens]
    return results


def _interleaved(emit: Emitter, columns: Any, weights: list[Any], inputs: list[Any]) -> list[Any]:
    """Groups of sixteen rows of bf16_r16 times each token: <16 x float> per group and token. A 32-bit word holds two columns of
    a row."""
    builder = emit.builder
    chains = [[_new_sums(emit, _CHAINS) for _ in inputs] for _ in weights]
    done: Any = I64(0)
    for pairs in (_CHAINS // 2, 1):
        count = builder.udiv(builder.sub(columns, done), I64(2 * pairs))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            column = builder.add(done, builder.mul(loop.index, I64(2 * pairs)))
            for group, of_group in zip(weights, chains, strict=True):
                emit.prefetch_sparsely(builder.add(group, builder.mul(column, I64(2 * LANES))))
                for p in range(pairs):
                    at = builder.add(column, I64(2 * p))
                    words = emit.load(builder.add(group, builder.mul(at, I64(2 * LANES))), 0, vector(I32, LANES))
                    even = builder.shl(words, constant(I32, [16] * LANES))
                    odd = builder.and_(words, constant(I32, [0xFFFF0000] * LANES))
                    for sums, x in zip(of_group, inputs, strict=True):
                        for parity, part in enumerate((even, odd)):
                            place = builder.add(x, builder.mul(builder.add(at, I64(parity)), I64(4)))
                            value = emit.splat(emit.load(place, 0, F32))
                            _add(emit, sums[2 * p + parity], builder.bitcast(part, vector(F32, LANES)), value)
        done = builder.add(done, builder.mul(count, I64(2 * pairs)))
    results = []
    for sums in (each for of_group in chains for each in of_group):
        low, high = (builder.fadd(builder.load(a), builder.load(b)) for a, b in (sums[:2], sums[2:]))
        results.append(builder.fadd(low, high))
    return results
