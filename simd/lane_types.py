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

LANES = 16


class LanesType(types.Type):
    """numba type of sixteen float32, float64, booleans or uint8."""

    def __init__(self, element: str):
        self.element = element
        super().__init__(name=f"lanes16({element})")


F32, F64, MASK, BYTES = LanesType("float32"), LanesType("float64"), LanesType("bool"), LanesType("uint8")
SCALARS = {F32: types.float32, F64: types.float64}
_ELEMENT_IR = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "bool": ir.IntType(1), "uint8": ir.IntType(8)}


def vector_type(kind: LanesType) -> ir.VectorType:
    return ir.VectorType(_ELEMENT_IR[kind.element], LANES)


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector_type(fe_type))


def splat_ir(builder, value, kind):
    vector = vector_type(kind)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def define_operator(name, generate, result=None, kinds=SCALARS):  # kinds: lanes type -> type of the number
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
                a, b = (v if t == kind else splat_ir(builder, v, kind) for v, t in zip(args, sig.args, strict=True))
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


def call_lanewise(builder, name, *args):
    """Calls the LLVM intrinsic whose arguments and result are all vectors of one type."""
    vector = args[0].type
    suffix = f"v{LANES}{vector.element.intrinsic_name}"
    function = get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * len(args)), f"llvm.{name}.{suffix}")
    return builder.call(function, args)


_unary(operator.invert, lambda builder, a: builder.not_(a), MASK)
for _kind in SCALARS:
    _unary(operator.neg, lambda builder, a: builder.fneg(a), _kind)
    _unary(abs, lambda builder, a: call_lanewise(builder, "fabs", a), _kind)


def element_pointer(context, builder, array_type, array, index, element):
    """Pointer to sixteen elements of the IR type from array[index] on."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, LANES).as_pointer())


def is_row(array, *kinds):
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in kinds
