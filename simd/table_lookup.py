"""Look-ups in tables of 16, 32 or 64 floats inside kernels, sixteen at a time (see permute.py for how).

Tables are float32 rows, padded where an entry is not used.
"""

from __future__ import annotations

from numba.core import types

from .compile import intrinsic
from .instructions.permute import floats_at, looks_up_floats, lookup_floats
from .lane_types import F32, LANES, element_pointer, is_row
from .llvm import F32 as FLOAT
from .llvm import I8, I32X16, I64, constant, shuffle, vector
from .target import target

_BYTES = vector(I8, LANES)


def _load_table(context, builder, array_type, array, entries):
    """A table as vectors of sixteen floats."""
    pointers = [element_pointer(context, builder, array_type, array, I64(i), FLOAT) for i in range(0, entries, LANES)]
    return [builder.load(pointer, align=4) for pointer in pointers]


def _looked_up(context, builder, array_type, array, entries, indices):
    """Lane l: entry indices[l] of a table."""
    if looks_up_floats():
        return lookup_floats(builder, _load_table(context, builder, array_type, array, entries), indices)
    first = element_pointer(context, builder, array_type, array, I64(0), FLOAT)
    return floats_at(builder, builder.bitcast(first, FLOAT.as_pointer()), indices)


def _count_at_most(builder, numbers, y, entries):
    """How many of the first entries - 1 ascending numbers are <= y, per lane."""
    count = constant(I32X16, 0)
    if target().has("avx512f"):  # a look-up is one instruction: binary search
        step = entries // 2
        while step:
            middle = lookup_floats(builder, numbers, builder.add(count, constant(I32X16, step - 1)))
            above = builder.fcmp_ordered(">=", y, middle)
            count = builder.select(above, builder.add(count, constant(I32X16, step)), count)
            step //= 2
        return count
    for k in range(entries - 1):
        number = shuffle(builder, numbers[k // LANES], None, [k % LANES] * LANES)
        count = builder.add(count, builder.zext(builder.fcmp_ordered(">=", y, number), I32X16))
    return count


def _nearest_entry(entries):
    @intrinsic
    def nearest_entry(typingctx, y, midpoints, table, codes, index):
        """The table entry nearest to y (float32 lanes), the larger one of two; its number goes to codes[index + l] for lane l.

        midpoints: of the table's entries, ascending, infinity where an entry is not used.
        """

        def generate(context, builder, signature, args):
            _, midpoints, table, codes, _ = signature.args
            indices = _count_at_most(builder, _load_table(context, builder, midpoints, args[1], entries), args[0], entries)
            pointer = element_pointer(context, builder, codes, args[3], args[4], I8)
            builder.store(builder.trunc(indices, _BYTES), pointer, align=1)
            return _looked_up(context, builder, table, args[2], entries, indices)

        return F32(F32, midpoints, table, codes, types.intp), generate

    return nearest_entry


nearest_entry16, nearest_entry32, nearest_entry64 = map(_nearest_entry, (16, 32, 64))


@intrinsic
def lookup_lanes(typingctx, table, index):
    """Per lane table[index]: table a float32 row of 32 entries or more, index float32 lanes of integers 0 to 31."""
    if not is_row(table, types.float32):
        return None

    def generate(context, builder, signature, args):
        return _looked_up(context, builder, signature.args[0], args[0], 32, builder.fptosi(args[1], I32X16))

    return F32(table, F32), generate
