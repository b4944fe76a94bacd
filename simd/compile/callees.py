"""Compiling a kernel with all it calls as one module of LLVM code, which is translated to machine code once.

numba prepares each function that it compiles, also those that only other kernels call, for calls from Python: it optimises its
module, generates machine code and wrappers. A caller's module then gets a copy of it, and optimises it again. Here functions
that are called remain LLVM code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from llvmlite.binding import parse_assembly
from numba.core.bytecode import FunctionIdentity
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.environment import lookup_environment

from ..llvm import CACHE_LINE
from ..target import Target, target
from .shortcuts import passes_of_kernels

# numba tells functions of one definition (what a factory returns) apart by a number in the names of their code, which it counts
# from 1 in every process. Kernels that different processes have stored may then hold different functions of the same name, and
# where both are loaded, the linker takes the first for both. So the numbers are random.
FunctionIdentity._unique_ids = iter(lambda: uuid4().int >> 64, None)  # pyright: ignore[reportAttributeAccessIssue]

_ENVIRONMENT = "_ZN08NumbaEnv"  # how the names of those global variables begin that point to functions' constants


class _NotLoaded:
    """The code generator of a function that is not loaded: it has no variables that could be set."""

    def set_env(self, env_name: str, env: Any) -> None:
        pass


def align_stack(function: Any, of: Target) -> None:
    """Makes the stack of a function of LLVM code begin at a cache line, where vectors have 32 bytes and more.

    Those that registers do not hold are kept there, and callers align it to 16 bytes alone: in every second process (of 32
    bytes), or three of four (of 64), they lie across lines, with which products of q6_K took up to twice as long."""
    if of.has("avx2"):
        function.attributes.alignstack = CACHE_LINE
        # llvmlite writes no alignment without another attribute. Tables for unwinding (debuggers, profilers) are there anyway.
        function.attributes.add("uwtable")


class _Aligned(JITCodeLibrary):
    """The code of functions whose stacks are aligned."""

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if not function.is_declaration:
                align_stack(function, target())
        super().add_ir_module(ir_module)


class _Callee(_Aligned):
    """The code of a function, optimised together with that of what it calls, but not loaded."""

    @property
    def codegen(self) -> Any:
        return _NotLoaded()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _PlainCallee(_Callee):
    """The code of a function as numba generated it, with that of what it calls: it is optimised within its callers only."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass


class _Entry(_Aligned):
    """A function that Python or a team calls, with all that it calls."""

    def serialize_using_object_code(self) -> Any:
        """Without the LLVM code that others could link, which compile their own (see Kernel): of it numba wants the functions'
        names alone, and reading it takes longer than loading the machine code."""
        name, kind, (machine_code, _) = super().serialize_using_object_code()
        defined = (function.name for function in self._final_module.functions if not function.is_declaration)
        names = parse_assembly("".join(f'@"{function}" = constant i8 0\n' for function in defined))
        return name, kind, (machine_code, names.as_bitcode())

    def _finalize_specific(self) -> None:
        super()._finalize_specific()
        codegen: Any = self._codegen
        for variable in self._final_module.global_variables:
            environment = lookup_environment(variable.name) if variable.name.startswith(_ENVIRONMENT) else None
            if environment is not None:
                codegen.set_env(variable.name, environment)


class EntryCompiler(Compiler):
    """For kernels as Python or a team calls them."""

    library: type[JITCodeLibrary] = _Entry

    def define_pipelines(self) -> list[Any]:
        return [passes_of_kernels(self.state)]

    def _compile_core(self) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = self.library(codegen, self.state.func_id.func_qualname)
        self.state.library.enable_object_caching()
        with _callees_only(codegen):
            return super()._compile_core()


class CalleeCompiler(EntryCompiler):
    """For kernels as other kernels call them."""

    library = _Callee


class PlainCalleeCompiler(EntryCompiler):
    """For kernels as other kernels call them, in a fraction of the time. Loops that LLVM has to vectorise or unroll may become
    slower, by up to a half in encoders."""

    library = _PlainCallee


@contextmanager
def _callees_only(codegen: Any) -> Iterator[None]:
    """Within this, libraries that numba makes itself, for functions of its own, are _PlainCallee."""
    outermost = "create_library" not in vars(codegen)
    if outermost:
        codegen.create_library = lambda name, **options: _PlainCallee(codegen, name, **options)
    try:
        yield
    finally:
        if outermost:
            del codegen.create_library
