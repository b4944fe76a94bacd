"""What the codes of a codebook or trellis type stand for: vectors of 2, 4 or 8 weights, and a factor for each.

weight = sign * factor * entry, as decoders compute it. The signs of a vector are part of its entry, stored next to its code, or
stored by eights with an even number of negative ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ...data_classes import dataclass
from ...formats import TYPES
from ...simd.lanes import LANES
from ...simd.memory import aligned_empty
from ..codecs.fields import BlockFields
from ..codecs.trellis.codebook import TrellisTree, join_trees
from ..codecs.trellis.iq_kt import trellis_type
from .values import GroupFields

SIGNS_IN_ENTRIES, SIGNS_FREE, SIGNS_EVEN = 0, 1, 2


@dataclass(frozen=True, eq=False)
class VectorTable:
    """The entries of a type in runs of sixteen, in one or more books.

    size     weights of an entry: 2, 4 or 8
    signs    SIGNS_IN_ENTRIES, SIGNS_FREE (stored per weight) or SIGNS_EVEN (stored by eights, an even number negative)
    books    how many sets of entries there are: one for each flag, or for each value of a trellis code's highest bit
    flagged  whether each vector has a flag of its own, so that all books are searched for it
    lanes    float32, flat: for each book and run `size` rows of sixteen values
    codes    int32 [books * entries]: book * entries + code of each entry; a trellis codebook is in the order of its tree
    numbers  int32 [books * entries], the inverse
    """

    size: int
    signs: int
    books: int
    flagged: bool
    lanes: np.ndarray
    codes: np.ndarray
    numbers: np.ndarray

    @property
    def group(self) -> int:
        """Weights that share a factor."""
        return self.size

    @property
    def entries(self) -> int:
        """Entries of one book."""
        return self.lanes.size // (self.books * self.size)


@cache
def is_vector(type_name: str) -> bool:
    """Whether the codes of a type that has an encoding of its own are numbers of vectors."""
    t = TYPES[type_name]
    if t.base is not None or t.codec is None:
        return False
    layout = BlockFields.of(type_name).layout
    return layout.number is None and layout.digits is None and layout.size > 1


@cache
def vector_table(type_name: str) -> VectorTable:
    """The table of a type for which `is_vector` holds."""
    layout, trees = BlockFields.of(type_name).layout, []
    signs = SIGNS_FREE if layout.signs is not None else SIGNS_EVEN if layout.sign_codes is not None else SIGNS_IN_ENTRIES
    if layout.trellis is None:
        shifts = layout.shifts if layout.flags is not None else (0,)
        books, values = len(shifts), layout.values[None] + np.array(shifts)[:, None, None]  # [books, entries, size]
    else:
        trees = trellis_type(type_name).codebooks
        books, values = len(trees), layout.values.reshape(len(trees), -1, layout.size)
    entries = values.shape[1]
    codes = np.arange(books * entries, dtype=np.int32)
    for book, tree in enumerate(trees):
        codes[book * entries :][:entries] = tree.order + book * entries
    numbers = np.empty_like(codes)
    numbers[codes] = np.arange(len(codes), dtype=np.int32)
    lanes = aligned_empty((values.size,), np.float32)
    lanes[:] = values.reshape(-1, layout.size)[codes].reshape(-1, LANES, layout.size).transpose(0, 2, 1).reshape(-1)
    flagged = layout.flags is not None and layout.flags.shape[-2] == layout.codes.shape[-2]
    return VectorTable(layout.size, signs, books, flagged, lanes, codes, numbers)


@cache
def trellis_tree(type_name: str) -> TrellisTree:
    """What a sweep searches trellis codebooks with; without boxes for a type whose entries are all tried."""
    return join_trees((), 0, ()) if BlockFields.of(type_name).layout.trellis is None else trellis_type(type_name).tree


@dataclass
class VectorRows(GroupFields):
    """Encoded rows of a type of vectors, taken apart; a group is a vector.

    entries       int32 [rows, vectors]: numbers in the table
    weight_signs  float32 [rows, n], 1 or -1; of no columns if signs are part of the entries
    """

    table: VectorTable
    entries: np.ndarray
    weight_signs: np.ndarray

    @classmethod
    def of(cls, q: np.ndarray, type_name: str) -> VectorRows:
        fields, table = BlockFields.of(type_name), vector_table(type_name)
        codes = fields.read(q, "codes").astype(np.int32)
        weight_signs = _read_signs(fields, table.signs, q)
        fields = replace(fields, layout=replace(fields.layout, signs=None))  # those of groups
        rows = cls(fields, codes.shape[1], **cls.read(fields, q), table=table, entries=codes, weight_signs=weight_signs)
        rows.entries = table.numbers[codes + rows.parameters()[2] * np.int32(table.entries)]
        return rows

    def values(self, groups: slice = slice(None)) -> np.ndarray:
        """float32 [rows, n]: the weights that decoders compute; groups: only those of these vectors."""
        size, entries = self.table.size, self.entries[:, groups]
        places = ((entries // LANES)[..., None] * size + np.arange(size)) * LANES + (entries % LANES)[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            values = (self.table.lanes[places] * self.parameters()[0][:, groups, None]).reshape(len(entries), -1)
        if self.weight_signs.size:
            values *= self.weight_signs.reshape(len(entries), self.groups, size)[:, groups].reshape(len(entries), -1)
        return values

    def write(self, q: np.ndarray) -> None:
        super().write(q)
        codes, fields = self.table.codes[self.entries], BlockFields.of(self.fields.type.name)
        if fields.layout.flags is not None:
            flags, codes = np.divmod(codes, self.table.entries)
            if self.table.flagged:
                fields.write(q, "flags", flags)
        fields.write(q, "codes", codes)
        if self.table.signs == SIGNS_FREE:
            fields.write(q, "signs", self.weight_signs < 0)
        elif self.table.signs == SIGNS_EVEN:
            negative = np.packbits(self.weight_signs < 0, axis=1, bitorder="little")
            fields.write(q, "sign_codes", negative & 127)


def _read_signs(fields: BlockFields, signs: int, q: np.ndarray) -> np.ndarray:
    if signs == SIGNS_IN_ENTRIES:
        return np.empty((len(q), 0), np.float32)
    if signs == SIGNS_FREE:
        return np.where(fields.read(q, "signs") > 0, np.float32(-1), np.float32(1))
    codes = fields.read(q, "sign_codes")
    negative = np.unpackbits(codes, axis=1, bitorder="little").reshape(len(q), -1, 8)
    negative[..., 7] = negative.sum(axis=2, dtype=np.uint8) & 1
    return np.where(negative.reshape(len(q), -1) > 0, np.float32(-1), np.float32(1))
