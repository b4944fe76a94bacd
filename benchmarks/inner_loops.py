"""The inner loops of matrix products as instructions, for any processor: what `instructions.py` counts, and what
tests/runtime/backends/cpu/kernels/test_inner_loops.py looks at.

Code is optimised as numba does it (LLVM's level 3, loops vectorised), except that loops are not unrolled, so that the body of a
loop is one step of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from ggufmill.formats.layouts.reader.emitter import BYTES
from ggufmill.formats.types import TYPES
from ggufmill.runtime.backends.cpu.kernels.gemm import byte_tiles, vector_products
from ggufmill.runtime.backends.cpu.kernels.gemm.float_panels import STEP, write_transposed
from ggufmill.runtime.backends.cpu.kernels.gemm.unpack_panels import write_numbers
from ggufmill.runtime.backends.cpu.kernels.gemv.float_rows import FLOATS
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import write_product
from ggufmill.runtime.backends.cpu.kernels.gemv.rows import steps
from ggufmill.simd.compile.callees import align_stack
from ggufmill.simd.llvm import I1, I64, LANES, loop
from ggufmill.simd.target import Target

FLOAT_COLUMNS = 64  # of a step along a row of floats
_TRIPLES = {"aarch64": "aarch64-unknown-linux-gnu", "x86_64": "x86_64-unknown-linux-gnu"}
_BROADCASTS = ("vbroadcast", "vpbroadcastd", "vpbroadcastq")
# As measured on Zen 4, pairs of instructions that do not wait for each other (docs/instructions.md).
_SHUFFLES = (
    *("vperm", "vpshuf", "vshuf", "vpunpck", "vunpck", "vpmovzx", "vpmovsx", "vpmovd", "vpmovq", "vpmovw", "vpack", "vinsert"),
    *("vextract", "vbroadcast", "vpbroadcast", "vpinsr", "vmovhps", "vmovddup", "vmovsldup", "vmovshdup", "valign", "vcvtph"),
)
_MULTIPLIES = (
    *("vpdp", "vpmadd", "vpmul", "vmul", "vfm", "vfnm", "vptest", "vpcmp", "vpmovb2m", "vpmovw2m", "vpshufbit", "vprol"),
    *("vpror", "vpabs", "vpsad"),
)
_LABEL = re.compile(r"(\.\w+):")
_BACK = re.compile(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s.*?(\.\w+)$")


def assembly(of: Target, write: Callable[..., None], arguments: int) -> str:
    """The assembly of a function of int64 arguments whose body write(builder, *arguments) writes."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = _TRIPLES[of.architecture]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), "piece")
    align_stack(function, of)
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
    def is_vector(self) -> bool:
        """Whether it works on vector registers of x86; a load, a store or a copy does not, but under a mask."""
        return "%xmm" in (wide := re.sub("%[yz]mm", "%xmm", self.operands)) and (
            not self.name.startswith("vmov") or "{%k" in wide
        )

    @property
    def slots(self) -> int:
        """Of the four vector units of 256 bits that Zen 4 has how many it takes for a cycle; 0 for no vector instruction, and
        for loads of one element to all lanes and for zeros."""
        is_load = self.name.startswith(_BROADCASTS) and "(" in self.operands
        is_zero = "xor" in self.name and len(set(self.operands.split(", "))) == 1
        if not self.is_vector or is_load or is_zero:
            return 0
        return 2 if "%zmm" in self.operands else 1

    @property
    def is_shuffle(self) -> bool:
        """Whether only two of these units execute it, those of permutations."""
        return self.name.startswith(_SHUFFLES) and not self.name.startswith("vpshufbit")

    @property
    def is_multiply(self) -> bool:
        """Whether only two of these units execute it, those of products, one of which is one of permutations, too."""
        return self.name.startswith(_MULTIPLIES)

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


class InnerLoop(NamedTuple):
    """The instructions of one iteration, and the products (or weights, where they are only unpacked) that they are for."""

    instructions: list[Instruction]
    products: int

    def per(self, products: int) -> float:
        """Instructions for so many products."""
        return len(self.instructions) * products / self.products

    @property
    def names(self) -> set[str]:
        return {instruction.name for instruction in self.instructions}


def gemv_loop(of: Target, type_name: str, tokens: int = 1) -> InnerLoop:
    """The step along a row, or along a group of interleaved rows."""

    def write(b: Any, weights, columns, codes, scales, sums, out, stride) -> None:
        write_product(b, of, type_name, tokens, [weights], columns, codes, scales, sums, [out], stride)

    text = assembly(of, write, 7)
    found, products = loops(text), TYPES[type_name].rows * tokens
    if type_name in FLOATS:
        return InnerLoop(max(found, key=len), FLOAT_COLUMNS * products)
    reader = steps(type_name, of)[0].reader
    if not (runs := reader.runs_looked_up(of) if reader.bytes_ahead(of) else 0):
        return InnerLoop(max(found, key=len), reader.columns * products)
    at = found.index(max(found, key=len))  # which writes numbers of points, looks them up, several steps at a time, multiplies
    times, (written, looked_up, multiplied) = BYTES * runs // reader.bytes_ahead(of), found[at + 1 : at + 4]
    return InnerLoop(times * (written + multiplied) + looked_up, times * reader.columns * products)


def byte_tile_loop(of: Target, group: int, has_terms: bool, most: int) -> InnerLoop:
    """A block of 32 columns of a tile of codes up to `most`; group: columns that share a scale."""
    pairs = byte_tiles.pair_sums(most, of)

    def write(b: Any, codes, scales, terms, *rest) -> None:
        *others, first = rest
        byte_tiles.write_tile(
            b, of, False, group, max(byte_tiles.BLOCK, group), None if pairs is None else len(pairs), codes, scales,
            terms if has_terms else None, *others, b.trunc(first, I1),
        )  # fmt: skip

    tile = of.choose(byte_tiles.TILES)
    bodies = sorted((body for body in loops(assembly(of, write, 12)) if _multiplies_integers(body)), key=len)
    instructions, inner = bodies[0], bodies[:-1]
    if inner and (tile.rolled or pairs is not None):  # loops over the columns of each group, or of what fits 16 bits
        columns = 2 if pairs == () else tile.columns
        times = byte_tiles.BLOCK // columns // len(inner)
        instructions = bodies[-1] + (times - 1) * [i for body in inner for i in body]
    return InnerLoop(instructions, byte_tiles.BLOCK * tile.panels * tile.rows * tile.tokens)


def _multiplies_integers(body: list[Instruction]) -> bool:
    return any(instruction.name.startswith(("sdot", "usmmla", "smull", "vpdp", "vpmadd")) for instruction in body)


def float_tile_loop(of: Target) -> InnerLoop:
    """32 columns of a tile of float32."""
    panels, tokens = of.choose(vector_products.TILES)

    def write(b: Any, weights, weight_step, row, sums, count, first) -> None:
        vector_products.write_tile(b, of, False, False, weights, weight_step, row, sums, count, b.trunc(first, I1))

    text = assembly(of, write, 6)
    return InnerLoop(max(loops(text), key=len), STEP * LANES * panels * tokens)


def unpack_loop(of: Target, type_name: str) -> InnerLoop:
    """A step of a row, whose numbers are transposed to panels of bytes afterwards, or of a group of interleaved rows, whose
    numbers go to their places at once."""
    step, stored = steps(type_name, of)[0], TYPES[type_name]

    def write(b: Any, source, row_head, codes, scales, terms, count) -> None:
        def one(i: Any) -> None:
            at, to = b.add(source, b.mul(i, I64(step.reader.size))), b.add(codes, b.mul(i, I64(step.columns * LANES)))
            numbers = [b.add(place, b.mul(i, I64(step.columns * 4))) for place in (scales, terms)]
            write_numbers(b, of, type_name, 0, at, row_head, to, *numbers)

        loop(b, count, one)

    return InnerLoop(max(loops(assembly(of, write, 6)), key=len), step.columns * stored.rows)


def float_panel_loop(of: Target, type_name: str) -> InnerLoop:
    """32 columns of sixteen rows of f32, f16 or bf16, written to a panel of float32."""

    def write(b: Any, source, row_bytes, rows, out, count) -> None:
        size = TYPES[type_name].block_bytes

        def step(i: Any) -> None:
            at, to = b.add(source, b.mul(i, I64(STEP * size))), b.add(out, b.mul(i, I64(STEP * 4 * LANES)))
            write_transposed(b, of, type_name, True, at, row_bytes, rows, to)

        loop(b, count, step)

    return InnerLoop(max(loops(assembly(of, write, 5)), key=len), STEP * LANES)
