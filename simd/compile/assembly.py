"""Assembly of pieces of LLVM code for any processor, whether or not it is the one at hand: for tests and for counting
instructions.

Code is optimised as numba does it (LLVM's level 3, loops vectorised), except that loops are not unrolled, so that the body of a
loop is one step of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from ..llvm import I64
from ..target import Target

_TRIPLES = {"aarch64": "aarch64-unknown-linux-gnu", "x86_64": "x86_64-unknown-linux-gnu"}
_LABEL = re.compile(r"(\.\w+):")
_BACK = re.compile(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s.*?(\.\w+)$")


def assembly(of: Target, write: Callable[..., None], arguments: int) -> str:
    """The assembly of a function of int64 arguments whose body write(builder, *arguments) writes."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = _TRIPLES[of.architecture]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), "piece")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    write(builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu=of.cpu, features=of.flags, opt=3, reloc="static", codemodel="jitdefault", jit=True
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options: Any = llvm.create_pipeline_tuning_options(3)
    options.loop_vectorization, options.slp_vectorization, options.loop_unrolling = True, False, False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


class Instruction(NamedTuple):
    """One line of assembly: the mnemonic and, as text, its operands."""

    name: str
    operands: str

    @property
    def uses_stack(self) -> bool:
        """Whether it reads or writes memory relative to the stack pointer."""
        return bool(re.search(r"\[sp\b|\(%rsp\b|\[rsp\b", self.operands))

    @property
    def is_call(self) -> bool:
        return self.name in ("bl", "blr", "call", "callq")


def loops(text: str) -> list[list[Instruction]]:
    """The instructions of every loop of an assembly, in its order: from a label to the last jump back to it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for line in text.splitlines():
        code = line.strip()
        if label := _LABEL.match(code):
            labels[label[1]] = len(instructions)
        elif line[:1].isspace() and code and code[0] not in "./#@":
            name, _, operands = code.partition("\t")
            instructions.append(Instruction(name, operands))
            back = _BACK.match(code)
            if back and back[1] in labels:
                ends[back[1]] = len(instructions)
    return [instructions[labels[label] : end] for label, end in sorted(ends.items(), key=lambda item: labels[item[0]])]
