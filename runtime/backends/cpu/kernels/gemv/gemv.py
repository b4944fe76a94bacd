"""Matrix-vector products straight on packed weights: for generation, where every weight is read once for a token or a few.

    gemv(type_name) -> Gemv | None

A Gemv's `address` is a part for programs of team.py. Its argument is the address of an int64 table of FIELDS words:

    WEIGHTS, MATRIX_BYTES, ROW_BYTES   address of matrix 0, bytes from matrix to matrix (experts), bytes of a row
    ROWS, COLUMNS                      of a matrix
    SLICES                             parts that the rows of a matrix are cut into
    CODES, SCALES, SUMS                addresses of the activations as activations.quantise_run makes them; for types of floats
                                       (`activations` 0) CODES is that of float32 [n, columns] and the others are not read
    OUT, OUT_STRIDE                    address of float32 [n, OUT_STRIDE], of which the first ROWS columns are written
    JOBS                               address of int64 [jobs, 4]: MATRIX, FIRST, TOKENS, TARGET. Tokens FIRST ... of the
                                       activations times that matrix go to the rows TARGET ... of OUT
    EQUAL_SLICES                       number of slices of one size, a divisor of SLICES: the first EQUAL_SLICES share half of
                                       the rows, the next ones half of what is left, and so on; the last ones share the rest
    ONE_STREAM                         not 0: rows of one token are read one after the other, too (see `reads_one_stream`)
    SEVERAL                            a Gemv's `several`, which takes the jobs of several tokens; 0: they are taken one by one

Part number p is slice p % SLICES of job p // SLICES, so a program's PARTS is jobs * SLICES. A slice reads its weights from
memory once for all of its tokens, and for one token in several places at once (see `streams_of`). A plain product is one job; a
mixture of experts has one per expert. Large slices come first: so threads read long runs of memory in order, which is up to a
fifth faster than short ones in alternation, and the small slices at the end let them finish at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ......data_classes import dataclass
from ......formats.layouts.reader.code_layout import code_layout
from ......formats.layouts.reader.emitter import I64, PREFETCH_DISTANCE, Emitter
from ......formats.types import TYPES
from ......simd import host_cpu
from ......simd.compile import intrinsic, kernel, native_entry
from ......simd.compile.background import Unit, compiling
from ......simd.memory import CACHE_LINE, keep_alive, line_address, prefetch_lines, view
from ......simd.target import Target, target
from ......simd.team import call_part
from .block_steps import activation_block
from .float_rows import FLOATS, emit_float_product
from .rows import arranges, bytes_of_starts, emit_arrangement, emit_product, steps

(
    WEIGHTS,
    MATRIX_BYTES,
    ROW_BYTES,
    ROWS,
    COLUMNS,
    SLICES,
    CODES,
    SCALES,
    SUMS,
    OUT,
    OUT_STRIDE,
    JOBS,
    EQUAL_SLICES,
    ONE_STREAM,
    SEVERAL,
) = range(15)
FIELDS = 15
MATRIX, FIRST, TOKENS, TARGET = range(4)
_MOST_STREAMS = 4
_LEAST_STREAM_BYTES = 1 << 16  # of each of several streams: the processor takes shorter ones for one that it cannot follow
_LEAST_STEP_BYTES = 96  # of a step that is multiplied in several streams
_BLOCK_BYTES = 1 << 16  # of rows that one pass takes before the next tokens get theirs: they stay in a second-level cache


def tokens_per_pass(name: str, of: Target) -> int:
    """Most tokens that are multiplied together, in one pass over the codes of a group of rows: there is code for each number.

    Sums of eight take half of the registers of AVX-512; those of one token of floats take half of NEON's: four at a time are a
    fifth more instructions than one after the other (docs/instructions.md says how they are counted). With registers of 256
    bits sums of eight are kept in memory, which takes less than taking codes out of their bits twice (docs/experiments.md).
    LLVM takes twice as long for interleaved rows of eight tokens as of four, up to five seconds."""
    if name in FLOATS:
        return 1 if of.has("neon") else 4
    return 8 if of.vector_bits >= 256 and TYPES[name].rows == 1 else 4


def streams_of(name: str, of: Target) -> int:
    """Runs of rows, far from each other in memory, that are multiplied with one token side by side.

    A core gets more from memory of two or four streams than of one (docs/benchmarks.md), and activations are loaded once for
    all. Four where weights have eight bits or more, so that memory is all that bounds them. One where two are slower: of
    trellises, of points of grids whose numbers are written ahead, of steps of few bytes, and with registers of AVX2 and NEON,
    which hold what one stream needs."""
    if not of.has("avx512f"):
        return 1
    if name in FLOATS:
        return _MOST_STREAMS
    reader = steps(name, of)[0].reader
    if reader.bytes_ahead(of) or reader.layout.trellis is not None or reader.size < _LEAST_STEP_BYTES:
        return 1
    return _MOST_STREAMS if reader.size >= reader.rows * reader.columns else 2


@cache
def reads_one_stream() -> bool:
    """Whether this processor reads most from memory in one stream, with lines prefetched for it: Zen 5, by up to a third
    (docs/benchmarks.md). It is asked for when products are planned, since code is the same for all processors of a level."""
    return host_cpu.name() == "znver5"


@intrinsic
def _multiply(
    typingctx, name, streams, least, most, tokens, groups, group_bytes, weights, columns, codes, scales, sums, out, stride
):
    """Multiplies `streams` times so many groups of rows, those of each stream one after the other, with `least` to `most`
    tokens: literals, numbers, addresses.

    They are functions of their own: what every row needs (tables, permutations) is loaded once for all rows, which takes up to
    a sixth off short ones, and LLVM weighs it against the registers of nothing else."""
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context, builder, signature, args):
        of = target()
        end = builder.append_basic_block("multiplied")
        switch = builder.switch(args[4], end)
        for tokens in range(least.literal_value, most.literal_value + 1):
            block = builder.append_basic_block(f"tokens.{tokens}")
            switch.add_case(I64(tokens), block)
            builder.position_at_end(block)
            functions = [
                _rows_function(builder.module, of, name.literal_value, streams.literal_value, tokens, whole)
                for whole in _forms(name.literal_value)
            ]
            if len(functions) == 1:
                builder.call(functions[0], args[5:])
            else:
                columns = steps(name.literal_value, of)[0].columns
                is_whole = builder.icmp_unsigned("==", builder.urem(args[8], I64(columns)), I64(0))
                with builder.if_else(is_whole) as (then, otherwise):
                    with then:
                        builder.call(functions[0], args[5:])
                    with otherwise:
                        builder.call(functions[1], args[5:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(name, streams, least, most, *[types.int64] * 10), generate


@intrinsic
def _arrange(typingctx, name, columns, codes, to):
    """Brings a token's activations into the order of a type that `arranges`."""
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context, builder, signature, args):
        emit_arrangement(Emitter(builder), name.literal_value, *args[1:])
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(name, i64, i64, i64), generate


def _forms(name: str) -> tuple[bool, ...]:
    """Whether rows are whole steps, of the types that have a second step for the rest of rows: tables and permutations of both
    do not fit the registers, and what does not LLVM loads in every step."""
    return (True, False) if name not in FLOATS and len(steps(name, target())) > 1 else (False,)


def _rows_function(module: Any, of: Target, name: str, streams: int, tokens: int, whole: bool) -> Any:
    """A function of a module that multiplies groups of rows of a type with so many tokens: see `_multiply`."""
    stored = TYPES[name]
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [I64] * 9), module.get_unique_name(f"rows_of_{name}_{tokens}")
    )
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    count, group_bytes, first, columns, codes, scales, sums, to, stride = function.args
    with cgutils.for_range(builder, count, intp=I64) as loop:
        numbers = [builder.add(loop.index, builder.mul(count, I64(stream))) for stream in range(streams)]
        rows = [builder.add(first, builder.mul(number, group_bytes)) for number in numbers]
        outs = [builder.add(to, builder.mul(number, I64(4 * stored.rows))) for number in numbers]
        write_product(builder, of, name, tokens, rows, columns, codes, scales, sums, outs, stride, whole)
    builder.ret_void()
    return function


def write_product(
    builder: Any, of: Target, name: str, tokens: int, weights: list, columns: Any, codes: Any, scales: Any, sums: Any,
    out: list, stride: Any, whole: bool = False,
) -> None:  # fmt: skip
    """LLVM code for the products of groups of rows of a type, a stream each, with so many tokens; int64, as in the table (see
    above). weights, out: one for each stream."""
    emit = Emitter(builder, of, len(weights))
    if name in FLOATS:
        emit_float_product(emit, name, tokens, weights, columns, codes, out, stride)
    else:
        emit_product(emit, name, tokens, weights, columns, (codes, scales, sums), out, stride, whole)


def _part(
    name: str, group: int, code_bytes: int, activations: int, least: int, most: int, streams: int
) -> Callable[[int, int], None]:
    """A part of a type. group: rows that are multiplied at a time; code_bytes: of an activation; activations: per scale; least,
    most: tokens of a pass, of which `least` is 1 or 2; streams: of one token. A token's sums are the same with whichever
    others, and in however many streams, it is multiplied."""
    assert least == 1 or most > 2  # no pass may be left with one token
    arranged = arranges(name)
    step_columns, start_bytes = bytes_of_starts(name, target()) if arranged else (1, 0)

    def product(argument, number):
        table = view(argument, FIELDS, np.int64)
        job = view(table[JOBS] + number // table[SLICES] * 32, 4, np.int64)
        columns, n = table[COLUMNS], job[TOKENS]
        if least == 1 and n > 1 and table[SEVERAL] != 0:
            call_part(table[SEVERAL], argument, number)
            return
        groups = table[ROWS] // group
        equal = table[EQUAL_SLICES]
        halving, place = number % table[SLICES] // equal, number % equal
        left = groups >> halving
        share = left if (halving + 1) * equal == table[SLICES] else left - (left >> 1)
        start = groups - left + share * place // equal
        stop = groups - left + share * (place + 1) // equal
        token_bytes = columns * code_bytes
        codes = table[CODES] + job[FIRST] * token_bytes
        scales = table[SCALES] + job[FIRST] * (columns // activations) * 4
        sums = table[SUMS] + job[FIRST] * (columns // 16) * 2
        stride = table[OUT_STRIDE] * 4
        if arranged:
            token_bytes = columns + columns // step_columns * start_bytes
            memory = np.empty(n * token_bytes + CACHE_LINE, np.uint8)
            in_order = line_address(memory)
            for token in range(n):
                _arrange(name, columns, codes + token * columns, in_order + token * token_bytes)
            codes = in_order
        group_bytes = group * table[ROW_BYTES]
        matrix = table[WEIGHTS] + job[MATRIX] * table[MATRIX_BYTES]
        if streams > 1:
            count = (stop - start) // streams
            if n == 1 and table[ONE_STREAM] == 0 and count * group_bytes >= _LEAST_STREAM_BYTES:
                w, out = matrix + start * group_bytes, table[OUT] + job[TARGET] * stride + start * group * 4
                _multiply(name, streams, 1, 1, 1, count, group_bytes, w, columns, codes, scales, sums, out, stride)
                start += count * streams
        if table[ONE_STREAM] != 0:  # the lines of a slice that no step asks for, since steps ask for those that far ahead
            w = matrix + start * group_bytes
            for at in range(0, min(PREFETCH_DISTANCE, (stop - start) * group_bytes), CACHE_LINE):
                prefetch_lines(w + at, CACHE_LINE)
        block = max(1, _BLOCK_BYTES // group_bytes)
        for first in range(start, stop, block):
            count, t = min(block, stop - first), 0
            weights = matrix + first * group_bytes
            while t < n:
                left = n - t
                some = -(-left // -(-left // most))
                c = codes + t * token_bytes
                s = scales + t * (columns // activations) * 4
                u = sums + t * (columns // 16) * 2
                out = table[OUT] + (job[TARGET] + t) * stride + first * group * 4
                _multiply(name, 1, least, most, some, count, group_bytes, weights, columns, c, s, u, out, stride)
                t += some
        if arranged:
            keep_alive(memory)  # type: ignore[possibly-undefined]

    return product


@dataclass(frozen=True)
class Gemv:
    """The product of one type of weights.

    name         the type's
    activations  columns that share a scale of the activations, 32 or 256; 0: float32 activations
    rows         slices hold a multiple of this many rows
    columns      the row length has to be a multiple of this
    """

    name: str
    activations: int
    rows: int
    columns: int

    @property
    def address(self) -> int:
        """The address of the part, compiled or loaded at the first use. It takes jobs of one token, and hands others to the one
        that SEVERAL names: products of generated tokens start without that one."""
        return _compiled(self, several=False).address

    @property
    def several(self) -> int:
        """What SEVERAL of a table has to be, compiled or loaded at the first use; 0 if tokens are multiplied one by one."""
        return _compiled(self, several=True).address if tokens_per_pass(self.name, target()) > 1 else 0


@cache  # without a lock: who waits for a unit compiles others meanwhile, and two threads could wait for each other
def _compiled(product: Gemv, several: bool) -> Any:
    """The compiled part of a product for one token, or for several."""
    name, of = product.name, target()
    passes = (2, tokens_per_pass(name, of), 1) if several else (1, 1, streams_of(name, of))
    code_bytes, block = (1, product.activations) if product.activations else (4, 1)
    with compiling(several_unit(name) if several else gemv_unit(name)):
        return native_entry(types.void(types.int64, types.int64), _part(name, product.rows, code_bytes, block, *passes))


@cache
def gemv(type_name: str) -> Gemv | None:
    """The product for a type's name (any letter case), None if there is none."""
    stored = TYPES[type_name]
    if stored.name in FLOATS:
        return Gemv(stored.name, 0, stored.rows, FLOATS[stored.name].columns)
    layout = code_layout(stored.name)
    if layout is None or layout.digits is not None:
        return None
    activations = activation_block(layout)
    return Gemv(stored.name, activations, stored.rows, max(layout.block, activations))


def gemv_of_several(type_name: str) -> int:
    """The unit of `several_unit`."""
    product = gemv(type_name)
    return 0 if product is None else product.several


def gemv_unit(type_name: str) -> Unit:
    """What is compiled for the products of a type with one token."""
    return Unit(__name__, "gemv", type_name)


def several_unit(type_name: str) -> Unit:
    """What is compiled for those with several tokens, too."""
    return Unit(__name__, "gemv_of_several", type_name)


@kernel
def run_parts(address, argument, first, stop):
    """Calls parts first to stop - 1 of a compiled part, on this thread."""
    for number in range(first, stop):
        call_part(address, argument, number)
