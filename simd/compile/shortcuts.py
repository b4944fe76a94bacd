"""What numba does for every function that it compiles and kernels have no use for, left out or done once: a sixth of the time.

Most of the time that a kernel takes to compile is not LLVM's but that of numba's own passes, which are Python.
"""

from __future__ import annotations

import operator
from types import CodeType
from typing import Any

from numba.core import types
from numba.core.compiler import DefaultPassBuilder
from numba.core.compiler_machinery import PassManager
from numba.core.types.functions import BaseFunction

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


def passes_of_kernels(state: Any) -> PassManager:
    """numba's passes over a function; without those of _UNUSED if there is no function, or comprehension, within it."""
    all_passes = DefaultPassBuilder.define_nopython_pipeline(state)
    if any(isinstance(constant, CodeType) for constant in state.func_id.code.co_consts):
        return all_passes
    kept = PassManager(all_passes.pipeline_name)
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
        signature = _get_call_type(function, context, args, kws)
        _found[key] = signature, function._impl_keys[signature.args]
    signature, function._impl_keys[signature.args] = _found[key]
    return signature


BaseFunction.get_call_type = _get_call_type_once  # pyright: ignore[reportAttributeAccessIssue]
