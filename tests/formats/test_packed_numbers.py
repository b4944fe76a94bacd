"""Numbers that LLVM code takes out of the bits of blocks, against the bits."""

import numba
import numpy as np
import pytest
from guarded_memory import guarded

from ggufmill.formats import TYPES
from ggufmill.formats.layouts.reader.code_layout import code_layout
from ggufmill.formats.layouts.reader.emitter import I16, LANES, Emitter, constant
from ggufmill.formats.layouts.reader.packed_numbers import bits_of_word, lowest_bits_of_words
from ggufmill.simd.compile import intrinsic
from ggufmill.simd.target import target, target_at

NATURAL = np.arange(LANES)
ORDERS = NATURAL, np.concatenate([NATURAL[::2], NATURAL[1::2]]), np.random.default_rng(0).permutation(LANES)


def cases() -> list[tuple[str, str, np.ndarray]]:
    """(type, field, int [16, width] of bit addresses): of runs of 16 columns of plain types with blocks of 256."""
    found = []
    for name, stored in TYPES.items():
        layout = code_layout(name) if stored.rows == 1 else None
        if layout is None or layout.block != 256:
            continue
        for field in ("scales", "minima", "flags", "scale_signs"):
            if (bits := getattr(layout, field)) is not None:
                found += [(name, field, bits[0][order * 16 // layout.group]) for order in ORDERS]
    return found


def written(level: str):
    """write(block, out, case): the numbers of every case of blocks that begin at an address, 32 bytes each."""

    @intrinsic
    def write(typingctx, block, out, type_number):
        def code(context, builder, signature, args):
            emit = Emitter(builder, target_at(level))
            names = list(dict.fromkeys(name for name, *_ in cases()))
            end = builder.append_basic_block("end")
            switch = builder.switch(args[2], end)
            for number, name in enumerate(names):
                switch.add_case(args[2].type(number), case := builder.append_basic_block(name))
                builder.position_at_end(case)
                for i, (_, field, bits) in enumerate([case for case in cases() if case[0] == name]):
                    emit.store(args[1], 32 * i, _numbers(emit, name, field, args[0], bits))
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64, numba.types.int64, numba.types.int64), code

    @numba.njit
    def call(block, out, type_number):
        write(block, out, type_number)

    return call


def _numbers(emit, name, field, block, bits):
    if code_layout(name).gray_words:
        return lowest_bits_of_words(emit, block, bits, I16)
    size = TYPES[name].block_bytes
    if bits.shape[1] > 1 or (are_set := bits_of_word(emit, block, bits[:, 0], size)) is None:
        return emit.numbers(block, bits, size, I16)
    return emit.builder.select(are_set, constant(I16, [1] * LANES), constant(I16, [0] * LANES))


@pytest.mark.parametrize("level", target().levels)
def test_numbers_of_groups(level):
    """All fields of scales, in any order, and nothing beside the block is read."""
    call, rng = written(level), np.random.default_rng(1)
    for number, name in enumerate(dict.fromkeys(name for name, *_ in cases())):
        block = rng.integers(0, 256, TYPES[name].block_bytes, np.uint8)
        of_type = [bits for other, _, bits in cases() if other == name]
        every = np.unpackbits(block, bitorder="little").astype(np.int64)
        expected = [(every[bits] << np.arange(bits.shape[1])).sum(axis=1) for bits in of_type]
        for at_start in (False, True):
            given, out = guarded(block, at_start), np.zeros((len(of_type), LANES), np.int16)
            call(given.ctypes.data, out.ctypes.data, number)
            assert np.array_equal(out, expected), name
