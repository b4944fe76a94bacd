"""Compiles the layout of an interleaved type to the `BitPermutation`s that pack and unpack its rows."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import groupby

import numpy as np

from ..formats import TYPES, TensorType, layouts
from .bit_permutation import BitPermutation

_ALL_BITS = 0xFFFFFFFF
_Sources = list[list[tuple[int, int]]]  # for each destination bit: (row, bit address) of the bits whose XOR it is
_Term = tuple[int, int, int, int]  # row, offset, rotation to the right, mask
_Step = tuple[int, int, int]  # see BitPermutation.step


@cache
def block_bytes(packed: TensorType) -> int:
    """Bytes of one row that the permutations of this interleaved type take at a time: a block, for bf16 two elements."""
    return layouts.interleaving_of(packed.name).blocks * packed.block_bytes


@cache
def permutations(name: str) -> tuple[BitPermutation, BitPermutation]:
    """(pack, unpack) of the interleaved type of this name. Raises KeyError for a type that is no permutation of another."""
    tensor_type, interleaving = TYPES[name], layouts.interleaving_of(name)
    rows, size = tensor_type.rows, block_bytes(tensor_type)
    pack_sources: _Sources = [[] for _ in range(8 * size * rows)]
    unpack_sources: list[_Sources] = [[[] for _ in range(8 * size)] for _ in range(rows)]
    chained = set()  # interleaved bits to which the bit below is XORed: the upper ones of scrambled numbers
    for row, plain_bit, packed_bit, is_chained in _bits(tensor_type, rows, size):
        pack_sources[packed_bit].append((row, plain_bit))
        unpack_sources[row][plain_bit].append((0, packed_bit))
        if is_chained:
            chained.add(packed_bit)
            unpack_sources[row][plain_bit].append((0, packed_bit - 1))
    flips = [interleaving.flip if at >= interleaving.flip_from else 0 for at in range(size * rows)]
    pack_initial = [[bool(flips[bit // 8] >> bit % 8 & 1) for bit in range(8 * size * rows)]]
    unpack_initial = [
        [sum(flips[p // 8] >> p % 8 & 1 for _, p in sources) % 2 == 1 for sources in block] for block in unpack_sources
    ]
    pack = _compile([pack_sources], pack_initial, chained, size)
    return pack, _compile(unpack_sources, unpack_initial, set(), size * rows)


def _bits(tensor_type: TensorType, rows: int, size: int) -> list[tuple[int, int, int, bool]]:
    """Of all bits: row, bit of the plain block, bit of the interleaved block, whether it is an upper bit of a scrambled number.

    Raises AssertionError if the layout does not place every bit exactly once.
    """
    from ..formats.layouts.table import plain_parts

    bits: list[tuple[int, int, int, bool]] = []
    for part, plain in plain_parts(tensor_type.name):
        numbers, width = plain.shape
        target = part.place(rows, numbers, width)
        upper = [part.scrambled and bit > 0 for bit in range(width)] * numbers
        for row in range(rows):
            bits += zip([row] * (numbers * width), plain.ravel().tolist(), target[row].ravel().tolist(), upper, strict=True)
    total = 8 * size * rows
    if len({bit[:2] for bit in bits}) != total or sorted(bit[2] for bit in bits) != list(range(total)):
        raise AssertionError(f"the layout of {tensor_type.name} does not place every bit exactly once")
    return bits


def _compile(blocks: list[_Sources], initial: list[list[bool]], chained: set[int], source_bytes: int) -> BitPermutation:
    """The permutation that writes destination blocks, one for each row, all cut into words in the same way."""
    size = len(blocks[0]) // 8
    words = min(
        (_words(size, first) for first in sorted({0, size % 4})),
        key=lambda words: sum(len(_word_terms(blocks[0], *word, set(), source_bytes)[0]) for word in words),
    )
    row_words = [
        (row, word[0], *_word_terms(block, *word, chained, source_bytes)) for row, block in enumerate(blocks) for word in words
    ]
    runs = [(key, len(list(group))) for key, group in groupby(row_words, lambda word: _counts(word[2], word[3]))]
    terms = np.array([term for _, _, terms, _ in row_words for term in terms], np.int64)
    steps = [step for _, _, _, steps in row_words for step in steps]
    return BitPermutation(
        word_row=np.array([row for row, _, _, _ in row_words]),
        word_offset=np.array([at for _, at, _, _ in row_words]),
        initial=np.array([sum(initial[row][8 * at + b] << b for b in range(32)) for row, at, _, _ in row_words], np.uint32),
        runs=np.array([(number, *key) for key, number in runs]),
        term_row=np.ascontiguousarray(terms[:, 0]),
        term_offset=np.ascontiguousarray(terms[:, 1]),
        rotation=terms[:, 2].astype(np.uint32),
        mask=terms[:, 3].astype(np.uint32),
        step=np.array(steps, np.uint32).reshape(-1, 3),
    )


def _counts(terms: list[_Term], steps: list[_Step]) -> tuple[int, int]:
    """Numbers of terms and of steps as `BitPermutation.runs` counts them."""
    is_copy = len(terms) == 1 and not steps and terms[0][2:] == (0, _ALL_BITS)
    return (0 if is_copy else len(terms)), len(steps)


def _words(size: int, first: int) -> list[tuple[int, range]]:
    """(offset, bytes that it has to set) of the words that cover `size` bytes, one after the other from `first` on.

    Where bytes are left at either end, a word that covers them comes before the one that writes the rest of its bytes again.
    """
    inner = range(first, size - 3, 4)
    words = [(at, range(at, at + 4)) for at in inner]
    end = inner[-1] + 4
    ends = [(0, range(first))] if first else []
    if end < size:
        ends.append((size - 4, range(end, size)))
    return ends + words


def _word_terms(
    block: _Sources, at: int, owned: range, chained: set[int], source_bytes: int
) -> tuple[list[_Term], list[_Step]]:
    """The terms and steps that make the word at byte `at`."""
    bits = {(bit, row, p) for bit in range(32) if at + bit // 8 in owned for row, p in block[8 * at + bit]}
    steps = _running_xor(sum(1 << bit for bit in range(32) if 8 * at + bit in chained))
    rows, lowest = {row for _, row, _ in bits}, min(p for _, _, p in bits)
    if len(rows) == 1 and lowest % 8 == 0:  # perhaps a permuted copy of a single word
        swaps = _index_swaps([p - lowest for _, _, p in sorted(bits)])
        if swaps:
            return [(rows.pop(), lowest // 8, 0, _ALL_BITS)], swaps + steps
    return _terms(bits, source_bytes), steps


def _terms(bits: set[tuple[int, int, int]], source_bytes: int) -> list[_Term]:
    """Terms for the bits (destination bit, row, source bit address): greedily, the term that moves the most bits next."""
    choices: dict[tuple[int, int, int], set[tuple[int, int, int]]] = defaultdict(set)
    for bit, row, p in bits:
        for offset in range(max(0, p // 8 - 3), min(p // 8, source_bytes - 4) + 1):
            choices[row, offset, (p - 8 * offset - bit) % 32].add((bit, row, p))
    terms = []
    while bits:
        best = max(choices, key=lambda choice: (len(choices[choice] & bits), choice))
        moved = choices[best] & bits
        bits = bits - moved
        terms.append((*best, sum(1 << bit for bit, _, _ in moved)))
    return terms


def _index_swaps(source: list[int]) -> list[_Step]:
    """Steps that bring bit source[b] of a word to bit b, if that only permutes the five binary digits of b; else none.

    Exchanging two digits i < j moves the bits that have digit i set and j clear up by 2^j - 2^i, and back.
    """
    digits = [source[1 << j] for j in range(5)] if len(source) == 32 else []
    if sorted(digits) != [1 << j for j in range(5)]:
        return []
    if any(source[b] != sum(digits[j] for j in range(5) if b >> j & 1) for b in range(32)):
        return []
    order = [d.bit_length() - 1 for d in digits]  # digit j of the target is digit order[j] of the source
    steps, now = [], list(range(5))
    for j in range(5):
        i = now.index(order[j])
        if i != j:
            now[i], now[j] = now[j], now[i]
            low, high = min(i, j), max(i, j)
            mask = sum(1 << b for b in range(32) if b >> low & 1 and not b >> high & 1)
            steps.append(((1 << high) - (1 << low), mask, _ALL_BITS))
    return steps


def _running_xor(upper: int) -> list[_Step]:
    """Steps after which each bit of `upper` is the XOR of itself and the bits below it, down to the first not in `upper`.

    Distances 1, 2, 4 do for numbers of up to eight bits.
    """
    two = upper & upper << 1
    four = two & two << 1 & two << 2
    return [(s, (m & _ALL_BITS) >> s, 0) for s, m in ((1, upper), (2, two), (4, four)) if m]
