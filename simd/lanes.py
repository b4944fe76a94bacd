"""Operations on sixteen numbers side by side, one value inside kernels (see lane_types.py)."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from .compile import intrinsic, kernel
from .half_precision import float_to_half, half_to_float
from .lane_types import F32, F64, LANES, MASK, SCALARS, call_lanewise, element_pointer, is_row, splat_ir, vector_type
from .scalar import ROUNDING_CONSTANT


@intrinsic
def splat(typingctx, value):
    """A number in every lane, as float32 lanes."""

    def generate(context, builder, sig, args):
        return splat_ir(builder, args[0], F32)

    return F32(types.float32), generate


@intrinsic
def load(typingctx, array, index):
    """Sixteen consecutive elements of a row: of float32 or uint8 as float32 lanes, of float64 as float64 lanes."""
    if not is_row(array, types.float32, types.float64, types.uint8):
        return None
    result = F64 if array.dtype == types.float64 else F32

    def generate(context, builder, sig, args):
        element = context.get_data_type(sig.args[0].dtype)
        place = element_pointer(context, builder, sig.args[0], args[0], args[1], element)
        value = builder.load(place, align=sig.args[0].dtype.bitwidth // 8)
        return builder.uitofp(value, vector_type(F32)) if sig.args[0].dtype == types.uint8 else value

    return result(array, types.intp), generate


@intrinsic
def store(typingctx, array, index, value):
    """Writes lanes to sixteen consecutive elements of a row: float32 and float64 lanes as they are; to a uint8 row
    float32 lanes cut to whole numbers, of which the low eight bits are kept."""
    if not is_row(array, types.float32, types.float64, types.uint8):
        return None
    kind = F64 if array.dtype == types.float64 else F32

    def generate(context, builder, sig, args):
        array_type = sig.args[0]
        element = context.get_data_type(array_type.dtype)
        value = args[2]
        if array_type.dtype == types.uint8:
            wide = builder.fptosi(value, ir.VectorType(ir.IntType(32), LANES))
            value = builder.trunc(wide, ir.VectorType(element, LANES))
        place = element_pointer(context, builder, array_type, args[0], args[1], element)
        builder.store(value, place, align=array_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, kind), generate


@intrinsic
def select(typingctx, mask, yes, no):
    """Per lane `yes` where the mask is set, else `no` (both lanes of one kind, masks included)."""
    if mask != MASK or yes != no:
        return None

    def generate(context, builder, sig, args):
        return builder.select(*args)

    return yes(MASK, yes, no), generate


@intrinsic
def any_lane(typingctx, mask):
    """Whether the mask is set in at least one lane."""

    def generate(context, builder, sig, args):
        word = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", word, ir.Constant(word.type, 0))

    return types.boolean(MASK), generate


@intrinsic
def mask_bits(typingctx, mask):
    """Lane l of a mask as bit l of an integer."""
    if mask != MASK:
        return None

    def generate(context, builder, sig, args):
        return builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))

    return types.int64(MASK), generate


@intrinsic
def reduce_max(typingctx, a):
    """The largest of sixteen float32 lanes, none of which is NaN."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(ir.FloatType(), [args[0].type])
        reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(reduce, args, fastmath=("nnan",))

    return types.float32(F32), generate


@intrinsic
def sum_halves(typingctx, a):
    """The sums of float32 lanes 0 to 7 and 8 to 15: the upper ones of each are added to the lower ones until one is left."""
    if a != F32:
        return None

    def generate(context, builder, sig, args):
        value, width = args[0], LANES // 2
        while width > 1:
            half = width // 2
            low = [i for start in (0, width) for i in range(start, start + half)]
            index = ir.VectorType(ir.IntType(32), 2 * half)
            lower, upper = (ir.Constant(index, [i + step for i in low]) for step in (0, half))
            value = builder.fadd(builder.shuffle_vector(value, value, lower), builder.shuffle_vector(value, value, upper))
            width = half
        numbers = [builder.extract_element(value, ir.Constant(ir.IntType(32), i)) for i in range(2)]
        return context.make_tuple(builder, sig.return_type, numbers)

    return types.UniTuple(types.float32, 2)(F32), generate


@intrinsic
def fold_sum(typingctx, a):
    """The sum of sixteen float32 lanes: upper halves are added to lower halves until one lane is left."""

    def generate(context, builder, signature, args):
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            index = ir.VectorType(ir.IntType(32), width)
            low, high = (ir.Constant(index, list(range(start, start + width))) for start in (0, width))
            value = builder.fadd(builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high))
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return types.float32(F32), generate


@intrinsic
def reduce_min(typingctx, a):
    """The smallest of sixteen float32 lanes, none of which is NaN."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [args[0].type])
        reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmin.v{LANES}f32")
        return builder.call(reduce, args, fastmath=("nnan",))

    return types.float32(F32), generate


@intrinsic
def first_set_lane(typingctx, mask):
    """The number of the first lane that is set; 16 if none is."""
    if mask != MASK:
        return None

    def generate(context, builder, signature, args):
        bits = builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))
        guarded = builder.or_(bits, ir.Constant(bits.type, 1 << LANES))
        return builder.cttz(guarded, ir.Constant(ir.IntType(1), 1))

    return types.int64(MASK), generate


@intrinsic
def mask_from_bits(typingctx, bits):
    """The mask whose lane l is bit l of an integer."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))

    return MASK(types.int64), generate


@intrinsic
def fma_lanes(typingctx, a, b, c):
    """a * b + c with one rounding per lane (float32 or float64 lanes, all of one kind)."""
    if a not in SCALARS or not a == b == c:
        return None

    def generate(context, builder, sig, args):
        return call_lanewise(builder, "fma", *args)

    return a(a, a, a), generate


@intrinsic
def sqrt_lanes(typingctx, a):
    """Square root per lane (float32 lanes)."""

    def generate(context, builder, sig, args):
        return call_lanewise(builder, "sqrt", args[0])

    return F32(F32), generate


@intrinsic
def trunc_lanes(typingctx, a):
    """The whole part of float32 lanes, towards zero."""

    def generate(context, builder, sig, args):
        return call_lanewise(builder, "trunc", args[0])

    return F32(F32), generate


@intrinsic
def to_float64(typingctx, a):
    """float32 lanes as float64 lanes."""

    def generate(context, builder, sig, args):
        return builder.fpext(args[0], vector_type(F64))

    return F64(F32), generate


@intrinsic
def to_float32(typingctx, a):
    """float64 lanes rounded to float32 lanes."""

    def generate(context, builder, sig, args):
        return builder.fptrunc(args[0], vector_type(F32))

    return F32(F64), generate


@intrinsic
def _half(typingctx, a):
    """float32 lanes rounded to float16 (ties to even), as float32 lanes again."""

    def generate(context, builder, sig, args):
        return half_to_float(builder, float_to_half(builder, args[0]))

    return F32(F32), generate


@intrinsic
def load_half(typingctx, words, index):
    """Sixteen float16 of a uint16 row, as float32 lanes."""
    if not is_row(words, types.uint16):
        return None

    def generate(context, builder, sig, args):
        place = element_pointer(context, builder, sig.args[0], args[0], args[1], ir.IntType(16))
        return half_to_float(builder, builder.load(place, align=2))

    return F32(words, types.intp), generate


@intrinsic
def _store_half(typingctx, array, index, value):
    """Writes float32 lanes, rounded to float16, as sixteen consecutive words of a uint16 row."""
    if not is_row(array, types.uint16):
        return None

    def generate(context, builder, sig, args):
        place = element_pointer(context, builder, sig.args[0], args[0], args[1], ir.IntType(16))
        builder.store(float_to_half(builder, args[2]), place, align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, F32), generate


@kernel
def reduce_sum(a):
    """The sum of float32 lanes, that of the halves first."""
    low, high = sum_halves(a)
    return low + high


@kernel
def min_lanes(a, b):
    """The smaller of two lanes values, lane by lane."""
    return select(a < b, a, b)


@kernel
def max_lanes(a, b):
    """The larger of two lanes values, lane by lane."""
    return select(a > b, a, b)


@kernel
def clamp(a, low, high):
    """a kept within the numbers low and high, lane by lane."""
    return min_lanes(max_lanes(a, splat(low)), splat(high))


@kernel
def round_product_lanes(a, b):
    """The integer nearest to the exact product a * b per lane, ties to even (float32 lanes, |product| below 2**22)."""
    return fma_lanes(a, b, splat(ROUNDING_CONSTANT)) - ROUNDING_CONSTANT


_HALF_MAX = 65504.0


@kernel
def round_to_half(a):
    """float32 lanes rounded to the nearest float16 (ties to even, kept finite), as float32 lanes again."""
    return _half(clamp(a, -_HALF_MAX, _HALF_MAX))


@kernel
def store_half(words, index, a):
    """Writes float32 lanes as float16 (rounded as in narrow_half) to sixteen words of a uint16 row."""
    _store_half(words, index, clamp(a, -_HALF_MAX, _HALF_MAX))
