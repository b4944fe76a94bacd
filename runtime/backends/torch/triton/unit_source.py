"""The product of vectors with packed rows, as source text of a kernel for one tensor type, in which each thread takes a unit.

sum(w x) over a run is scale * sum(value x) + minimum * sum(x): what a run shares is multiplied once. A code needs no
conversion: (word & mask << p) | bits of 2^23 are those of the float 2^23 + code * 2^p; 2^-p is multiplied into x, once for all
rows. Tables of up to 32 numbers are in the lanes of a warp, which is the whole program; those of codes of several weights are
of bytes.

It is text, since Triton's versions differ in what a function may ask of a constant, and agree on plain arithmetic.
"""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any

import numpy as np

from .....formats.layouts import layout_of
from .block_format import BlockField, BlockFormat, Digit, block_format
from .dependent import begin
from .units import UnitBits, Units, units_of

LANES = 32
ONE_BITS = 23  # of a float's mantissa
_BITS_OF_2_23 = 0x4B000000


def unit_tables(type_name: str) -> tuple[np.ndarray, int, int]:
    """The kernel's arguments `values`, `magic0` and `magic8`: float32 [entries], or, of codes of several weights, int32
    [entries * size / 4], of bytes value + 128; and 2^23 with the bits of codes at bits 0 and 8 that are stored inverted."""
    layout, form = layout_of(type_name), block_format(type_name)
    assert form is not None
    values = layout.decoded_values.reshape(-1)
    packed = values.astype(np.float32) if form.size == 1 else (values + 128).astype(np.uint8).view(np.int32)
    return packed, _BITS_OF_2_23 | form.values.flip, _BITS_OF_2_23 | form.values.flip << 8


@cache
def unit_kernel(type_name: str, words: int, rows: int, vectors: int) -> Any:
    """The kernel, compiled when it is first launched; None where a type has no units of so many words.

    words: of a unit; rows: of a program; vectors: neighbouring pairs of a program, which must be of one matrix.
    Launched with one warp, on a grid (tiles of rows, tiles of pairs).
    """
    text = unit_source(type_name, words, rows, vectors)
    return None if text is None else compiled(text, f"<product of {type_name}: {words} words, {rows} rows, {vectors} vectors>")


def compiled(text: str, file: str, **names: Any) -> Any:
    """The function `product` of a text, which may use these names."""
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton reads a kernel's source
    scope: dict[str, Any] = {"__name__": __name__, "begin": begin, **names}
    exec(compile(text, file, "exec"), scope)
    return scope["product"]


def unit_source(type_name: str, words: int, rows: int, vectors: int) -> str | None:
    """The text of a kernel with the arguments and results of `kernels.matvec`; None as of `unit_kernel`."""
    units, form = units_of(type_name, words), block_format(type_name)
    return None if units is None or form is None else Text(units, form, type_name, rows, vectors).whole()


def sum_text(name: str, digits: tuple[Digit, ...], first: int) -> str:
    terms = [f"({name} >> {low}) % {size} * {step}" for low, size, step in digits]
    return " + ".join(terms + [str(first)] * (first > 0 or not terms))


class Text:
    """Lines: `x` of vectors, which all rows share, and `places` of words, then those of each row."""

    arguments = "data, values, levels, x, matrices, out, count, columns, pairs, x_per_matrix, magic0, magic8"
    row_of_x = "columns"

    def _beginning(self) -> list[str]:
        """What comes before the first load."""
        return ["begin(DEPENDENT)"]

    def _after_loads(self) -> list[str]:
        """What comes between the loads of weights and those of vectors."""
        return []

    @property
    def loop(self) -> str:
        """Of the units of a row, of which each lane takes one at a time."""
        return f"range(0, all_units, {self.lanes})"

    def __init__(self, units: Units, form: BlockFormat, type_name: str, rows: int, vectors: int, lanes: int = LANES):
        self.lanes = lanes
        self.units, self.form, self.rows, self.vectors = units, form, range(rows), range(vectors)
        self.entries = len(layout_of(type_name).decoded_values)
        self.in_lanes = not form.values.step and form.size == 1 and self.entries <= LANES
        self.runs = sorted(set(units.runs))
        self.signs_of_runs = form.signs.count * form.run <= form.block
        line = form.values
        self.fraction = line.first / line.step % 1 if line.step else 0.0  # of first / step, which 2^23 has no room for
        self.x: list[str] = []
        self.places: dict[str, str] = {}  # by the name that each line makes
        self.scaled: set[str] = set()
        self.loads: list[str] = []  # of words of all rows
        self.lines: list[str] = []  # of the row `row`, with what it has made: names of words by field, and of shifted words
        self.row, self.made = 0, {}

    def whole(self) -> str:
        form, units = self.form, self.units
        for vector in self.vectors:
            self._vector(vector)
        lines: list[str] = []
        for row in self.rows:
            self.row, self.lines, self.made = row, [], {}
            self._row()
            lines += self.lines
        row_values = [(row, f"row{row}") for row in self.rows]
        pair_values = [(vector, f"pair{vector}") for vector in self.vectors]
        totals = [f"total{row}_{vector}" for row in self.rows for vector in self.vectors]
        head = [
            "tile = tl.program_id(0)",
            *self._of_several(),
            f"first = tile * {len(self.rows)}",
            f"pair = tl.program_id(1) * {len(self.vectors)}",
            f"row_bytes = {form.meta_bytes} + columns // {form.block} * {form.block_bytes}",
            *self._beginning(),
            "matrix = tl.load(matrices + (0 if SAME else pair)).to(tl.int64) * count",
            f"all_units = columns // {form.block} * {units.count}",
            *(f"{name} = data + (matrix + tl.minimum(first + {row}, count - 1)) * row_bytes" for row, name in row_values),
            *(f"{name} = tl.minimum(pair + {vector}, pairs - 1)" for vector, name in pair_values),
            *(f"vector{vector} = x + ({name} // x_per_matrix).to(tl.int64) * {self.row_of_x}" for vector, name in pair_values),
            *(f"{name} = tl.zeros([{self.lanes}], tl.float32)" for name in totals),
            "four = tl.arange(0, 4)[None, :]",
        ]
        if self.in_lanes:
            head.append(f"table = tl.load(values + tl.arange(0, {LANES}) % {self.entries})")
        body = [
            f"number = start + tl.arange(0, {self.lanes})",
            "if not EVEN:",
            "    inside = number < all_units",
            "    number = tl.minimum(number, all_units - 1)",
            f"unit = number % {units.count}",
            f"at = number // {units.count} * {form.block_bytes} + {form.meta_bytes}",
            f"column = number // {units.count} * {form.block} + {sum_text('unit', units.base, units.first)}",
        ]
        tail = []
        for row, name in row_values:
            scale = f" * {self._float(self._bytes(name, form.d), form.d_format)}" if form.d_in_meta else ""
            scale += f" * {form.unit}" if form.unit != 1.0 else ""
            for vector, pair in pair_values:
                place, inside = f"out + {pair}.to(tl.int64) * count + first + {row}", f"first + {row} < count"
                tail.append(f"tl.store({place}, tl.sum(total{row}_{vector}, axis=0){scale}, mask={inside})")
        return "\n".join([
            "import triton", "import triton.language as tl", "", "", "@triton.jit", "def product(",
            f"    {self.arguments}, EVEN: tl.constexpr, SAME: tl.constexpr, DEPENDENT: tl.constexpr,",
            "):",
            *(f"    {line}" for line in head),
            f"    for start in {self.loop}:",
            *(f"        {line}" for line in [*body, *self.places.values(), *self.loads, *self._after_loads(), *self.x, *lines]),
            *(f"    {line}" for line in tail),
            "",
        ])  # fmt: skip

    def _of_several(self) -> list[str]:
        """What makes of `tile` that of one of several matrices, where a kernel has several."""
        return []

    def _vector(self, vector: int) -> None:
        """x{vector}_{place}, and where runs are moved, sum{vector}_{run}."""
        name, places = f"x{vector}", sorted(self.units.places)
        for place in places:
            if place % 4 == 0 and {place + 1, place + 2, place + 3} <= set(places):
                parts = [f"{name}_{place + i}" for i in range(4)]
                self.x += four_at_once(parts, f"(vector{vector} + column)[:, None] + ({place} + four)", self.lanes)
            elif not {place - place % 4 + i for i in range(4)} <= set(places):
                self.x.append(f"{name}_{place} = tl.load(vector{vector} + column + {place})")
        self.x += [f"{name}_{place} = {name}_{place}.to(tl.float32)" for place in places]
        self.x += ["if not EVEN:", *(f"    {name}_{place} = tl.where(inside, {name}_{place}, 0.0)" for place in places)]
        if self.fraction or self.form.flags.count or self.form.minima.count or self.form.offset.count:
            for run in self.runs:
                members = [place for place, of in zip(self.units.places, self.units.runs, strict=True) if of == run]
                self.x.append(f"sum{vector}_{run} = {' + '.join(f'{name}_{place}' for place in members)}")

    def _factor(self, vector: int, weight: int, p: int) -> str:
        """x of a weight times 2^-p."""
        plain = f"x{vector}_{self.units.places[weight]}"
        if p and f"{plain}_{p}" not in self.scaled:
            self.scaled.add(f"{plain}_{p}")
            self.x.append(f"{plain}_{p} = {plain} * {2.0**-p!r}")
        return f"{plain}_{p}" if p else plain

    def _row(self) -> None:
        """total{row}_{vector} += products of the row's unit."""
        form, say, size = self.form, self.lines.append, self.form.size
        begun = set()
        for number in range(len(self.units.places) // size):
            for i, (value, p) in enumerate(self._values(number)):
                weight = number * size + i
                if form.sign_codes.count or (form.signs.count and not self.signs_of_runs):
                    value = f"(({value}).to(tl.int32, bitcast=True) ^ ({self._sign(weight)})).to(tl.float32, bitcast=True)"
                say(f"value = {value}")
                run = self.units.runs[weight]
                for vector in self.vectors:
                    equals = "+=" if (run, vector) in begun else "="
                    say(f"s{run}_{vector} {equals} value * {self._factor(vector, weight, p)}")
                    begun.add((run, vector))
        for run in self.runs:
            self._run(run, [f"s{run}_{vector}" + f" + {self.fraction} * sum{vector}_{run}" * bool(self.fraction)
                            for vector in self.vectors])  # fmt: skip

    def _run(self, run: int, values: list[str]) -> None:
        """total{row}_{vector} += what a run adds; values: of vectors, the sums of value * x."""
        form, say = self.form, self.lines.append
        for name, field in (("d", form.d), ("dmin", form.dmin), ("offset", form.offset)):
            if field.count and not (name == "d" and form.d_in_meta) and name not in self.made:
                self.made[name] = name
                say(f"{name} = {self._float(self._scalar(field), form.d_format if name == 'd' else 'f16')}")
        scales = ["d"] if form.d.count and not form.d_in_meta else []
        if form.scales.count:
            say(f"level = {self._field('scales', self.runs.index(run))}")
            scales.append(on_line("level", form.levels) if form.levels.step else "tl.load(levels + level)")
        if form.values.step not in (0, 1):
            scales.append(f"{float(form.values.step)}")
        say(f"scale = {' * '.join(scales) or '1.0'}")
        if form.signs.count and self.signs_of_runs:
            say(f"scale = tl.where(({self._field('signs', self.runs.index(run))}) != 0, -scale, scale)")
        if form.flags.count:
            low, high = form.shifts
            flag = self._field("flags", self.runs.index(run))
            say(f"shift = {small(flag)} * {float(high - low)} + {float(low)}")
        if form.minima.count:
            say(f"minimum = dmin * {small(self._field('minima', self.runs.index(run)))}")
        for vector, value in zip(self.vectors, values, strict=True):
            total, moved = f"total{self.row}_{vector}", f"sum{vector}_{run}"
            say(f"{total} += scale * " + (f"({value} + shift * {moved})" if form.flags.count else f"({value})"))
            if form.minima.count:
                say(f"{total} -= minimum * {moved}")
            if form.offset.count:
                say(f"{total} += offset * {moved}")

    def _values(self, number: int) -> list[tuple[str, int]]:
        """Of a code's weights: expressions of value * 2^p / step, and p."""
        form, line = self.form, self.form.values
        if line.step:
            (first, *others), p = self._code(number, None)
            bits = f"{first} ^ magic{p if line.flip else 0}"
            bits = f"({bits}) | {' | '.join(others)}" if others else bits
            return [(_difference(bits, float(line.first // line.step * 2**p)), p)]
        code = " | ".join(self._code(number, 0)[0])
        if self.in_lanes:
            return [(f"tl.gather(table, {code}, 0)", 0)]
        if form.size == 1:
            return [(f"tl.load(values + ({code}))", 0)]
        values = []
        for part in range(form.size // 4):
            entry = f"entry{number}_{part}"
            self.lines.append(f"{entry} = tl.load(values + ({code}) * {form.size // 4} + {part})")
            self.lines.append(f"{entry}_r16 = {entry} >> 16")
            values += [(_difference(f"({word} & {255 << p}) | magic0", -128 << p), p)
                       for word in (entry, f"{entry}_r16") for p in (0, 8)]  # fmt: skip
        return values

    def _code(self, number: int, at: int | None) -> tuple[list[str], int]:
        """Terms whose sum is a code at bit p of a word without other bits, and p: `at`, or where it needs no shift, if a
        float's mantissa has room there."""
        pieces = self.units.fields["codes"]
        main = max(pieces, key=lambda bits: bits.width)
        if at is None:
            at = max(main.offsets[number] % 32 - main.up, 0)
            at = at if at + sum(bits.width for bits in pieces) <= ONE_BITS else at % 16
        return [self._piece("codes", bits, number, at) for bits in sorted(pieces, key=lambda bits: bits is not main)], at

    def _field(self, field: str, number: int) -> str:
        """A number of a unit."""
        return " | ".join(self._piece(field, bits, number, 0) for bits in self.units.fields[field])

    def _piece(self, field: str, bits: UnitBits, number: int, at: int) -> str:
        """The bits of a number whose first bit is put at bit `at`, and no others."""
        word, bit = divmod(bits.offsets[number], 32)
        return (
            f"({self._shifted(self._word(field, bits, word), bit - bits.up - at)} & {((1 << bits.width) - 1) << at + bits.up})"
        )

    def _shifted(self, word: str, shift: int) -> str:
        """The name of word >> shift, made once for a row."""
        if not shift:
            return word
        name = f"{word}_{'r' if shift > 0 else 'l'}{abs(shift)}"
        if name not in self.made:
            self.made[name] = name
            self.lines.append(f"{name} = {word} {'>>' if shift > 0 else '<<'} {abs(shift)}")
        return name

    def _word(self, field: str, bits: UnitBits, word: int) -> str:
        """The name of 32 bits of a unit, loaded once for a row, in pieces as large as their addresses allow."""
        tag, form = f"{field}{bits.up}_", self.form
        named = f"{tag}row{self.row}_"
        name = f"{named}{word}"
        if name in self.made:
            return name
        self.places[f"{tag}at"] = f"{tag}at = at + {sum_text('unit', bits.bytes, bits.byte)}"
        if bits.shifts:
            self.places[f"{tag}shift"] = f"{tag}shift = {sum_text('unit', bits.shifts, 0)}"
        place = f"row{self.row} + {tag}at"
        size = -(-(max(bits.offsets) + bits.width + bits.most) // 8) - 4 * word  # bytes that are read from here on
        steps = [step for _, _, step in bits.bytes]
        aligned = int(np.gcd.reduce([16, bits.byte, form.block_bytes, form.meta_bytes, *steps]))
        if aligned == 16 and size >= 16 and word % 4 == 0:
            parts = [f"{named}{word + i}" for i in range(4)]
            self.loads += four_at_once(
                parts, f"({place} + {4 * word}).to(tl.pointer_type(tl.int32))[:, None] + four", self.lanes
            )
            self.made.update(zip(parts, parts, strict=True))
            if bits.shifts:
                self.loads += [f"{part} = {part} >> {tag}shift" for part in parts]
            return name
        step = 4 if aligned % 4 == 0 and size > 2 else 2 if aligned % 2 == 0 and size > 1 else 1
        kind = {4: "int32", 2: "uint16", 1: "uint8"}[step]
        terms = [
            f"tl.load(({place} + {4 * word + byte}).to(tl.pointer_type(tl.{kind}))).to(tl.int32)"
            + f" << {8 * byte}" * (byte > 0)
            for byte in range(0, min(4, size), step)
        ]
        self.loads.append(f"{name} = {' | '.join(terms)}")
        if bits.shifts:
            self.loads.append(f"{name} = {name} >> {tag}shift")
        self.made[name] = name
        return name

    def _sign(self, weight: int) -> str:
        """An int32 whose highest bit is a weight's sign, and no other."""
        if self.form.signs.count:
            (bits,) = self.units.fields["signs"]
            word, bit = divmod(bits.offsets[weight], 32)
            name = self._word("signs", bits, word)
        else:
            name, bit = f"eight{weight // 8}", weight % 8
            if name not in self.made:
                self.made[name] = name
                self.lines.append(f"{name} = {self._field('sign_codes', weight // 8)}")
                if self.form.scrambled:
                    self.lines.append(f"{name} = {name} ^ ({name} << 1)")
                else:
                    self.lines.append(f"parity = {name} ^ ({name} >> 4)")
                    self.lines.append("parity = parity ^ (parity >> 2)")
                    self.lines.append(f"{name} = {name} | ((parity ^ (parity >> 1)) & 1) << 7")
        return f"({name} << {31 - bit}) & {-(2**31)}"

    def _scalar(self, field: BlockField) -> str:
        """A number of the block: int32 or int16."""
        form, first = self.form, field.parts[0]
        whole = [(part.first, part.mask, part.up) for part in field.parts] == [(first.first, 255, 0), (first.first + 1, 255, 8)]
        if whole and not any(n % 2 for n in (first.first, form.block_bytes, form.meta_bytes)):
            return f"tl.load((row{self.row} + (at + {first.first})).to(tl.pointer_type(tl.int16)))"
        return self._bytes(f"row{self.row} + at", field)

    def _bytes(self, place: str, field: BlockField) -> str:
        terms = [
            f"(tl.load({place} + {part.first}).to(tl.int32) >> {part.shift} & {part.mask}) << {part.up}" for part in field.parts
        ]
        return f"({' | '.join(terms)})"

    def _float(self, bits: str, name: str) -> str:
        if name == "f16":
            return f"{bits}.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)"
        if name == "f32":
            return f"{bits}.to(tl.float32, bitcast=True)"
        return f"tl.where({bits} > 1, ({bits} - 1) << 23, (1 << 21) << {bits}).to(tl.float32, bitcast=True)"


def four_at_once(names: list[str], places: str, lanes: int) -> list[str]:
    """Loads of four neighbours at once; places: [units, 4]."""
    return [
        f"even, odd = tl.split(tl.reshape(tl.load({places}), ({lanes}, 2, 2)))",
        f"{names[0]}, {names[2]} = tl.split(even)",
        f"{names[1]}, {names[3]} = tl.split(odd)",
    ]


def _difference(bits: str, first: float) -> str:
    """The float of bits, less 2^23, plus `first`."""
    less = 2.0**ONE_BITS - first
    assert float(np.float32(less)) == less
    return f"({bits}).to(tl.float32, bitcast=True) - {less!r}"


def small(number: str) -> str:
    """The float of a whole number below 2^23."""
    return f"(({number} | {_BITS_OF_2_23}).to(tl.float32, bitcast=True) - {2.0**ONE_BITS!r})"


def on_line(code: str, line: Any) -> str:
    return f"({small(f'({code} ^ {line.flip})' if line.flip else code)} * {float(line.step)} + {float(line.first)})"
