"""32-bit words at any byte address, from inside a kernel: arrays would need alignment, or a multiplication per access."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_WORD = ir.IntType(32)


def _load(typingctx, address):
    def build(context, builder, signature, args):
        word = builder.load(builder.inttoptr(args[0], _WORD.as_pointer()))
        word.align = 1
        return word

    return types.uint32(types.uint64), build


def _store(typingctx, address, word):
    def build(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32), build


# In kernels only: load_word(address: uint64) -> uint32, store_word(address: uint64, word: uint32). Addresses are not checked.
load_word: Any = intrinsic(_load)
store_word: Any = intrinsic(_store)
