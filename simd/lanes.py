"""Operations on sixteen floats side by side (the values that lane_types.py describes), for use inside kernels.

`load`, `store` and `select` take what they can: float32 and float64 lanes, masks, bytes. The rest is for float32 lanes where
nothing else is said.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from . import llvm
from .compile import intrinsic, kernel
from .instructions.half_precision import float_to_half, half_to_float
from .instructions.permute import mask_of_bits
from .lane_types import F32, F64, LANES, MASK, SCALARS, call_lanewise, element_pointer, is_row
from .llvm import F32X16, I1, I8, I16, I32, I32X16, I64, constant, shuffle, vector
from .scalar import ROUNDING_CONSTANT

_BITS = ir.IntType(LANES)  # a mask as an integer


# --- memory ---------------------------------------------------------------------------------------------------------


@intrinsic
def load(typingctx, array, index):
    """Sixteen consecutive elements of a row: of float32 or uint8 as float32 lanes, of float64 as float64 lanes."""
    if not is_row(array, types.float32, types.float64, types.uint8):
        return None
    lanes = F64 if array.dtype == types.float64 else F32

    def generate(context, builder, signature, args):
        element = context.get_data_type(array.dtype)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], element)
        value = builder.load(pointer, align=array.dtype.bitwidth // 8)
        return builder.uitofp(value, F32X16) if array.dtype == types.uint8 else value

    return lanes(array, types.intp), generate


@intrinsic
def store(typingctx, array, index, value):
    """Writes lanes to sixteen consecutive elements of a row: float32 and float64 lanes as they are; to a uint8 row
    float32 lanes truncated to integers, of which the low eight bits are stored."""
    if not is_row(array, types.float32, types.float64, types.uint8):
        return None
    lanes = F64 if array.dtype == types.float64 else F32

    def generate(context, builder, signature, args):
        element, value = context.get_data_type(array.dtype), args[2]
        if array.dtype == types.uint8:
            value = builder.trunc(builder.fptosi(value, I32X16), vector(I8, LANES))
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], element)
        builder.store(value, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


@intrinsic
def transpose_runs(typingctx, source, starts, offset, target, index):
    """Sixteen consecutive elements of each of sixteen runs of a float32 row as the lanes of another: element i of the run that
    begins at source[starts[l] + offset] becomes lane l of those from target[index + 16 * i] on. starts: int64 row."""
    if not (is_row(source, types.float32) and is_row(starts, types.int64) and is_row(target, types.float32)):
        return None

    def generate(context, builder, signature, args):
        types_of, (source, starts, offset, target, index) = signature.args, args
        runs = []
        for lane in range(LANES):
            place = element_pointer(context, builder, types_of[1], starts, I64(lane), I64, 1)
            start = builder.extract_element(builder.load(place, align=8), I32(0))
            run = element_pointer(context, builder, types_of[0], source, builder.add(start, offset), F32X16.element)
            runs.append(builder.load(run, align=4))
        for i, lanes in enumerate(llvm.transposed(builder, runs)):
            at = builder.add(index, I64(LANES * i))
            builder.store(lanes, element_pointer(context, builder, types_of[3], target, at, F32X16.element), align=4)
        return context.get_dummy_value()

    return types.void(source, starts, types.intp, target, types.intp), generate


def _bf16(builder, low, high):
    """Two <16 x float>, all finite, rounded to bf16 (ties to even): <32 x i16>."""
    halves = []
    for bits in (builder.bitcast(low, I32X16), builder.bitcast(high, I32X16)):
        odd = builder.and_(builder.lshr(bits, constant(I32X16, 16)), constant(I32X16, 1))
        rounded = builder.add(builder.add(bits, constant(I32X16, 0x7FFF)), odd)
        halves.append(builder.bitcast(rounded, vector(I16, 2 * LANES)))
    return shuffle(builder, halves[0], halves[1], range(1, 4 * LANES, 2))


@intrinsic
def store_bf16(typingctx, array, index, low, high):
    """Writes two values of float32 lanes, all finite, rounded to bf16 (ties to even), to 32 consecutive elements of a uint16
    row."""
    if not is_row(array, types.uint16):
        return None

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I16, 2 * LANES)
        builder.store(_bf16(builder, *args[2:]), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, F32, F32), generate


@intrinsic
def store_bf16_rows(typingctx, source, start, step, target, index):
    """Thirty-two consecutive elements of each of sixteen runs of a float32 row, which begin at source[start], source[start +
    step] and so on, rounded to bf16 (ties to even), to 1,024 bytes of a uint8 row: two of each run in turn. All are finite."""
    if not (is_row(source, types.float32) and is_row(target, types.uint8)):
        return None

    def generate(context, builder, signature, args):
        types_of, (source, start, step, target, index) = signature.args, args
        pairs = []
        for lane in range(LANES):
            first = builder.add(start, builder.mul(step, I64(lane)))
            places = [builder.add(first, I64(LANES * i)) for i in range(2)]
            pointers = [element_pointer(context, builder, types_of[0], source, at, F32X16.element) for at in places]
            pairs.append(builder.bitcast(_bf16(builder, *(builder.load(p, align=4) for p in pointers)), I32X16))
        for i, words in enumerate(llvm.transposed(builder, pairs)):
            at = builder.add(index, I64(4 * LANES * i))
            block = builder.bitcast(words, vector(I8, 4 * LANES))
            builder.store(block, element_pointer(context, builder, types_of[3], target, at, I8, 4 * LANES), align=1)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp), generate


@intrinsic
def load_half(typingctx, array, index):
    """Sixteen float16 of a uint16 row, as float32 lanes."""
    if not is_row(array, types.uint16):
        return None

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I16)
        return half_to_float(builder, builder.load(pointer, align=2))

    return F32(array, types.intp), generate


@intrinsic
def _store_half(typingctx, array, index, value):
    """Writes float32 lanes, rounded to float16, to sixteen consecutive elements of a uint16 row."""
    if not is_row(array, types.uint16):
        return None

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I16)
        builder.store(float_to_half(builder, args[2]), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, F32), generate


@intrinsic
def _store_half_pairs(typingctx, array, index, low, high):
    """Writes float32 lanes, rounded to float16, to the low and the high halves of sixteen elements of a uint32 row."""
    if not is_row(array, types.uint32):
        return None

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I32)
        low, high = (float_to_half(builder, value) for value in args[2:])
        pairs = shuffle(builder, low, high, [LANES * i + lane for lane in range(LANES) for i in range(2)])
        builder.store(builder.bitcast(pairs, I32X16), pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, F32, F32), generate


# --- masks ----------------------------------------------------------------------------------------------------------


@intrinsic
def select(typingctx, mask, yes, no):
    """Per lane `yes` where the mask is set, else `no`: both of one type of lanes, masks and bytes included."""
    if mask != MASK or yes != no:
        return None

    def generate(context, builder, signature, args):
        return builder.select(*args)

    return yes(MASK, yes, no), generate


@intrinsic
def any_lane(typingctx, mask):
    """Whether the mask is set in at least one lane."""

    def generate(context, builder, signature, args):
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], _BITS), _BITS(0))

    return types.boolean(MASK), generate


@intrinsic
def mask_bits(typingctx, mask):
    """Lane l of a mask as bit l of an integer."""
    if mask != MASK:
        return None

    def generate(context, builder, signature, args):
        return builder.zext(builder.bitcast(args[0], _BITS), I64)

    return types.int64(MASK), generate


@intrinsic
def lane_at(typingctx, a, number):
    """One of sixteen float32 lanes, by its number."""
    if a != F32:
        return None

    def generate(context, builder, signature, args):
        return builder.extract_element(args[0], args[1])

    return types.float32(F32, types.int64), generate


@intrinsic
def first_set_lane(typingctx, mask):
    """The number of the first lane that is set; 16 if none is."""
    if mask != MASK:
        return None

    def generate(context, builder, signature, args):
        bits = builder.zext(builder.bitcast(args[0], _BITS), I64)
        return builder.cttz(builder.or_(bits, I64(1 << LANES)), I1(1))

    return types.int64(MASK), generate


@intrinsic
def mask_from_bits(typingctx, bits):
    """The mask whose lane l is bit l of an integer."""

    def generate(context, builder, signature, args):
        return mask_of_bits(builder, builder.trunc(args[0], _BITS))

    return MASK(types.int64), generate


# --- arithmetic -----------------------------------------------------------------------------------------------------


@intrinsic
def splat(typingctx, value):
    """A number in every lane, as float32 lanes."""

    def generate(context, builder, signature, args):
        return llvm.splat(builder, args[0])

    return F32(types.float32), generate


@intrinsic
def fma_lanes(typingctx, a, b, c):
    """a * b + c with one rounding per lane: float32 or float64 lanes, all of one type."""
    if a not in SCALARS or not a == b == c:
        return None

    def generate(context, builder, signature, args):
        return call_lanewise(builder, "fma", *args)

    return a(a, a, a), generate


@intrinsic
def sqrt_lanes(typingctx, a):
    """Square root per lane (float32 lanes)."""

    def generate(context, builder, signature, args):
        return call_lanewise(builder, "sqrt", args[0])

    return F32(F32), generate


@intrinsic
def trunc_lanes(typingctx, a):
    """float32 lanes rounded to integers, towards zero."""

    def generate(context, builder, signature, args):
        return call_lanewise(builder, "trunc", args[0])

    return F32(F32), generate


@intrinsic
def copy_sign(typingctx, a, sign):
    """The magnitudes of a with the signs of `sign` (float32 lanes)."""

    def generate(context, builder, signature, args):
        return call_lanewise(builder, "copysign", *args)

    return F32(F32, F32), generate


@intrinsic
def power_of_two_below(typingctx, a):
    """The largest power of two that is no larger, per lane: float32 lanes, not negative; 0 for subnormal numbers."""
    if a != F32:
        return None

    def generate(context, builder, signature, args):
        bits = builder.and_(builder.bitcast(args[0], I32X16), constant(I32X16, 0x7F800000))
        return builder.bitcast(bits, F32X16)

    return F32(F32), generate


@intrinsic
def to_float64(typingctx, a):
    """float32 lanes as float64 lanes."""

    def generate(context, builder, signature, args):
        return builder.fpext(args[0], F64.vector)

    return F64(F32), generate


@intrinsic
def to_float32(typingctx, a):
    """float64 lanes rounded to float32 lanes."""

    def generate(context, builder, signature, args):
        return builder.fptrunc(args[0], F32X16)

    return F32(F64), generate


@intrinsic
def _through_half(typingctx, a):
    """float32 lanes rounded to float16 (ties to even), as float32 lanes again."""

    def generate(context, builder, signature, args):
        return half_to_float(builder, float_to_half(builder, args[0]))

    return F32(F32), generate


@kernel
def min_lanes(a, b):
    """The smaller of two values of lanes, lane by lane."""
    return select(a < b, a, b)


@kernel
def max_lanes(a, b):
    """The larger of two values of lanes, lane by lane."""
    return select(a > b, a, b)


@kernel
def clamp(a, low, high):
    """a limited to the numbers low to high, lane by lane."""
    return min_lanes(max_lanes(a, splat(low)), splat(high))


@kernel
def round_product_lanes(a, b):
    """The integer nearest to the exact product a * b per lane, ties to even (float32 lanes, |product| below 2**22)."""
    return fma_lanes(a, b, splat(ROUNDING_CONSTANT)) - ROUNDING_CONSTANT


_HALF_MAX = 65504.0


@kernel
def round_to_half(a):
    """float32 lanes rounded to the nearest finite float16 (ties to even), as float32 lanes again."""
    return _through_half(clamp(a, -_HALF_MAX, _HALF_MAX))


@kernel
def store_half(array, index, a):
    """Writes float32 lanes as float16 (rounded as by round_to_half) to sixteen consecutive elements of a uint16 row."""
    _store_half(array, index, clamp(a, -_HALF_MAX, _HALF_MAX))


@kernel
def store_half_pairs(array, index, low, high):
    """As store_half, of two values: to the low and the high halves of sixteen consecutive elements of a uint32 row."""
    _store_half_pairs(array, index, clamp(low, -_HALF_MAX, _HALF_MAX), clamp(high, -_HALF_MAX, _HALF_MAX))


@intrinsic
def hadamard_lanes(typingctx, a):
    """The Walsh-Hadamard transform of sixteen float32 lanes, in natural order and not normalised: sums and differences of
    lanes that are 1, 2, 4 and 8 apart."""
    if a != F32:
        return None

    def generate(context, builder, signature, args):
        value = args[0]
        for step in (1, 2, 4, 8):
            other = shuffle(builder, value, None, [lane ^ step for lane in range(LANES)])
            signs = constant(F32X16, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
            value = llvm.fma(builder, value, signs, other)  # a sum or a difference: the product is exact
        return value

    return F32(F32), generate


# --- reductions -----------------------------------------------------------------------------------------------------


def _extreme(name):
    @intrinsic
    def reduce(typingctx, a):
        def generate(context, builder, signature, args):
            reduction = llvm.function(builder, f"llvm.vector.reduce.{name}.v{LANES}f32", llvm.F32, F32X16)
            return builder.call(reduction, args, fastmath=("nnan",))

        return types.float32(F32), generate

    return reduce


# The smallest and the largest of sixteen float32 lanes, none of which is NaN.
reduce_min, reduce_max = _extreme("fmin"), _extreme("fmax")


@intrinsic
def sum_halves(typingctx, a):
    """The sums of float32 lanes 0 to 7 and of 8 to 15; in each the upper half is added to the lower until one lane is left."""
    if a != F32:
        return None

    def generate(context, builder, signature, args):
        value, width = args[0], LANES // 2
        while width > 1:
            half = width // 2
            low = [i for start in (0, width) for i in range(start, start + half)]
            lower, upper = (shuffle(builder, value, None, [i + step for i in low]) for step in (0, half))
            value, width = builder.fadd(lower, upper), half
        numbers = [builder.extract_element(value, I32(i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.float32, 2)(F32), generate


@intrinsic
def fold_sum(typingctx, a):
    """The sum of sixteen float32 lanes: the upper half is added to the lower until one lane is left. (reduce_sum adds up in
    another order.)"""

    def generate(context, builder, signature, args):
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            low, high = (shuffle(builder, value, None, range(start, start + width)) for start in (0, width))
            value = builder.fadd(low, high)
        return builder.extract_element(value, I32(0))

    return types.float32(F32), generate


@kernel
def reduce_sum(a):
    """The sum of sixteen float32 lanes: that of lanes 0 to 7 plus that of lanes 8 to 15 (see sum_halves)."""
    low, high = sum_halves(a)
    return low + high
