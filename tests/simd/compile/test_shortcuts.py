import operator
from itertools import product
from typing import Any

import numpy as np
import pytest
from numba.core import errors, types
from numba.core.registry import cpu_target

from ggufmill.simd.compile import kernel, shortcuts

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
