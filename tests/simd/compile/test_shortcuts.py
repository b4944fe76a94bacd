import operator
from itertools import product
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import extending
from numba.core import errors, types
from numba.core.compiler import Flags
from numba.core.registry import cpu_target

from ggufmill.simd.compile import intrinsic, kernel, shortcuts

SCALARS = (types.int64, types.int32, types.uint8, types.uint64, types.float32, types.float64, types.boolean, types.literal(3))


@kernel
def _sum_of_products(a, b):
    return (a * b + a).sum()


@kernel
def _squares(n):
    return [i * i for i in range(n)]


def test_kernels_with_expressions_of_arrays_and_comprehensions():
    a, b = np.arange(12, dtype=np.float32), np.full(12, 2, np.float32)
    assert _sum_of_products(a, b) == (a * b + a).sum()
    assert _squares(5) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "rshift", "lt", "eq", "iadd", "ilshift"]
)
def test_results_of_operators_have_the_types_that_numba_gives_them(name):
    context: Any = cpu_target.typing_context
    context.refresh()
    function = context.resolve_value_type(getattr(operator, name))
    found = 0
    for args in product(SCALARS, SCALARS):
        try:
            wanted = shortcuts._get_call_type(function, context, args, {})
        except errors.TypingError:  # bits of floats
            continue
        for _ in range(2):
            assert function.get_call_type(context, args, {}) == wanted
            assert function.get_impl_key(wanted) is not None
        found += 1
    assert found > 20


@pytest.mark.parametrize("name", ["i1", "i64", "vector", "struct", "pointer"])
def test_sizes_are_those_that_numba_says(name):
    bits, word, vector = ir.IntType(1), ir.IntType(64), ir.VectorType(ir.FloatType(), 16)
    struct = ir.LiteralStructType([bits, word, vector])
    ty = {"i1": bits, "i64": word, "vector": vector, "struct": struct, "pointer": word.as_pointer()}[name]
    context: Any = cpu_target.target_context
    wanted = shortcuts._get_abi_sizeof(context, ty)
    assert [context.get_abi_sizeof(ty) for _ in range(2)] == [wanted, wanted]


def test_what_is_defined_after_a_kernel_was_compiled_is_found():
    _squares(2)

    def doubled(x):
        raise NotImplementedError

    @extending.overload(doubled)
    def _doubled(x):
        return lambda x: x + x

    @intrinsic
    def seven(typing_context):
        return types.int64(), lambda context, builder, sig, args: context.get_constant(types.int64, 7)

    @kernel
    def call(x):
        return doubled(x) + seven()  # pyright: ignore[reportCallIssue]

    assert call(4) == 15


def test_flags_are_compared_by_their_values():
    one: Any = Flags()
    other: Any = Flags()
    other.nrt = one.nrt  # set to what it is by default
    assert one == other
    assert hash(one) == hash(other)
    other.nrt = not one.nrt
    assert one != other
