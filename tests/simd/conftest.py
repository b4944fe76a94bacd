"""Pieces of LLVM code as functions on numpy arrays, and as assembly for an ARM processor."""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir

from ggufmill.simd.compile import intrinsic
from ggufmill.simd.llvm import I64, load, store

_compiled: dict[str, Callable] = {}  # by their code: cases of a test differ in numbers only


def _run(generate, result: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
    """Fills `result` with what generate(builder, *vectors) makes of arrays, each of them read as one vector of its dtype."""
    ir_types = [ir.VectorType(_element(array), array.size) for array in arrays]

    key = str(_module(generate, ir_types))
    if key not in _compiled:
        _compiled[key] = _compile(generate, ir_types)
    _compiled[key](result.ctypes.data, tuple(array.ctypes.data for array in arrays))
    return result


def _compile(generate, ir_types: list[ir.Type]) -> Callable:
    @intrinsic
    def piece(typingctx, out, inputs):
        def code(context, builder, signature, args):
            vectors = [load(builder, builder.extract_value(args[1], i), ir_type) for i, ir_type in enumerate(ir_types)]
            store(builder, generate(builder, *vectors), args[0])
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64, inputs), code

    @numba.njit  # not cached on disk: its code differs from test to test
    def call(out, inputs):
        piece(out, inputs)

    return call


def _element(array: np.ndarray) -> ir.Type:
    if array.dtype.kind == "f":
        return {4: ir.FloatType(), 8: ir.DoubleType()}[array.itemsize]
    return ir.IntType(8 * array.itemsize)


def _module(generate, ir_types) -> ir.Module:
    """A function that stores generate(builder, *vectors), the vectors loaded from memory."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (1 + len(ir_types))), "piece")
    builder = ir.IRBuilder(function.append_basic_block())
    vectors = [load(builder, arg, ir_type) for arg, ir_type in zip(function.args[1:], ir_types, strict=True)]
    store(builder, generate(builder, *vectors), function.args[0])
    builder.ret_void()
    return module


def _arm_assembly(generate, features: str, *ir_types: ir.Type) -> str:
    """The aarch64 assembly of that function."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = _module(generate, ir_types)
    module.triple = "aarch64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu="generic", features=features, opt=2)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return machine.emit_assembly(parsed)


@pytest.fixture
def run_piece():
    return _run


@pytest.fixture
def arm_assembly():
    return _arm_assembly
