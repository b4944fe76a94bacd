"""Functions of C, called one after the other without Python."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from ..compile import intrinsic, kernel
from ..llvm import I32, I64


@intrinsic
def _call(typingctx, address, a, b, c, d, e, f, g, h, i, j, k):
    """Calls the function at an address with whole numbers and addresses, of which it may take fewer -> int32."""

    def generate(context, builder, signature, args):
        function = ir.FunctionType(I32, [I64] * 11)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.int32(*[types.int64] * 12), generate


@kernel
def make_calls(calls):
    """calls: int64 [calls, 13], see `launch.CallList` -> 0, or the first answer that is an error: no call is made after it."""
    for n in range(calls.shape[0]):
        r = calls[n]
        answer = _call(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11])
        if r[12] and answer:
            return answer
    return np.int32(0)
