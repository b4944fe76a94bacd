"""Work items of a kernel, compiled for the processor instead of a GPU, one after the other: a process of its own.

python items_on_processor.py CALLS    a pickled list of (pickled ItemRequest, ItemWork); the file gets their outputs
"""

import ctypes
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from ggufmill.simd.cuda.compile_items import ItemRequest, compiled
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


if __name__ == "__main__":
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    path = Path(sys.argv[1])
    path.write_bytes(pickle.dumps([run(*call) for call in pickle.loads(path.read_bytes())]))
