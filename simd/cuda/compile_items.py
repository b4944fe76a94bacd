"""Compiles a kernel for work items: the process that `launch` starts, with numbers of lanes and a target of its own.

    python -m ggufmill.simd.cuda.compile_items REQUEST RESULT

REQUEST: a pickled `ItemRequest`; RESULT: the file that gets the PTX.
"""

from __future__ import annotations

import os
import pickle
import sys
from importlib import import_module
from inspect import CO_VARARGS
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from .lowering import ITEM, arrays_on_stack, item_module, optimise

TRIPLE, PROCESSOR = "nvptx64-nvidia-cuda", "sm_80"  # PTX for Ampere and all that came after it
ENTRY = "items"
ENVIRONMENT = {"GGUFMILL_CPU": "portable", "NUMBA_OPT": "0", "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_DISABLE_JIT": "0"}


class ItemRequest(NamedTuple):
    """A kernel, by module and name; numba's types of its arguments; its parameters for one item (`division.ItemWork`)."""

    module: str
    name: str
    signature: tuple[Any, ...]
    parameters: tuple[Any, ...]


def environment(lanes: int) -> dict[str, str]:
    """The variables of a process that compiles for work items of so many lanes each."""
    return os.environ | ENVIRONMENT | {"GGUFMILL_LANES": str(lanes)}


def compiled(request: ItemRequest) -> tuple[str, str]:
    """The LLVM code of a kernel with all that it calls, as numba generates it, and the name of its function."""
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.types import StarArgTuple

    from ..compile import kernels
    from ..compile.callees import PlainCalleeCompiler
    from ..target import target

    arrays_on_stack()
    kernels._PLAIN_CALLEES = (kernels._PACKAGE,)  # pyright: ignore[reportAttributeAccessIssue]
    target()
    kernel = getattr(import_module(request.module), request.name)
    dispatcher = kernel._njit(pipeline_class=PlainCalleeCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    signature = request.signature
    if kernel.__wrapped__.__code__.co_flags & CO_VARARGS:
        signature = (StarArgTuple.from_types(signature),)
    dispatcher.compile(signature)
    (result,) = dispatcher.overloads.values()
    with global_compiler_lock:
        result.library._ensure_finalized()
    return str(result.library._final_module), result.fndesc.mangled_name


def ptx_of(request: ItemRequest) -> str:
    """The kernel as PTX whose entry is ENTRY(count, items per row, then as ITEM): a thread computes one item."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.set_option("", "-nvptx-fma-level=0")  # products and sums that the kernel does not fuse are not fused
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=PROCESSOR, opt=3)
    text = str(item_module(*compiled(request), request.parameters, TRIPLE, machine))
    module = llvm.parse_assembly(_with_entry(text))
    optimise(module, machine)
    return machine.emit_assembly(module)


def _with_entry(text: str) -> str:
    """The module with an entry that calls ITEM, which is made part of it, for the number of the thread."""
    start = text.index(f"define void @{ITEM}(")
    head = text[start : text.index("{", start)]
    given = [part.split()[0] + " " + part.split()[-1] for part in head[head.index("(") + 1 : head.rindex(")")].split(",")][2:]
    pointers = [part.split()[1] for part in given if part.startswith("ptr")]
    lines = []
    for pointer in pointers:  # the arrays lie in global memory
        lines += [
            f"{pointer}.global = addrspacecast ptr {pointer} to ptr addrspace(1)",
            f"{pointer}.known = addrspacecast ptr addrspace(1) {pointer}.global to ptr",
        ]
    passed = [f"ptr {part.split()[1]}.known" if part.startswith("ptr") else part for part in given]
    known = "\n  ".join(lines)
    return (
        text[:start]
        + text[start:].replace(f"define void @{ITEM}(", f"define internal void @{ITEM}(", 1)
        + f"""
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
define ptx_kernel void @{ENTRY}({", ".join(["i32 %count", "i32 %per_row", *given])}) {{
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %threads = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %before = mul i32 %block, %threads
  %number = add i32 %before, %thread
  %inside = icmp ult i32 %number, %count
  br i1 %inside, label %work, label %end
work:
  %row32 = udiv i32 %number, %per_row
  %column32 = urem i32 %number, %per_row
  %row = zext i32 %row32 to i64
  %column = zext i32 %column32 to i64
  {known}
  call void @{ITEM}({", ".join(["i64 %row", "i64 %column", *passed])}) alwaysinline
  br label %end
end:
  ret void
}}
"""
    )


def main() -> None:
    request, result = map(Path, sys.argv[1:])
    result.write_text(ptx_of(pickle.loads(request.read_bytes())))


if __name__ == "__main__":
    main()
