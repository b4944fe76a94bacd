"""What numba does for every function that it compiles and kernels have no use for, left out, or done once in place of again and
again: more than a quarter of the time.

Most of the time that a kernel takes to compile is not LLVM's but that of numba's own passes, which are Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from types import CodeType
from typing import Any

import numpy as np
from numba.core import event, types, utils
from numba.core.base import BaseContext
from numba.core.compiler import DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.errors import NumbaNotImplementedError
from numba.core.targetconfig import TargetConfig
from numba.core.types.functions import BaseFunction
from numba.core.typing import typeof
from numba.core.typing.context import BaseContext as TypingContext
from numba.np import numpy_support

# --- passes -----------------------------------------------------------------------------------------------------------

# Of functions within functions, `with` and literal_unroll, and of expressions of whole arrays, which are as right without: each
# operation then makes an array.
_UNUSED = {
    "WithLifting",
    "InlineClosureLikes",
    "MakeFunctionToJitFunction",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "NopythonRewrites",
}


class _Passes(PassManager):
    """numba's passes, without its checks and analyses after each of them: those that need an analysis make it themselves."""

    @global_compiler_lock
    def _runPass(self, index: int, pss: Any, internal_state: Any) -> None:
        pss.analysis = self._analysis
        function = internal_state.func_id
        details = {"name": f"{pss.name()} [{function.func_qualname}]", "module": function.modname}
        with event.trigger_event("numba:run_pass", data=details):
            pss.run_initialization(internal_state)
            pss.run_pass(internal_state)
            pss.run_finalizer(internal_state)


def passes_of_kernels(state: Any) -> PassManager:
    """numba's passes over a function; without those of _UNUSED if there is no function, or comprehension, within it."""
    all_passes = DefaultPassBuilder.define_nopython_pipeline(state)
    if any(isinstance(constant, CodeType) for constant in state.func_id.code.co_consts):
        return all_passes
    kept = _Passes(all_passes.pipeline_name)
    kept.passes = [each for each in all_passes.passes if each[0].__name__ not in _UNUSED]
    kept.finalize()
    return kept


# --- types of operators' results --------------------------------------------------------------------------------------

_OPERATORS = {getattr(operator, name) for name in operator.__all__}
_NUMBERS = {types.Integer, types.Float, types.Boolean, types.IntegerLiteral, types.BooleanLiteral}
_found: dict[Any, tuple[Any, Any]] = {}  # operator and types of operands -> signature, key of what it is lowered to
_get_call_type: Any = BaseFunction.get_call_type


def _get_call_type_once(function: Any, context: Any, args: Any, kws: Any) -> Any:
    """As numba's `get_call_type`, which goes through all definitions of an operator, numpy's among them, wherever it stands,
    and again when code is generated. For numbers the result is always the same."""
    if kws or function.typing_key not in _OPERATORS or not _NUMBERS.issuperset(map(type, args)):
        return _get_call_type(function, context, args, kws)
    key = function.typing_key, *args
    if key not in _found:
        found = _get_call_type(function, context, args, kws)
        _found[key] = found, function._impl_keys[found.args]
    found, function._impl_keys[found.args] = _found[key]
    return found


# --- what is asked again and again ------------------------------------------------------------------------------------

_sizes: dict[Any, int] = {}
_get_abi_sizeof: Any = BaseContext.get_abi_sizeof


def _get_abi_sizeof_once(context: Any, ty: Any) -> int:
    """As numba's, which has LLVM parse a module of one variable for the size of each variable of a kernel."""
    if ty not in _sizes:
        _sizes[ty] = _get_abi_sizeof(context, ty)
    return _sizes[ty]


def _if_anything_is_new(refresh: Callable[[Any], None], *lists: str) -> Callable[[Any], None]:
    """`refresh` of a context, which goes through all registries at each call of an intrinsic, where a list has grown."""
    seen: dict[int, int] = {}

    def refresh_if_new(context: Any) -> None:
        count = sum(len(getattr(registry, name, ())) for registry in context._registries for name in lists)
        if seen.get(id(context._registries)) != count:
            refresh(context)  # which may enter more
            seen[id(context._registries)] = count
        elif isinstance(context, BaseContext):
            context.typing_context.refresh()

    return refresh_if_new


def _is_same(flags: TargetConfig, other: object) -> bool:
    """As numba compares flags, by all their values; most often they are one object, or the same values were set."""
    if not isinstance(other, TargetConfig):
        return NotImplemented
    return flags is other or flags._values == other._values or flags.values() == other.values()


def _hash(flags: TargetConfig) -> int:
    """numba's is that of the options' names, after reading all values."""
    return hash(type(flags))


# --- types of arguments -----------------------------------------------------------------------------------------------

_typeof_array: Any = typeof.typeof_impl.dispatch(np.ndarray)


def _typeof_array_unmasked(array: np.ndarray, context: Any) -> Any:
    """As numba's, which imports `numpy.ma`, for 20 ms, to say that a masked array is none that it knows."""
    if type(array) is not np.ndarray:
        return _typeof_array(array, context)
    try:
        dtype = numpy_support.from_dtype(array.dtype)
    except NumbaNotImplementedError:
        return _typeof_array(array, context)
    return types.Array(dtype, array.ndim, numpy_support.map_layout(array), readonly=not array.flags.writeable)


_IMPLEMENTATIONS = ("functions", "getattrs", "setattrs", "casts", "constants")
_DECLARATIONS = ("functions", "attributes", "globals")
for owner, name, function in (
    (BaseFunction, "get_call_type", _get_call_type_once),
    (BaseContext, "get_abi_sizeof", _get_abi_sizeof_once),
    (BaseContext, "refresh", _if_anything_is_new(BaseContext.refresh, *_IMPLEMENTATIONS)),
    (TypingContext, "refresh", _if_anything_is_new(TypingContext.refresh, *_DECLARATIONS)),
    (TargetConfig, "__eq__", _is_same),
    (TargetConfig, "__hash__", _hash),
    (utils, "pysignature", lru_cache(1024)(signature)),  # of the same few functions, at each call of an intrinsic
):
    setattr(owner, name, function)
typeof.typeof_impl.register(np.ndarray, _typeof_array_unmasked)
