"""A kernel's LLVM code, as numba generates it, made into code for one work item.

What such code takes from numba's runtime becomes plain memory: arrays that a kernel makes are on its stack, references are not
counted. For that all functions are made one, so that the size of every array is a number. Arrays that are made in a loop are
the same memory in each round.
"""

from __future__ import annotations

import re
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np import arrayobj

from ..llvm import I64
from .division import ItemArray, ItemScratch

STACK_MEMORY = "stack_memory"  # stands for an array's memory until its size is known
ITEM = "item"  # the function of one work item
_ROUNDS = 4  # of optimisation, at most, until all sizes are known

_RUNTIME = """
define internal void @NRT_incref(ptr %p) alwaysinline {
  ret void
}
define internal void @NRT_decref(ptr %p) alwaysinline {
  ret void
}
define internal i32 @numba_attempt_nocopy_reshape(i64 %nd, ptr %dims, ptr %strides, i64 %newnd, ptr %newdims,
                                                  ptr %newstrides, i64 %itemsize, i32 %fortran) alwaysinline {
  %last = sub i64 %newnd, 1
  br label %loop
loop:
  %i = phi i64 [ %last, %0 ], [ %next, %loop ]
  %stride = phi i64 [ %itemsize, %0 ], [ %wider, %loop ]
  %to = getelementptr i64, ptr %newstrides, i64 %i
  store i64 %stride, ptr %to
  %from = getelementptr i64, ptr %newdims, i64 %i
  %dim = load i64, ptr %from
  %wider = mul i64 %stride, %dim
  %next = sub i64 %i, 1
  %more = icmp sge i64 %next, 0
  br i1 %more, label %loop, label %done
done:
  ret i32 1
}
"""
_INTRINSICS = {"sqrtf": "llvm.sqrt.f32", "sqrt": "llvm.sqrt.f64"}  # of the C library, as numba calls them
_REPLACED = ("NRT_incref", "NRT_decref", "nrt_atomic_sub", "nrt_atomic_add", "numba_attempt_nocopy_reshape")


def arrays_on_stack() -> None:
    """From now on kernels that this process compiles have their arrays in STACK_MEMORY, which counts no references."""

    def empty(context: Any, builder: Any, array_type: Any, shapes: Any) -> Any:
        array = arrayobj.make_array(array_type)(context, builder)
        item_size, count = I64(arrayobj.get_itemsize(context, array_type)), I64(1)
        strides, stride = [], item_size
        for size in reversed(shapes):
            strides.insert(0, stride)
            stride, count = builder.mul(stride, size), builder.mul(count, size)
        memory = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.IntType(8).as_pointer(), [I64]), STACK_MEMORY
        )
        data = builder.call(memory, [builder.mul(count, item_size)])
        word = context.get_value_type(types.intp)
        arrayobj.populate_array(
            array, data=builder.bitcast(data, context.get_data_type(array_type.dtype).as_pointer()),
            shape=cgutils.pack_array(builder, shapes, ty=word), strides=cgutils.pack_array(builder, strides, ty=word),
            itemsize=item_size, meminfo=None,
        )  # fmt: skip
        return array

    arrayobj._empty_nd_impl = empty  # pyright: ignore[reportAttributeAccessIssue]


class _ItemCall:
    """The function ITEM, written while the kernel's parameters are gone through.

    @item(i64 row, i64 column, then for each array on the device: its address, the bytes from row to row and from item to item)
    """

    def __init__(self, kernel: str, parameters: tuple[Any, ...]):
        self.tables: list[str] = []
        self._allocated, self._before, self._given = ["%result = alloca [16 x i64]", "%error = alloca ptr"], [], []
        self._addresses: dict[int, None] = {}
        for parameter in parameters:
            self._add(parameter)
        arguments = [f"ptr %p{n}, i64 %r{n}, i64 %s{n}" for n in sorted(self._addresses)]
        lines = "\n  ".join([*self._allocated, *self._before])
        self.text = f"""
define void @{ITEM}({", ".join(["i64 %row", "i64 %column", *arguments])}) {{
  {lines}
  %status = call i32 @{kernel}(ptr %result, ptr %error, {", ".join(self._given)})
  ret void
}}
"""

    def _array(self, pointer: str, shape: tuple[int, ...], item_size: int) -> None:
        steps, step = [], item_size
        for n in reversed(shape):
            steps.insert(0, step)
            step *= n
        self._given += ["ptr null", "ptr null", f"i64 {step // item_size}", f"i64 {item_size}", f"ptr {pointer}"]
        self._given += [f"i64 {n}" for n in (*shape, *steps)]

    def _add(self, value: Any) -> None:
        if isinstance(value, ItemArray):
            n = value.place
            self._addresses[n] = None
            self._before += [
                f"%x{n} = mul i64 %row, %r{n}",
                f"%y{n} = mul i64 %column, %s{n}",
                f"%z{n} = add i64 %x{n}, %y{n}",
                f"%a{n} = getelementptr i8, ptr %p{n}, i64 %z{n}",
            ]
            if value.is_aligned:  # then GPUs load four floats at a time
                self._before.append(f'call void @llvm.assume(i1 true) ["align"(ptr %a{n}, i64 16)]')
            self._array(f"%a{n}", value.shape, np.dtype(value.dtype).itemsize)
        elif isinstance(value, ItemScratch):
            n = len(self._allocated)
            self._allocated.append(f"%m{n} = alloca [{value.size} x i8], align 16")
            self._before.append(f"call void @llvm.memset.p0.i64(ptr align 16 %m{n}, i8 0, i64 {value.size}, i1 false)")
            self._array(f"%m{n}", (value.size,), 1)
        elif isinstance(value, np.ndarray):
            name = f"@table{len(self.tables)}"
            data = "".join(f"\\{byte:02X}" for byte in np.ascontiguousarray(value).tobytes())
            self.tables.append(f'{name} = internal constant [{value.nbytes} x i8] c"{data}", align 16')
            self._array(name, value.shape, value.itemsize)
        elif isinstance(value, tuple):
            for each in value:
                self._add(each)
        elif np.asarray(value).dtype == bool:
            self._given.append(f"i8 {int(value)}")
        elif isinstance(value, int):
            self._given.append(f"i64 {value}")
        else:
            kind = "float" if np.asarray(value).dtype == np.float32 else "double"
            self._given.append(f"{kind} 0x{np.float64(value).view(np.uint64).item():016X}")


def item_module(code: str, kernel: str, parameters: tuple[Any, ...], triple: str, machine: Any) -> Any:
    """The module of the function ITEM, optimised, for a target machine.

    code        LLVM code of a kernel and all that it calls, compiled after `arrays_on_stack`
    kernel      the name of its function
    parameters  as `division.ItemWork` has them
    """
    for name in _REPLACED:
        code = re.sub(rf"^define [^\n]*@{name}\(.*?^}}\n", "", code, flags=re.M | re.S)
        code = re.sub(rf"^declare [^\n]*@{name}\([^\n]*\n", "", code, flags=re.M)
    for name, intrinsic in _INTRINSICS.items():
        code = re.sub(rf"@{name}\(", f"@{intrinsic}(", code)
    code = re.sub(r"^target (?:triple|datalayout).*\n", "", code, flags=re.M)
    code = re.sub(r"^define (?:linkonce_odr |weak_odr )?(?!internal)", "define internal ", code, flags=re.M)
    code = re.sub(r"^(@\S+ = )(?:common |linkonce )(?=global)", r"\1internal ", code, flags=re.M)
    code = re.sub(
        rf"^declare ptr @{STACK_MEMORY}\(i64\).*",
        f"declare noalias ptr @{STACK_MEMORY}(i64) nounwind willreturn memory(inaccessiblemem: readwrite)",
        code,
        flags=re.M,
    )
    call = _ItemCall(kernel, parameters)
    for declared in ("void @llvm.memset.p0.i64(ptr, i8, i64, i1)", "void @llvm.assume(i1)"):
        if declared.partition("(")[0].partition(" ")[2] + "(" not in code:
            code += f"\ndeclare {declared}\n"
    layout = str(machine.target_data)
    module = llvm.parse_assembly(
        f'target triple = "{triple}"\ntarget datalayout = "{layout}"\n' + "\n".join([code, _RUNTIME, *call.tables, call.text])
    )
    for function in module.functions:
        if not function.is_declaration and function.name != ITEM:
            function.add_function_attribute("alwaysinline")
    optimise(module, machine)
    for _ in range(_ROUNDS):
        text = _with_known_sizes(str(module))
        module = llvm.parse_assembly(text)
        optimise(module, machine)
        if f"@{STACK_MEMORY}(" not in str(module):
            break
    else:
        raise AssertionError(f"{kernel}: the size of an array that it makes is not known when it is compiled")
    called = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    assert not called, f"{kernel} calls {', '.join(called)}"
    return module


def optimise(module: Any, machine: Any) -> None:
    """LLVM's passes of the highest level, without vectors of its own."""
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _with_known_sizes(text: str) -> str:
    """The module with memory on the stack for each array whose size is a number by now."""
    start = text.index(f"define void @{ITEM}(")
    end = text.index("\n}\n", start)
    body, allocated = text[start:end], []

    def found(call: re.Match) -> str:
        allocated.append(f"  {call[1]} = alloca [{call[2]} x i8], align 16\n")
        return ""

    body = re.sub(rf"^ +(%\S+) = (?:tail )?call (?:noalias )?ptr @{STACK_MEMORY}\(i64 (\d+)\).*\n", found, body, flags=re.M)
    first = body.index("{\n") + 2
    if re.match(r"\S+:", body[first:]):  # the label of the first block
        first = body.index("\n", first) + 1
    return text[:start] + body[:first] + "".join(allocated) + body[first:] + text[end:]
