"""Sixteen numbers side by side as one value inside kernels: the types, and their operators.

A value of `F32` holds the same quantity of sixteen blocks, or sixteen elements of one ("lanes"). Arithmetic on it is exactly
the scalar float32 (or float64) operation per lane, in the order written, so results do not depend on the vector width of the
machine: LLVM maps a value to one, two or four registers. Arrays of lanes are plain 1-D arrays; element e of lane l lies at
[16 * e + l].

Operators + - * / and comparisons take lanes and numbers alike; & | ^ ~ work on the masks that comparisons give, and
& | ^ << >> on bytes. What else there is: `lanes` (floats and masks), `byte_lanes`, `table_lookup`, `exponential`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from .llvm import F32 as FLOAT
from .llvm import I1, I8, LANES, call, splat, vector


class LanesType(types.Type):
    """numba type of sixteen float32, float64, booleans (a mask) or uint8; `vector` is LLVM's."""

    def __init__(self, element: str, element_type: ir.Type):
        self.element, self.vector = element, vector(element_type, LANES)
        super().__init__(name=f"lanes16({element})")


F32, F64 = LanesType("float32", FLOAT), LanesType("float64", ir.DoubleType())
MASK, BYTES = LanesType("bool", I1), LanesType("uint8", I8)
SCALARS = {F32: types.float32, F64: types.float64}  # the numbers that arithmetic takes with lanes


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: LanesType):
        super().__init__(dmm, fe_type, fe_type.vector)


def _binary(name: str, generate: Callable, scalars: dict, result: LanesType | None = None) -> None:
    """Defines operator.<name> for lanes with lanes, and for lanes with a number on either side.

    generate(builder, a, b) writes it for two vectors; scalars: type of lanes -> type of the number; result: type of the result
    if it is another one.
    """
    function = getattr(operator, name)

    @infer_global(function)  # pyright: ignore[reportOptionalCall]
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            lanes = next((a for a in args if a in scalars), None)
            if lanes is None or len(args) != 2 or not all(a == lanes or isinstance(a, types.Number) for a in args):
                return None
            return signature(result or lanes, *(lanes if a == lanes else scalars[lanes] for a in args))

    for lanes, scalar in scalars.items():
        for left, right in ((lanes, lanes), (lanes, scalar), (scalar, lanes)):

            @lower_builtin(function, left, right)
            def lower(context, builder, sig, args, lanes=lanes):
                a, b = (v if t == lanes else splat(builder, v) for v, t in zip(args, sig.args, strict=True))
                return generate(builder, a, b)


def _unary(function: Callable, generate: Callable, lanes: LanesType) -> None:
    """Defines an operator or built-in function of one argument: generate(builder, a) writes it."""

    @infer_global(function)  # pyright: ignore[reportOptionalCall]
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            return signature(lanes, lanes) if args == (lanes,) else None

    @lower_builtin(function, lanes)
    def lower(context, builder, sig, args):
        return generate(builder, args[0])


def _instruction(name: str) -> Callable:
    return lambda builder, *args: getattr(builder, name)(*args)


def _comparison(sign: str) -> Callable:
    return lambda builder, a, b: builder.fcmp_ordered(sign, a, b)


def call_lanewise(builder: Any, name: str, *args: Any) -> Any:
    """Calls the LLVM intrinsic whose arguments and result are all vectors of one type: "fabs", "fma"."""
    ir_type = args[0].type
    return call(builder, f"llvm.{name}.v{ir_type.count}{ir_type.element.intrinsic_name}", ir_type, *args)


for _name, _code in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _binary(_name, _instruction(_code), SCALARS)
    _binary("i" + _name, _instruction(_code), SCALARS)
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "==")):
    _binary(_name, _comparison(_sign), SCALARS, MASK)
for _name, _code in (("and_", "and_"), ("or_", "or_"), ("xor", "xor"), ("lshift", "shl"), ("rshift", "lshr")):
    _binary(_name, _instruction(_code), {BYTES: types.uint8})
    _binary("i" + _name.rstrip("_"), _instruction(_code), {BYTES: types.uint8})
    if "shift" not in _name:
        _binary(_name, _instruction(_code), {MASK: types.boolean})
        _binary("i" + _name.rstrip("_"), _instruction(_code), {MASK: types.boolean})
_unary(operator.invert, _instruction("not_"), MASK)
for _lanes in SCALARS:
    _unary(operator.neg, _instruction("fneg"), _lanes)
    _unary(abs, lambda builder, a: call_lanewise(builder, "fabs", a), _lanes)


# --- what intrinsics on arrays need ---------------------------------------------------------------------------------


def is_row(array: Any, *dtypes: Any) -> bool:
    """Whether a numba type is that of a C-contiguous 1-D array of one of these dtypes."""
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in dtypes


def element_pointer(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type, count: int = LANES
) -> Any:
    """Pointer to a vector of `count` elements of the IR type from array[index] on."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector(element, count).as_pointer())
