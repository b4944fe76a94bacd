"""Signs of weights that are stored apart from them, a bit for each weight or a code of seven bits for eight of them; and the
runs of 32 points, or octets of signs, that are read together."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ....simd.instructions import x86
from ....simd.target import Target
from .blocks import BlockReader, CodeVector
from .emitter import BYTES, I8, I16, I32, I64, Emitter, constant, vector

RUN = 32  # points that are looked up together, words of a register; octets of signs that are decoded together
_UNPACKED = np.arange(RUN).reshape(2, 2, 8).swapaxes(0, 1).reshape(-1)  # bytes in whose order instructions of AVX2 interleave
_LOW_SEVEN_BITS, _LOW_FOUR_BITS, _LOWEST_BIT = 0x7F7F7F7F7F7F7F7F, 0x0F0F0F0F0F0F0F0F, 0x0101010101010101  # of every byte


class PointRun(NamedTuple):
    """Points that are read together, 32 of a step. number: of the run; rows, points: int [32], of each; places: int [16], of
    the points of a vector's lanes among them."""

    number: int
    rows: np.ndarray
    points: np.ndarray
    places: np.ndarray


class SignReader(BlockReader):
    """Reads signs of eight columns of a row, octets, 32 at a time."""

    @property
    def point_columns(self) -> int:
        assert self.layout.grid is not None
        return self.layout.grid.shape[1]

    def sign_bytes_ahead(self, of: Target) -> int:
        """0 where signs are not words (see `signs`), whose products would wait for a dozen instructions one after the other."""
        return 2 * len(self.runs_of(8, RUN)[0]) if self._has_sign_words(of) else 0

    def write_signs(self, emit: Emitter, base: Any, to: Any) -> None:
        """Writes the `sign_bytes_ahead` to an address."""
        rows, octets = self.runs_of(8, RUN)
        for first in range(0, len(rows), RUN):
            part = slice(first, first + RUN)
            emit.store(to, 2 * first, self._sign_words(emit, base, rows[part], octets[part]))

    def _has_sign_words(self, of: Target) -> bool:
        """Whether the target has an instruction that negates bytes, and the signs of a point are a byte. Points of four weights
        take as long, or longer, with words."""
        f = self.layout
        if of.vector_bits != 256 or not self.has_signs or f.grid is None or self.point_columns < 8:
            return False
        return f.weight_signs is None or bool((f.weight_signs[..., 0].reshape(-1, 8) % 8 == np.arange(8)).all())

    def bits_set(self, emit: Emitter, base: Any, bits: np.ndarray) -> Any:
        """<64 x i1>: whether each of 64 bits is set."""
        if (np.diff(bits) == 1).all() and not bits[0] % 8:
            return emit.mask(emit.load(base, int(bits[0]) // 8, I64))
        return emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)

    def negative(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i1>: which weights are negative; None for a type without signs. loaded: as for codes_less."""
        f, columns = self.layout, code_vector.columns
        found = self.run_of(code_vector, 8)
        if f.weight_signs is not None:
            all_bits = self._in_all_blocks(f.weight_signs)[..., 0]
            bits = all_bits[code_vector.rows, columns]
            octets = None if found is None else all_bits[found.rows[:, None], found.points[:, None] * 8 + np.arange(8)]
            if octets is None or (np.diff(bits) == 1).all() or (octets % 8 != np.arange(8)).any():
                return self.bits_set(emit, base, bits)
        elif f.sign_codes is None:
            return None
        assert found is not None, "32 octets of signs are decoded together"
        codes = None if f.sign_codes is None else self._in_all_blocks(f.sign_codes)[found.rows, found.points]
        key, place = ("signs", found.number), np.repeat(found.places, 4)
        if codes is not None and emit.target.has("avx512vbmi", "avx512bitalg") and self._signs_share_words(emit, place, codes):
            if key not in loaded:
                loaded[key] = self._signs_in_words(emit, base, codes)
            return x86.vpshufbitqmb(emit.builder, loaded[key], constant(I8, place % 4 * 8 + columns % 8))
        if key not in loaded and codes is not None:
            loaded[key] = self._signs(emit, base, codes)
        elif key not in loaded:
            loaded[key] = emit.gather(base, octets[:, 0] // 8, self.size)  # type: ignore[index]
        return emit.bits_of_bytes(loaded[key], place, columns % 8)

    def signs(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """Signs of a vector's weights as `Emitter.with_signs` takes them; None for a type without signs. loaded: as for
        codes_less.

        A multiplication makes a bit of each byte its highest. In words of the signs of eight weights (`_sign_words`) those of
        even columns stand in the lower byte, a place higher, those of odd columns in the upper one."""
        found = self.run_of(code_vector, 8)
        if found is None or not self._has_sign_words(emit.target):
            return self.negative(emit, base, code_vector, loaded)
        key = ("sign words", found.number)
        if key not in loaded and "ahead" in loaded:
            loaded[key] = emit.load(loaded["ahead"], BYTES * found.number, vector(I16, RUN))
        elif key not in loaded:
            loaded[key] = self._sign_words(emit, base, found.rows, found.points)
        words = emit.shuffle(loaded[key], np.repeat(found.places, 2))
        shifted = emit.builder.mul(words, constant(I16, 1 << 6 - code_vector.columns[::2] % 8))
        return emit.builder.bitcast(shifted, vector(I8, BYTES))

    def _sign_words(self, emit: Emitter, base: Any, rows: np.ndarray, octets: np.ndarray) -> Any:
        """<32 x i16>: the signs of 32 octets, and, doubled, below them. The lowest bits, which `signs` does not look at, are
        set: no byte is to be 0."""
        f, builder = self.layout, emit.builder
        rows, octets = rows[_UNPACKED], octets[_UNPACKED]
        if f.weight_signs is not None:
            bits = self._in_all_blocks(f.weight_signs)[rows, octets * 8, 0]
            eight = emit.gather(base, bits // 8, self.size)
        else:
            assert f.sign_codes is not None
            eight = self._signs(emit, base, self._in_all_blocks(f.sign_codes)[rows, octets])
        ones, places = constant(I8, [1] * RUN), np.argsort(_UNPACKED)
        odd, even = builder.or_(eight, ones), builder.or_(builder.shl(eight, ones), ones)
        words = builder.shuffle_vector(even, odd, constant(I32, np.stack([places, places + RUN], axis=1).reshape(-1)))
        return builder.bitcast(words, vector(I16, RUN))

    def run_of(self, code_vector: CodeVector, size: int, length: int = RUN) -> PointRun | None:
        """The 32 points (or octets of signs; `length`) of `size` columns that those of a vector are read with; None if they are
        not read together."""
        rows, points = self.runs_of(size, length)
        number = {pair: i for i, pair in enumerate(zip(rows.tolist(), points.tolist(), strict=True))}
        pairs = zip(code_vector.lane_rows, (code_vector.columns[::4] // size).tolist(), strict=True)
        places = np.array([number.get(pair, -1) for pair in pairs])
        run = int(places[0]) // length
        if (places < 0).any() or (places // length != run).any():
            return None
        part = slice(length * run, length * (run + 1))
        return PointRun(run, rows[part], points[part], places % length)

    def runs_of(self, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`_points_of_runs`, found once."""
        if (size, length) not in self._runs:
            self._runs[size, length] = self._points_of_runs(size, length)
        return self._runs[size, length]

    @cached_property
    def _runs(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        return {}

    @staticmethod
    def _signs_share_words(emit: Emitter, place: np.ndarray, codes: np.ndarray) -> bool:
        """Whether the four codes whose signs go to a word of eight bytes lie in one themselves."""
        return emit.in_words(place) and bool((np.ptp(codes.reshape(BYTES // 8, -1), axis=1) < 64).all())

    def _points_of_runs(self, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """int [runs * length]: rows and points of `size` columns, run after run; none where they fill no runs. Of interleaved
        rows the points that eight bytes of several vectors need lie side by side, as those of plain rows do by themselves."""
        rows, columns = (np.concatenate(parts) for parts in zip(*((v.rows, v.columns) for v in self.code_vectors), strict=True))
        if (columns < 0).any() or len(rows) % (size * length):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        order = np.arange(len(rows))[::size]
        if self.rows > 1:
            order = order.reshape(-1, length * size // BYTES, BYTES // 8, 8 // size).swapaxes(1, 2).reshape(-1)
        return rows[order], columns[order] // size

    def _signs_in_words(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<64 x i8>: as _signs of 32 codes, of which the lowest half of each word of eight bytes has four."""
        first = codes.reshape(-1, 4, 7)[:, 0, 0] // 8
        start = first - max(0, int(first.max()) + 8 - self.size)  # what is read ends with the block
        words = emit.gather(base, (start[:, None] + np.arange(8)).reshape(-1), self.size)
        shifts = codes.reshape(-1, 4, 7)[:, :, 0] - 8 * start[:, None]
        assert shifts.max() <= 57, "seven bits of a word"
        numbers = x86.vpmultishiftqb(emit.builder, constant(I8, np.tile(shifts, 2).reshape(-1)), words)
        code = np.arange(128)
        odd = np.bitwise_count(code) & 1
        table = (code ^ code << 1) & 255 if self.layout.scrambled else code | odd << 7
        return bytes_of_table(emit.builder, table, [numbers], [[]])[0]

    def _signs(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<n x i8>: eight signs each, of n codes; codes: bit addresses [n, 7], n a multiple of 8."""
        builder, kind, bytes_kind = emit.builder, vector(I64, len(codes) // 8), vector(I8, len(codes))
        code = self._sevens(emit, base, codes)
        if self.layout.scrambled:
            signs = builder.xor(code, builder.shl(code, constant(kind, 1)))
        elif emit.target.has("ssse3") or emit.target.has("neon"):  # the parity of four bits is looked up as the eighth
            folded = builder.and_(builder.xor(code, builder.lshr(code, constant(kind, 4))), constant(kind, _LOW_FOUR_BITS))
            table = [odd << 7 for odd in (np.bitwise_count(np.arange(16)) & 1).tolist()]
            parity = emit.look_up(table, builder.bitcast(folded, bytes_kind))
            return builder.xor(builder.bitcast(code, bytes_kind), parity)
        else:
            odd = code  # the lowest bit of every byte becomes the parity of the byte
            for shift in (4, 2, 1):
                odd = builder.xor(odd, builder.lshr(odd, constant(kind, shift)))
            signs = builder.or_(code, builder.shl(builder.and_(odd, constant(kind, _LOWEST_BIT)), constant(kind, 7)))
        return builder.bitcast(signs, bytes_kind)

    def _sevens(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<n / 8 x i64> whose bytes are n numbers of seven bits."""
        builder, kind = emit.builder, vector(I64, len(codes) // 8)
        shift = codes[:, 0] % 8
        if (shift == shift[0]).all() and shift[0] < 2:
            value = builder.bitcast(emit.gather(base, codes[:, 0] // 8, self.size), kind)
            return builder.and_(builder.lshr(value, constant(kind, int(shift[0]))), constant(kind, _LOW_SEVEN_BITS))
        fours = codes.reshape(-1, 28)
        assert (fours - np.arange(28) == fours[:, :1] // 8 * 8).all(), "four codes from a byte on"
        firsts = fours[:, 0] // 8
        word = builder.bitcast(emit.gather(base, (firsts[:, None] + np.arange(4)).reshape(-1), self.size), kind)
        # Two bits are put between its halves, then one between theirs: what is to move one place on is added to itself.
        low, high = (constant(kind, mask | mask << 32) for mask in (0x3FFF, 0x3FFF0000))
        halves = builder.or_(builder.and_(word, low), builder.and_(builder.shl(word, constant(kind, 2)), high))
        return builder.add(halves, builder.and_(halves, constant(kind, 0x3F803F803F803F80)))


def bytes_of_table(builder: Any, table: np.ndarray, indices: list[Any], above: list[list[Any]]) -> list[Any]:
    """<64 x i8>, one for each of several vectors of indices: entries of a table, a power of two of at least 128, by indices, of
    which the bytes are the lowest bits and `above`, for each vector, bits 7, 8, ... as masks. Each half of the table is looked
    up and chosen from before the next is loaded."""
    if len(table) == 2 * BYTES:
        low, high = (constant(I8, part) for part in table.reshape(2, BYTES))
        return [x86.vpermi2b(builder, low, each, high) for each in indices]
    halves = [bytes_of_table(builder, half, indices, [masks[:-1] for masks in above]) for half in np.split(table, 2)]
    return [builder.select(masks[-1], high, low) for masks, low, high in zip(above, *halves, strict=True)]
