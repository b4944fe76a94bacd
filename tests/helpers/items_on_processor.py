"""Work items of kernels, compiled for the processor instead of a GPU, one after the other: a process of its own, since such
code is compiled with another number of lanes. What kernels have in common it compiles once.

    with ItemProcess(lanes) as process: outputs = process.run(request, work)

The process reads pickled (request, work) and answers each with the pickled outputs.
"""

import ctypes
import os
import pickle
import subprocess
import sys
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from ggufmill.simd.cuda.compile_items import ItemRequest, compiled, environment
from ggufmill.simd.cuda.division import ItemWork
from ggufmill.simd.cuda.lowering import ITEM, item_module


@cache
def engine_of(request: bytes) -> Any:
    asked: ItemRequest = pickle.loads(request)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3, cpu=llvm.get_host_cpu_name())
    code, name = compiled(asked)
    engine = llvm.create_mcjit_compiler(item_module(code, name, asked.parameters, llvm.get_default_triple(), machine), machine)
    engine.finalize_object()
    return engine


def run(request: bytes, work: ItemWork) -> list[np.ndarray]:
    engine = engine_of(request)
    given = [ctypes.c_int64] * 2 + [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64] * len(work.arrays)
    item = ctypes.CFUNCTYPE(None, *given)(engine.get_function_address(ITEM))
    arrays = [np.full_like(a.values, 99) if a.written else np.ascontiguousarray(a.values) for a in work.arrays]
    passed = [v for a, values in zip(work.arrays, arrays, strict=True) for v in (values.ctypes.data, a.row_step, a.item_step)]
    for number in range(work.items):
        item(*divmod(number, work.per_row), *passed)
    return [values for a, values in zip(work.arrays, arrays, strict=True) if a.written]


class ItemProcess:
    """A process for work items of so many lanes."""

    def __init__(self, lanes: int):
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, env=environment(lanes), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, request: bytes, work: ItemWork) -> list[np.ndarray]:
        """The arrays that the items write. request: a pickled ItemRequest."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump((request, work), stdin)
        stdin.flush()
        return pickle.load(stdout)

    def __enter__(self) -> "ItemProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.terminate()


def serve() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed
    while True:
        try:
            request, work = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(run(request, work), answers)
        answers.flush()


if __name__ == "__main__":
    serve()
