"""Sixteen numbers side by side as one value inside kernels: what encoders use to search sixteen blocks at a time.

A value holds the same quantity of sixteen blocks ("lanes"). Arithmetic on it is exactly the scalar float32 (or float64)
operation per lane, in the order written, so results do not depend on the vector width of the machine: LLVM maps a value to one,
two or four registers. Arrays of lanes are plain 1-D arrays; element e of lane l lies at [16 * e + l].

Operators + - * / and comparisons take lanes and numbers alike; `&`, `|`, `^`, `~` work on the masks that comparisons give.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from .compile import kernel
from .scalar import ROUNDER, operation

LANES = 16


class LanesType(types.Type):
    """numba type of sixteen float32, float64, booleans or uint8."""

    def __init__(self, element: str):
        self.element = element
        super().__init__(name=f"lanes16({element})")


F32, F64, MASK = LanesType("float32"), LanesType("float64"), LanesType("bool")
_SCALAR = {F32: types.float32, F64: types.float64}
_ELEMENT_IR = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "bool": ir.IntType(1), "uint8": ir.IntType(8)}


def vector_of(kind: LanesType) -> ir.VectorType:
    return ir.VectorType(_ELEMENT_IR[kind.element], LANES)


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector_of(fe_type))


def _splat(builder, value, kind):
    vector = vector_of(kind)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def define_operator(name, generate, result=None, kinds=_SCALAR):  # kinds: lanes type -> type of the number
    """Types and lowers operator.<name> for lanes with lanes, and for lanes with a number on either side."""
    function = getattr(operator, name)

    @infer_global(function)  # pyright: ignore[reportOptionalCall]
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            kind = next((a for a in args if a in kinds), None)
            if kind is None or len(args) != 2 or not all(a == kind or isinstance(a, types.Number) for a in args):
                return None
            return signature(result or kind, *(kind if a == kind else kinds[kind] for a in args))

    for kind, scalar in kinds.items():
        for left, right in ((kind, kind), (kind, scalar), (scalar, kind)):

            @lower_builtin(function, left, right)
            def lower(context, builder, sig, args, kind=kind):
                a, b = (v if t == kind else _splat(builder, v, kind) for v, t in zip(args, sig.args, strict=True))
                return generate(builder, a, b)


def instruction(name):
    return lambda builder, a, b: getattr(builder, name)(a, b)


def _comparison(sign):
    return lambda builder, a, b: builder.fcmp_ordered(sign, a, b)


for _name, _generate in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    define_operator(_name, instruction(_generate))
    define_operator("i" + _name, instruction(_generate))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "==")):
    define_operator(_name, _comparison(_sign), MASK)
for _name, _generate in (("and_", "and_"), ("or_", "or_"), ("xor", "xor"), ("iand", "and_"), ("ior", "or_")):
    define_operator(_name, instruction(_generate), kinds={MASK: types.boolean})


def _unary(function, generate, kind):
    @infer_global(function)  # pyright: ignore[reportOptionalCall]
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            return signature(kind, kind) if args == (kind,) else None

    @lower_builtin(function, kind)
    def lower(context, builder, sig, args):
        return generate(builder, args[0])


def _call_llvm(builder, name, *args):
    """Calls the LLVM intrinsic whose arguments and result are all vectors of one type."""
    vector = args[0].type
    suffix = f"v{LANES}{vector.element.intrinsic_name}"
    function = get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * len(args)), f"llvm.{name}.{suffix}")
    return builder.call(function, args)


_unary(operator.invert, lambda builder, a: builder.not_(a), MASK)
for _kind in _SCALAR:
    _unary(operator.neg, lambda builder, a: builder.fneg(a), _kind)
    _unary(abs, lambda builder, a: _call_llvm(builder, "fabs", a), _kind)


def place_of(context, builder, array_type, array, index, element):
    """Pointer to sixteen elements of the IR type from array[index] on."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, LANES).as_pointer())


def is_row_of(array, *kinds):
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in kinds


@operation
def spread(typingctx, value):
    """A number in every lane, as float32 lanes."""

    def generate(context, builder, sig, args):
        return _splat(builder, args[0], F32)

    return F32(types.float32), generate


@operation
def load(typingctx, array, index):
    """Sixteen consecutive elements of a row: of float32 or uint8 as float32 lanes, of float64 as float64 lanes."""
    if not is_row_of(array, types.float32, types.float64, types.uint8):
        return None
    result = F64 if array.dtype == types.float64 else F32

    def generate(context, builder, sig, args):
        element = context.get_data_type(sig.args[0].dtype)
        place = place_of(context, builder, sig.args[0], args[0], args[1], element)
        value = builder.load(place, align=sig.args[0].dtype.bitwidth // 8)
        return builder.uitofp(value, vector_of(F32)) if sig.args[0].dtype == types.uint8 else value

    return result(array, types.intp), generate


@operation
def store(typingctx, array, index, value):
    """Writes lanes to sixteen consecutive elements of a row: float32 and float64 lanes as they are; to a uint8 row
    float32 lanes cut to whole numbers, of which the low eight bits are kept."""
    if not is_row_of(array, types.float32, types.float64, types.uint8):
        return None
    kind = F64 if array.dtype == types.float64 else F32

    def generate(context, builder, sig, args):
        array_type = sig.args[0]
        element = context.get_data_type(array_type.dtype)
        value = args[2]
        if array_type.dtype == types.uint8:
            wide = builder.fptosi(value, ir.VectorType(ir.IntType(32), LANES))
            value = builder.trunc(wide, ir.VectorType(element, LANES))
        place = place_of(context, builder, array_type, args[0], args[1], element)
        builder.store(value, place, align=array_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, kind), generate


@operation
def select(typingctx, mask, yes, no):
    """Per lane `yes` where the mask is set, else `no` (both lanes of one kind, masks included)."""
    if mask != MASK or yes != no:
        return None

    def generate(context, builder, sig, args):
        return builder.select(*args)

    return yes(MASK, yes, no), generate


@operation
def look_up(typingctx, table, index):
    """Per lane table[index]: table a float32 row of 32 entries or more, index float32 lanes of whole numbers 0 to 31."""
    if not is_row_of(table, types.float32):
        return None

    def generate(context, builder, sig, args):
        vector, numbers = vector_of(F32), ir.VectorType(ir.IntType(32), LANES)
        where = builder.fptosi(args[1], numbers)
        zero = ir.Constant(context.get_value_type(types.intp), 0)
        if "+avx512f" in context.codegen().magic_tuple()[2]:  # the features that numba compiles for
            low = builder.load(place_of(context, builder, sig.args[0], args[0], zero, ir.FloatType()), align=4)
            sixteen = ir.Constant(zero.type, LANES)
            high = builder.load(place_of(context, builder, sig.args[0], args[0], sixteen, ir.FloatType()), align=4)
            kind = ir.FunctionType(vector, [vector, numbers, vector])
            permute = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.ps.512")
            return builder.call(permute, [low, where, high])
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        value = ir.Constant(vector, ir.Undefined)
        for lane in range(LANES):
            place = ir.Constant(ir.IntType(32), lane)
            entry = builder.load(builder.gep(data, [builder.extract_element(where, place)]))
            value = builder.insert_element(value, entry, place)
        return value

    return F32(table, F32), generate


@operation
def any_lane(typingctx, mask):
    """Whether the mask is set in at least one lane."""

    def generate(context, builder, sig, args):
        word = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", word, ir.Constant(word.type, 0))

    return types.boolean(MASK), generate


@operation
def mask_bits(typingctx, mask):
    """Lane l of a mask as bit l of an integer."""
    if mask != MASK:
        return None

    def generate(context, builder, sig, args):
        return builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))

    return types.int64(MASK), generate


@operation
def highest_lane(typingctx, a):
    """The largest of sixteen float32 lanes, none of which is NaN."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(ir.FloatType(), [args[0].type])
        reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(reduce, args, fastmath=("nnan",))

    return types.float32(F32), generate


@operation
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


@operation
def fma_lanes(typingctx, a, b, c):
    """a * b + c with one rounding per lane (float32 or float64 lanes, all of one kind)."""
    if a not in _SCALAR or not a == b == c:
        return None

    def generate(context, builder, sig, args):
        return _call_llvm(builder, "fma", *args)

    return a(a, a, a), generate


@operation
def sqrt_lanes(typingctx, a):
    """Square root per lane (float32 lanes)."""

    def generate(context, builder, sig, args):
        return _call_llvm(builder, "sqrt", args[0])

    return F32(F32), generate


@operation
def cut(typingctx, a):
    """The whole part of float32 lanes, towards zero."""

    def generate(context, builder, sig, args):
        return _call_llvm(builder, "trunc", args[0])

    return F32(F32), generate


@operation
def widen(typingctx, a):
    """float32 lanes as float64 lanes."""

    def generate(context, builder, sig, args):
        return builder.fpext(args[0], vector_of(F64))

    return F64(F32), generate


@operation
def narrow(typingctx, a):
    """float64 lanes rounded to float32 lanes."""

    def generate(context, builder, sig, args):
        return builder.fptrunc(args[0], vector_of(F32))

    return F32(F64), generate


@operation
def _half(typingctx, a):
    """float32 lanes rounded to float16 (ties to even), as float32 lanes again."""

    def generate(context, builder, sig, args):
        return builder.fpext(builder.fptrunc(args[0], ir.VectorType(ir.HalfType(), LANES)), vector_of(F32))

    return F32(F32), generate


@operation
def load_half(typingctx, words, index):
    """Sixteen float16 of a uint16 row, as float32 lanes."""
    if not is_row_of(words, types.uint16):
        return None

    def generate(context, builder, sig, args):
        half = ir.VectorType(ir.HalfType(), LANES)
        value = builder.load(place_of(context, builder, sig.args[0], args[0], args[1], ir.IntType(16)), align=2)
        return builder.fpext(builder.bitcast(value, half), vector_of(F32))

    return F32(words, types.intp), generate


@operation
def _store_half(typingctx, array, index, value):
    """Writes float32 lanes, rounded to float16, as sixteen consecutive words of a uint16 row."""
    if not is_row_of(array, types.uint16):
        return None

    def generate(context, builder, sig, args):
        half = builder.fptrunc(args[2], ir.VectorType(ir.HalfType(), LANES))
        words = builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES))
        builder.store(words, place_of(context, builder, sig.args[0], args[0], args[1], ir.IntType(16)), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, F32), generate


@kernel
def sum_lanes(a):
    """The sum of float32 lanes, that of the halves first."""
    low, high = sum_halves(a)
    return low + high


@kernel
def smaller(a, b):
    """The smaller of two lanes values, lane by lane."""
    return select(a < b, a, b)


@kernel
def larger(a, b):
    """The larger of two lanes values, lane by lane."""
    return select(a > b, a, b)


@kernel
def clamp(a, low, high):
    """a kept within the numbers low and high, lane by lane."""
    return smaller(larger(a, spread(low)), spread(high))


@kernel
def nearest(a, b):
    """The integer nearest to the exact product a * b per lane, ties to even (float32 lanes, |product| below 2**22)."""
    return fma_lanes(a, b, spread(ROUNDER)) - ROUNDER


_HALF_MAX = 65504.0


@kernel
def narrow_half(a):
    """float32 lanes rounded to the nearest float16 (ties to even, kept finite), as float32 lanes again."""
    return _half(clamp(a, -_HALF_MAX, _HALF_MAX))


@kernel
def store_half(words, index, a):
    """Writes float32 lanes as float16 (rounded as in narrow_half) to sixteen words of a uint16 row."""
    _store_half(words, index, clamp(a, -_HALF_MAX, _HALF_MAX))
