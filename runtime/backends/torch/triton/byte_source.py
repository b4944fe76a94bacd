"""The product of vectors with packed rows in whole numbers, as source text of a kernel, for the types whose codes stand for
bytes.

The vector's numbers are whole ones of 16 bits (a scale for each 32), each as two bytes. Four codes are brought into the bytes
of a word, by a mask or by a table of up to 16 bytes in registers, and one instruction multiplies them with four bytes of the
vector and adds up. Sums of a run are exact; they begin at the whole number whose bits are those of the float 1.5 * 2^23, so
that they need no conversion.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .....formats.layouts import layout_of
from .block_format import BlockFormat, block_format
from .bytes4 import FUNCTIONS
from .dependent import let_next_begin, wait
from .unit_source import Text, compiled, four_at_once
from .units import UnitBits, Units, units_of
from .vector_bytes import GROUP

_ZERO = 0x4B400000  # the bits of _MIDDLE
_MIDDLE = 1.5 * 2.0**23
_TABLE = 16  # bytes, at most


class NoBytes(Exception):
    """A type, or units, whose codes do not lie as bytes need it."""


class _Four(NamedTuple):
    """Four neighbouring weights, whose codes are in the bytes of words or which are a part of what one code stands for: numbers
    of their codes, that of the first weight, and its place and run."""

    codes: tuple[int, ...]
    weight: int
    place: int
    run: int


@cache
def byte_kernel(type_name: str, words: int, rows: int, vectors: int, lanes: int) -> Any:
    """The kernel, compiled when it is first launched; None where there is none. As `unit_source.unit_kernel`, launched with
    lanes / 32 warps."""
    text = byte_source(type_name, words, rows, vectors, lanes)
    name = f"<byte product of {type_name}: {words} words, {rows} rows, {vectors} vectors, {lanes} lanes>"
    return None if text is None else compiled(text, name, wait=wait, let_next_begin=let_next_begin, **FUNCTIONS)


def byte_source(type_name: str, words: int, rows: int, vectors: int, lanes: int) -> str | None:
    """The text of a kernel; None for types without."""
    units, form = units_of(type_name, words), block_format(type_name)
    if units is None or form is None:
        return None
    try:
        return ByteText(units, form, type_name, rows, vectors, lanes).whole()
    except NoBytes:
        return None


def byte_table(type_name: str) -> np.ndarray:
    """The kernel's argument `values`, of codes that stand for several weights: int32 [entries * size / 4], of bytes."""
    values = layout_of(type_name).decoded_values.reshape(-1)
    return values.astype(np.int8).view(np.int32) if len(values) % 4 == 0 else np.zeros(1, np.int32)


class ByteText(Text):
    arguments = (
        "data, values, levels, x, row_words, part_words, matrices, out, count, columns, pairs, x_per_matrix, "
        "distance1: tl.int64, count1, distance2: tl.int64, count2, SEVERAL: tl.constexpr"
    )
    row_of_x = "row_words"

    def __init__(self, units: Units, form: BlockFormat, type_name: str, rows: int, vectors: int, lanes: int):
        super().__init__(units, form, type_name, rows, vectors, lanes)
        values = layout_of(type_name).decoded_values.reshape(-1)
        if np.any(values != np.round(values)) or np.any((values < -128) | (values > 127 + 128 * bool(form.values.step))):
            raise NoBytes
        has_signs = form.sign_codes.count or (form.signs.count and not self.signs_of_runs)
        if has_signs and (values.min() < 1 or form.size == 1):
            raise NoBytes
        self.values, self.has_signs, line = values.astype(int), bool(has_signs), form.values
        self.is_signed = not line.step or (line.flip, line.step, line.first) == (128, 1, -128)
        self.first = 0 if self.is_signed else line.first / line.step
        if self.first != int(self.first):
            raise NoBytes
        if not line.step and form.size == 1 and len(values) > _TABLE:
            raise NoBytes
        self.fours, self.in_lanes = self._fours(), False

    def _beginning(self) -> list[str]:
        return ["if SAME:", "    let_next_begin(DEPENDENT)", "else:", "    begin(DEPENDENT)"]

    def _after_loads(self) -> list[str]:
        """Weights are loaded while the kernel before still runs, whose results are vectors, or choose the matrices."""
        return ["if SAME:", "    wait(DEPENDENT)"]

    @property
    def loop(self) -> str:
        return f"tl.range(0, all_units, {self.lanes}, loop_unroll_factor=2)"

    def _of_several(self) -> list[str]:
        """If SEVERAL, count1 and count2 rows of other matrices, at these distances in bytes, follow; their results lie one
        behind the other."""
        rows, lines = len(self.rows), []
        for number in (1, 2):
            counted, tiles = "count + count1" if number == 2 else "count", f"tiles{number}"
            lines += [
                f"{tiles} = {'tiles1 + ' if number == 2 else ''}tl.cdiv({'count1' if number == 2 else 'count'}, {rows})",
                f"is{number} = tile >= {tiles}",
                f"skipped{number} = {counted}",
            ]
        for name, of_first, others in (
            ("data", "0", ("distance1", "distance2")),
            ("out", "0", ("skipped1 * pairs", "skipped2 * pairs")),
        ):
            lines.append(f"{name} += tl.where(is2, {others[1]}, tl.where(is1, {others[0]}, {of_first}))")
        lines += [
            "tile -= tl.where(is2, tiles2, tl.where(is1, tiles1, 0))",
            "count = tl.where(is2, count2, tl.where(is1, count1, count))",
        ]
        return ["if SEVERAL:", *(f"    {line}" for line in lines)]

    def _fours(self) -> list[_Four]:
        """By place."""
        units, size = self.units, self.form.size
        found = []
        if any(step % 4 for _, _, step in units.base) or units.first % 4:
            raise NoBytes
        if size > 1:
            for first in range(0, len(units.places), 4):
                found.append(_Four((first // size,), first, units.places[first], units.runs[first]))
                if any(b - a != 1 for a, b in pairwise(units.places[first : first + 4])):
                    raise NoBytes
        else:
            numbers = {place: number for number, place in enumerate(units.places)}
            for place in sorted(numbers):
                if place % 4 == 0:
                    codes = tuple(numbers.get(place + i, -1) for i in range(4))
                    if -1 in codes or not all(_in_bytes(bits, codes) for bits in units.fields["codes"]):
                        raise NoBytes
                    found.append(_Four(codes, codes[0], place, units.runs[codes[0]]))
        if any(four.place % 4 for four in found) or 4 * len(found) != len(units.places):
            raise NoBytes
        return sorted(found, key=lambda four: four.place)

    def _vector(self, vector: int) -> None:
        """h{vector}_{place} and l{vector}_{place}, the high and the low bytes; g{vector}_{run}, the scale; where runs are
        moved, sum{vector}_{run}; and what sums begin with."""
        say, form, units = self.x.append, self.form, self.units
        base = " + ".join(
            [f"number // {units.count} * {form.block // 4}"]
            + [f"(unit >> {low}) % {size} * {step // 4}" for low, size, step in units.base]
        )
        if not vector:
            say(f"word = {base}")
        places = [four.place for four in self.fours]
        for tag, part in (("h", "0"), ("l", "part_words")):
            done = set()
            for place in places:
                names = [f"{tag}{vector}_{place + 4 * i}" for i in range(4)]
                at = f"vector{vector} + {part} + (word + {(units.first + place) // 4})"
                if place in done:
                    continue
                if place % 16 == 0 and {place + 4 * i for i in range(4)} <= set(places):
                    self.x += four_at_once(names, f"({at})[:, None] + four", self.lanes)
                    done |= {place + 4 * i for i in range(4)}
                else:
                    say(f"{names[0]} = tl.load({at})")
        members = {run: [four for four in self.fours if four.run == run] for run in self.runs}
        is_moved = form.flags.count or form.minima.count or form.offset.count
        for run, fours in members.items():
            name = f"{vector}_{run}"
            at = f"vector{vector} + 2 * part_words + (column + {fours[0].place}) // {GROUP}"
            say(f"g{name} = tl.load({at}).to(tl.float32, bitcast=True)")
            say(f"if not EVEN:\n            g{name} = tl.where(inside, g{name}, 0.0)")
            if is_moved or self.first:
                for tag in "hl":
                    say(f"{tag}sum{name} = word ^ word")
                    for four in fours:
                        say(f"{tag}sum{name} = dot_unsigned({0x01010101}, {tag}{vector}_{four.place}, {tag}sum{name})")
            if is_moved:
                say(f"sum{name} = (hsum{name} * 256 + lsum{name}).to(tl.float32) * g{name}")
            for tag in "hl":
                first = f" + {int(self.first)} * {tag}sum{name}" if self.first else ""
                say(f"{tag}begin{name} = (word ^ word) + {_ZERO}{first}")
        for a, b in self._pairs():
            for tag in "hl":
                both = f"{tag}{vector}_{a.place}, {tag}{vector}_{b.place}"
                if a.run == b.run:
                    say(f"{tag}first{vector}_{a.place} = permute({both}, {0x5140})")
                    say(f"{tag}second{vector}_{a.place} = permute({both}, {0x7362})")

    def _row(self) -> None:
        for run in self.runs:
            for vector in self.vectors:
                self.lines += [f"{tag}s{run}_{vector} = {tag}begin{vector}_{run}" for tag in "hl"]
        if self.form.size > 1:
            self._entries()
        elif self.form.values.step:
            for four in self.fours:
                self._add(four.run, self._word_of_codes(four), four.place)
        else:
            self._by_table()
        for run in self.runs:
            values = []
            for vector in self.vectors:
                name = f"{run}_{vector}"
                high, low = (f"({tag}s{name}.to(tl.float32, bitcast=True) - {_MIDDLE!r})" for tag in "hl")
                self.lines.append(f"s{name} = ({high} * 256.0 + {low}) * g{vector}_{run}")
                values.append(f"s{name}")
            self._run(run, values)

    def _add(self, run: int, word: str, place: int | str, vector_tag: str = "") -> None:
        """Adds the products of a word of bytes to the sums of its run."""
        dot = "dot_signed" if self.is_signed else "dot_unsigned"
        self.lines.append(f"word_of_values = {word}")
        for vector in self.vectors:
            for tag in "hl":
                name = f"{tag}s{run}_{vector}"
                self.lines.append(f"{name} = {dot}(word_of_values, {tag}{vector_tag}{vector}_{place}, {name})")

    def _word_of_codes(self, four: _Four) -> str:
        """The codes of four weights in bytes."""
        terms = []
        for bits in self.units.fields["codes"]:
            word, bit = divmod(bits.offsets[four.codes[0]], 32)
            name = self._word("codes", bits, word)
            mask = int32(((1 << bits.width) - 1 << bits.up) * 0x01010101)
            terms.append(name if bits.width == 8 else f"({self._shifted(name, bit - bits.up)} & {mask})")
        flip = self.form.values.flip
        word = " | ".join(terms)
        return word if not flip or self.is_signed else f"({word}) ^ {int32(flip * 0x01010101)}"

    def _pairs(self) -> list[tuple[_Four, _Four]]:
        """Fours whose codes are the halves of bytes, where values come from a table."""
        if self.form.values.step or self.form.size > 1:
            return []
        if all(bits.width == 4 for bits in self.units.fields["codes"]):
            (bits,) = self.units.fields["codes"]
            by_bit = {bits.offsets[four.codes[0]]: four for four in self.fours}
            pairs = [(four, by_bit.get(bit + 4)) for bit, four in by_bit.items() if bit % 8 == 0]
        else:
            pairs = list(zip(self.fours[::2], self.fours[1::2], strict=True))
        if any(b is None for _, b in pairs):
            raise NoBytes
        return [(a, b) for a, b in pairs if b is not None]

    def _by_table(self) -> None:
        say, table = self.lines.append, np.zeros(_TABLE, np.int8)
        table[: self.entries] = self.values
        words = [int32(int(word)) for word in table.view(np.uint32)]
        for a, b in self._pairs():
            (bits, *_) = self.units.fields["codes"]
            if bits.width == 4:
                say(f"codes = {self._word('codes', bits, bits.offsets[a.codes[0]] // 32)}")
            else:
                say(f"codes = ({self._word_of_codes(a)}) | ({self._word_of_codes(b)}) << 4")
            if self.entries > 8:
                say(f"places = codes & {0x77777777}")
                say("places1 = places >> 16")
                say(f"half = ((codes >> 1) & {0x44444444}) | {0x32103210}")
                for name, places, chosen in (("values0", "places", "half"), ("values1", "places1", "(half >> 16)")):
                    below = f"permute({words[0]}, {words[1]}, {places})"
                    say(f"{name} = permute({below}, permute({words[2]}, {words[3]}, {places}), {chosen})")
            else:
                say(f"values0 = permute({words[0]}, {words[1]}, codes)")
                say(f"values1 = permute({words[0]}, {words[1]}, codes >> 16)")
            if a.run == b.run:
                self._add(a.run, "values0", a.place, "first")
                self._add(a.run, "values1", a.place, "second")
            else:
                self._add(a.run, f"permute(values0, values1, {0x6420})", a.place)
                self._add(b.run, f"permute(values0, values1, {0x7531})", b.place)

    def _entries(self) -> None:
        """Of codes that stand for several weights."""
        parts = self.form.size // 4
        for four in self.fours:
            code = " | ".join(self._code(four.codes[0], 0)[0])
            word = f"tl.load(values + ({code}) * {parts} + {four.weight % self.form.size // 4})"
            if self.has_signs:
                self.lines.append(
                    f"negative = permute((({self._four_signs(four.weight)}) * {0x10204080}) & {-0x7F7F7F80}, 0, {0xBA98})"
                )
                word = f"({word} ^ negative) + (negative & {0x01010101})"
            self._add(four.run, word, four.place)

    def _four_signs(self, weight: int) -> str:
        """The signs of four weights, an int32 of four bits."""
        if self.form.signs.count:
            (bits,) = self.units.fields["signs"]
            word, bit = divmod(bits.offsets[weight], 32)
            return f"({self._shifted(self._word('signs', bits, word), bit)}) & 15"
        self._sign(weight)
        name = f"eight{weight // 8}"
        return f"({name} >> {weight % 8}) & 15"


def _in_bytes(bits: UnitBits, codes: tuple[int, ...]) -> bool:
    """Whether four codes have these bits at the same place of the bytes of a word."""
    first = bits.offsets[codes[0]]
    return (
        first % 32 < 8
        and first % 8 + bits.width <= 8
        and all(bits.offsets[code] == first + 8 * i for i, code in enumerate(codes))
    )


def int32(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
