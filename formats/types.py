"""The table of tensor types: the only place that knows their ids and sizes.

Ids and sizes are those of ik_llama.cpp and llama.cpp (ggml.h, docs/gguf.md); docs/formats/types.md explains the columns. Where
the bits of a block are is the subject of `formats.layouts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ..data_classes import dataclass
from ..errors import PlanError


def dims(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape in ne order -> (row length, rows per matrix, number of stacked matrices)."""
    columns, *rest = shape
    return columns, rest[0] if rest else 1, prod(rest[1:])


@dataclass(frozen=True, slots=True)
class TensorType:
    """The storage of a tensor type in a file.

    name        as ik_llama.cpp spells it (q4_K, q4_k_r4, q8_KV); look-ups ignore case
    id          ggml type id in a GGUF file
    ftype       value of general.file_type for a file mostly of this type; None if there is none
    block       elements per block along a row
    block_bytes bytes per block
    row_meta    bytes before the blocks of each row (the row's scale)
    rows        rows that are interleaved in a group; 1 for plain types
    imatrix     'hard': cannot be encoded without importance, 'soft': should not be, None: works without
    fallback    type used instead when the row length is not a multiple of the block: that of ik_llama.cpp where it has one,
                else of llama.cpp, else the type of least measured error (docs/formats/mixes.md)
    base        for a repacked type: the plain type whose bits it permutes
    packed      for a plain type: the repacked type of the same bits
    codec       module of quantize/codecs that encodes and decodes rows of this type; None for those that are not encoded here,
                and most that only permute the bits of their base
    """

    name: str
    id: int
    ftype: int | None
    block: int
    block_bytes: int
    row_meta: int = 0
    rows: int = 1
    imatrix: str | None = None
    fallback: str | None = None
    base: str | None = None
    packed: str | None = None
    codec: str | None = None

    def __hash__(self) -> int:  # of all fields it would take long, for a million tensors
        return hash(self.name)

    def fits(self, n: int) -> bool:
        """Whether a row of n elements is a whole number of blocks."""
        return self.block > 0 and n % self.block == 0

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n elements, row_meta included. Raises PlanError if the type cannot hold such a row."""
        block = self.block
        if block > 0 and n % block == 0:  # at first: `encode` of short rows notices
            return self.row_meta + n // block * self.block_bytes
        if not self.is_known:
            raise PlanError(f"{self.name} is an unknown type: such a tensor can be shown, but not written")
        raise PlanError(f"{self.name} needs rows of a multiple of {block} elements, not {n}")

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape (ne order: shape[0] is the row length)."""
        return self.row_bytes(shape[0]) * prod(shape[1:])

    @property
    def base_name(self) -> str:
        """The name of the plain type: that of `base` for a repacked type, else the type's own."""
        return self.base or self.name

    def repacks_to(self, other: TensorType) -> bool:
        """Whether tensors of this type become the other type without re-encoding: both are the same type or share a base."""
        return self.base_name == other.base_name

    @property
    def has_codec(self) -> bool:
        """Whether rows of this type are encoded and decoded here; tensors of other types can be shown and copied."""
        return self.codec is not None or self.base is not None

    @property
    def is_float(self) -> bool:
        """Whether elements are stored as floating-point numbers, without blocks."""
        return self.name in ("f32", "f16", "bf16", "f64")

    @property
    def is_known(self) -> bool:
        """False for a type id that is not in the table; the size of such a tensor is taken from its file."""
        return self.block > 0


# id -> name, block, block_bytes of types of other programs, under ids that ik_llama.cpp has withdrawn (IQ2_TN, IQ1_TN).
# Weights in them are rotated, and only a program that rotates activations, too, computes with them.
_REUSED_IDS = {142: ("pq2_0", 128, 34), 143: ("ptq1_0", 128, 28)}
# name, id, ftype, block, block_bytes, row_meta, rows, imatrix, fallback, base, packed, codec
_WEIGHTS = (
    ("f32", 0, 0, 1, 4, 0, 1, None, None, None, None, "floats"),
    ("f16", 1, 1, 1, 2, 0, 1, None, None, None, None, "floats"),
    ("q4_0", 2, 2, 32, 18, 0, 1, None, "f16", None, "q4_0_r8", "legacy.symmetric"),
    ("q4_1", 3, 3, 32, 20, 0, 1, None, "f16", None, None, "legacy.asymmetric"),
    ("q5_0", 6, 8, 32, 22, 0, 1, None, "f16", None, "q5_0_r4", "legacy.symmetric"),
    ("q5_1", 7, 9, 32, 24, 0, 1, None, "f16", None, None, "legacy.asymmetric"),
    ("q8_0", 8, 7, 32, 34, 0, 1, None, "f16", None, "q8_0_r8", "legacy.symmetric"),
    ("q2_K", 10, 10, 256, 84, 0, 1, None, "iq4_nl", None, "q2_k_r4", "kquants.asymmetric"),
    ("q3_K", 11, 12, 256, 110, 0, 1, None, "iq4_nl", None, "q3_k_r4", "kquants.symmetric"),
    ("q4_K", 12, 15, 256, 144, 0, 1, None, "q5_0", None, "q4_k_r4", "kquants.asymmetric"),
    ("q5_K", 13, 17, 256, 176, 0, 1, None, "q6_0", None, "q5_k_r4", "kquants.asymmetric"),
    ("q6_K", 14, 18, 256, 210, 0, 1, None, "q8_0", None, "q6_k_r4", "kquants.symmetric"),
    ("iq2_xxs", 16, 19, 256, 66, 0, 1, "hard", "iq4_nl", None, "iq2_xxs_r4", "iquants.iq2_iq3"),
    ("iq2_xs", 17, 20, 256, 74, 0, 1, "hard", "iq4_nl", None, "iq2_xs_r4", "iquants.iq2_iq3"),
    ("iq3_xxs", 18, 23, 256, 98, 0, 1, None, "iq4_nl", None, "iq3_xxs_r4", "iquants.iq2_iq3"),
    ("iq1_s", 19, 24, 256, 50, 0, 1, "hard", "iq4_nl", None, None, "iquants.iq1"),
    ("iq4_nl", 20, 25, 32, 18, 0, 1, None, "f16", None, "iq4_nl_r4", "iquants.iq4"),
    ("iq3_s", 21, 26, 256, 110, 0, 1, None, "iq4_nl", None, "iq3_s_r4", "iquants.iq2_iq3"),
    ("iq2_s", 22, 29, 256, 82, 0, 1, "soft", "iq4_nl", None, "iq2_s_r4", "iquants.iq2_iq3"),
    ("iq4_xs", 23, 30, 256, 136, 0, 1, None, "iq4_nl", None, "iq4_xs_r8", "iquants.iq4"),
    ("iq1_m", 29, 31, 256, 56, 0, 1, "soft", "iq4_nl", None, None, "iquants.iq1"),
    ("bf16", 30, 32, 1, 2, 0, 1, None, None, None, "bf16_r16", "floats"),
    ("q4_0_4x4", 31, 33, 32, 18, 0, 4, None, "f16", "q4_0", None),
    ("q4_0_4x8", 32, 34, 32, 18, 0, 4, None, "f16", "q4_0", None),
    ("q4_0_8x8", 33, 35, 32, 18, 0, 8, None, "f16", "q4_0", None),
    ("tq1_0", 34, 36, 256, 54, 0, 1, None, "q4_0", None, None, "ternary_blocks"),
    ("tq2_0", 35, 37, 256, 66, 0, 1, None, "q4_0", None, None, "ternary_blocks"),
    ("mxfp4", 39, 38, 32, 17, 0, 1, None, "f16", None, "mxfp4_r8", "mxfp4"),
    ("nvfp4", 40, 39, 64, 36, 0, 1, None, "iq4_nl", None, None, "nvfp4"),
    ("q1_0_g128", 41, 40, 128, 18, 0, 1, None, "q8_0", None, None, "one_bit"),
    ("q2_0", 42, 41, 64, 18, 0, 1, None, "q4_0", None, None, "ternary_blocks"),
    ("q6_0", 133, 135, 32, 26, 0, 1, None, "f16", None, "q6_0_r4", "legacy.symmetric"),
    ("iq1_bn", 134, 136, 64, 13, 2, 1, None, "q8_0", None, None, "ternary"),
    ("iq2_bn", 135, 137, 64, 16, 4, 1, None, "q8_0", None, "iq2_bn_r4", "ternary"),
    ("iq2_k", 137, 138, 256, 76, 0, 1, None, "iq4_nl", None, "iq2_k_r4", "iqk.iq_k_ks"),
    ("iq3_k", 138, 139, 256, 110, 0, 1, None, "iq4_nl", None, "iq3_k_r4", "iqk.iq_k_ks"),
    ("iq4_k", 139, 140, 256, 144, 0, 1, None, "q5_0", None, "iq4_k_r4", "iqk.iq_k_ks"),
    ("iq5_k", 140, 141, 256, 176, 0, 1, None, "q6_0", None, "iq5_k_r4", "iqk.iq_k_ks"),
    ("iq6_k", 141, 142, 256, 212, 0, 1, None, "q8_0", None, None, "iqk.iq_k_ks"),
    ("iq4_ks", 144, 145, 256, 136, 4, 1, None, "iq4_nl", None, "iq4_ks_r4", "iqk.iq_k_ks"),
    ("iq2_ks", 145, 147, 256, 70, 2, 1, None, "iq4_nl", None, None, "iqk.iq_k_ks"),
    ("iq4_kss", 146, 148, 256, 128, 4, 1, None, "iq4_nl", None, None, "iqk.iq4_kss"),
    ("q8_KV", 151, 149, 32, 32, 8, 1, None, "f16", None, "q8_KV_r8", "q8_rows"),
    ("iq5_ks", 152, 150, 256, 168, 4, 1, None, "q5_0", None, "iq5_ks_r4", "iqk.iq_k_ks"),
    ("iq2_kt", 153, 151, 256, 68, 4, 1, "soft", "iq4_nl", None, None, "trellis.iq_kt"),
    ("iq3_kt", 154, 152, 256, 100, 4, 1, None, "iq4_nl", None, None, "trellis.iq_kt"),
    ("iq4_kt", 155, 153, 256, 128, 4, 1, None, "iq4_nl", None, None, "trellis.iq_kt"),
    ("iq3_ks", 156, 154, 256, 102, 2, 1, None, "iq4_nl", None, None, "iqk.iq_k_ks"),
    ("iq2_kl", 157, 155, 256, 86, 2, 1, None, "iq4_nl", None, None, "iqk.iq2_kl"),
    ("iq1_kt", 158, 156, 256, 56, 4, 1, "soft", "iq4_nl", None, None, "trellis.iq_kt"),
    ("q4_0_r8", 202, 202, 32, 18, 0, 8, None, "f16", "q4_0", None),
    ("q5_0_r4", 206, 208, 32, 22, 0, 4, None, "f16", "q5_0", None),
    ("q8_0_r8", 208, 207, 32, 34, 0, 8, None, "f16", "q8_0", None),
    ("q2_k_r4", 210, 210, 256, 84, 0, 4, None, "iq4_nl", "q2_K", None),
    ("q3_k_r4", 211, 211, 256, 110, 0, 4, None, "iq4_nl", "q3_K", None),
    ("q4_k_r4", 212, 214, 256, 144, 0, 4, None, "q5_0", "q4_K", None),
    ("q5_k_r4", 213, 216, 256, 176, 0, 4, None, "q6_0", "q5_K", None),
    ("q6_k_r4", 214, 218, 256, 210, 0, 4, None, "q8_0", "q6_K", None),
    ("iq2_xxs_r4", 216, 219, 256, 66, 0, 4, "soft", "iq4_nl", "iq2_xxs", None),
    ("iq2_xs_r4", 217, 220, 256, 74, 0, 4, "soft", "iq4_nl", "iq2_xs", None),
    ("iq3_xxs_r4", 218, 223, 256, 98, 0, 4, None, "iq4_nl", "iq3_xxs", None),
    ("iq1_s_r4", 219, 224, 32, 6, 2, 4, "soft", "f16", None, None, "iquants.iq1"),
    ("iq4_nl_r4", 220, 225, 32, 18, 0, 4, None, "f16", "iq4_nl", None),
    ("iq3_s_r4", 221, 226, 256, 110, 0, 4, None, "iq4_nl", "iq3_s", None),
    ("iq2_s_r4", 222, 229, 256, 82, 0, 4, "soft", "iq4_nl", "iq2_s", None),
    ("iq4_xs_r8", 223, 230, 256, 136, 0, 8, None, "iq4_nl", "iq4_xs", None),
    ("iq1_m_r4", 229, 231, 32, 7, 2, 4, "soft", "f16", None, None, "iquants.iq1"),
    ("bf16_r16", 230, 232, 1, 2, 0, 16, None, None, "bf16", None, "floats"),
    ("q6_0_r4", 233, 335, 32, 26, 0, 4, None, "f16", "q6_0", None),
    ("iq2_bn_r4", 335, 337, 64, 16, 4, 4, None, "q8_0", "iq2_bn", None),
    ("iq2_k_r4", 337, 338, 256, 76, 0, 4, None, "iq4_nl", "iq2_k", None),
    ("iq3_k_r4", 338, 339, 256, 110, 0, 4, None, "iq4_nl", "iq3_k", None),
    ("iq4_k_r4", 339, 340, 256, 144, 0, 4, None, "q5_0", "iq4_k", None),
    ("iq5_k_r4", 340, 341, 256, 176, 0, 4, None, "q6_0", "iq5_k", None),
    ("iq4_ks_r4", 344, 345, 256, 136, 4, 4, None, "iq4_nl", "iq4_ks", None),
    ("iq5_ks_r4", 352, 350, 256, 168, 4, 4, None, "q5_0", "iq5_ks", None),
    ("mxfp4_r8", 353, 351, 32, 17, 0, 8, None, "f16", "mxfp4", None),
    ("q8_KV_r8", 398, 398, 32, 32, 4, 8, None, "f16", "q8_KV", None, "q8_rows"),
    ("q8_k_r8", 399, 399, 256, 258, 0, 8, None, "q8_0", None, None, "q8_rows"),
)

# Types without a codec here: never quantisation targets, but files contain them and `inspect` shows their sizes.
# name, id, ftype, block, block bytes, row meta, rows
_WITHOUT_CODEC = (
    ("q8_1", 9, None, 32, 36),
    ("q8_K", 15, None, 256, 296),
    ("i8", 24, None, 1, 1),
    ("i16", 25, None, 1, 2),
    ("i32", 26, None, 1, 4),
    ("i64", 27, None, 1, 8),
    ("f64", 28, None, 1, 8),
    ("q8_k_r16", 397, None, 256, 258, 0, 16),
)

# Values of general.file_type that have two meanings in llama.cpp and ik_llama.cpp. Files of q1_0_g128 written here have
# llama.cpp's 40 (ik_llama.cpp only prints the number), so that 41 is q2_0 in all but files of the fork.
FILE_TYPES_OF_TWO_MEANINGS = {
    38: "MXFP4_MOE (experts in mxfp4, all else in q8_0) in llama.cpp, MXFP4 in ik_llama.cpp",
    41: "Q2_0 in llama.cpp, Q1_0_G128 in ik_llama.cpp",
}

# Interleaved types that are encodings of their own, without a base: the fallback when the rows are no multiple of a group.
_ROW_FALLBACK = {"iq1_s_r4": "iq1_s", "iq1_m_r4": "iq1_m", "q8_k_r8": "q8_0", "q8_k_r16": "q8_0"}


class TypeTable(Mapping[str, TensorType]):
    """Type name (in any letter case) -> TensorType; `by_id` looks up the ids of GGUF files."""

    def __init__(self, rows: tuple[tuple, ...]):
        types = [TensorType(*row) for row in rows]
        self._by_name = {t.name.lower(): t for t in types}
        self._by_id = {t.id: t for t in types}

    def __getitem__(self, name: str) -> TensorType:
        return self._by_name[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._by_name

    def __iter__(self) -> Iterator[str]:
        return (t.name for t in self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> TensorType:
        """The type of this name. Raises PlanError for an unknown one."""
        if name not in self:
            raise PlanError(f"unknown tensor type {name!r}")
        return self[name]

    def by_id(self, type_id: int) -> TensorType:
        """The type of an id; an id that is not in the table gives a type 'type-ID' whose `is_known` is False."""
        return self._by_id.get(type_id) or TensorType(f"type-{type_id}", type_id, None, 0, 0)

    def of_size(self, unknown: TensorType, elements: int, nbytes: int, alignment: int) -> TensorType:
        """An unknown type by what a tensor of so many elements takes in its file, up to padding: one of those that share their
        id with a type that was withdrawn gets its name; any other type itself, as do tensors so small that padding hides the
        difference. Neither can be decoded."""
        name, block, block_bytes = _REUSED_IDS.get(unknown.id, ("", 1, 0))
        exact = elements // block * block_bytes
        is_it = name and elements % block == 0 and elements >= 128 * alignment and 0 <= nbytes - exact < alignment
        return TensorType(name, unknown.id, None, 0, 0) if is_it else unknown

    def plain(self, tensor_type: TensorType) -> TensorType:
        """The plain type whose bits a repacked type permutes; any other type itself."""
        return self[tensor_type.base_name]

    def imatrix_need(self, tensor_type: TensorType) -> str | None:
        """'hard', 'soft' or None as `TensorType.imatrix`; a repacked type without an entry of its own has its base's."""
        return tensor_type.imatrix or self.plain(tensor_type).imatrix

    def fallback_for(
        self, requested: TensorType, shape: tuple[int, ...], others: Mapping[str, str] | None = None
    ) -> tuple[TensorType, str]:
        """The type that a tensor of this shape (ne order) gets when `requested` is asked for, and why ('' if it is that type).

        The row length decides first, then the number of rows (docs/formats/mixes.md, "Fallback for columns";
        docs/formats/interleaved.md, "The rule of row counts"). others: type -> fallback that counts instead of the table's.
        Raises PlanError when no fallback fits.
        """
        chosen, reasons = requested, []
        columns, rows, _ = dims(shape)
        while not chosen.fits(columns) or rows % chosen.rows:
            if not chosen.fits(columns):
                reasons.append(f"{columns} columns are no multiple of {chosen.block}")
                fallback = (others or {}).get(chosen.name, chosen.fallback)
            else:
                reasons.append(f"{rows} rows are no multiple of {chosen.rows}")
                fallback = chosen.base or _ROW_FALLBACK[chosen.name]
            if fallback is None:
                raise PlanError(f"{requested.name} cannot hold a tensor of {columns} x {rows}: {', '.join(reasons)}")
            chosen = self[fallback]
        return chosen, ", ".join(reasons)


TYPES = TypeTable(_WEIGHTS + _WITHOUT_CODEC)
