"""Dot products of small integers: the same numbers from every instruction, and the instruction that is meant."""

import re

import numpy as np
import pytest

from ggufmill.simd.instructions import arm
from ggufmill.simd.instructions.dot_products import (
    ByteDots,
    PairDots,
    add_byte_dots,
    add_signed_byte_dots,
    add_word_pairs,
    apply_signs,
    byte_pairs,
    byte_sums,
    multiplies_signed,
    pairs_that_fit,
    word_pairs,
)
from ggufmill.simd.instructions.scaled_dots import add_scaled_dots, scales_of_dots
from ggufmill.simd.llvm import I8X64, I16, I16X32, I32, I32X16, concat, constant, shuffle, vector
from ggufmill.simd.target import Target, target, target_at

RANDOM = np.random.default_rng(0)
NEON = {
    features: Target("", "aarch64", "generic", frozenset(features.split()))
    for features in ("neon", "neon dotprod", "neon dotprod i8mm")
}
levels = pytest.mark.parametrize("level", target().levels)


def byte_cases(largest):
    """uint8 and int8 [64] and int32 [16] to add to, extremes among them."""
    for value in (-127, 127):
        yield np.full(64, largest, np.uint8), np.full(64, value, np.int8), np.zeros(16, np.int32)
    for _ in range(5):
        signed = RANDOM.integers(-127, 128, 64).astype(np.int8)
        yield (
            RANDOM.integers(0, largest + 1, 64).astype(np.uint8),
            signed,
            RANDOM.integers(-(2**20), 2**20, 16).astype(np.int32),
        )


def signed_cases():
    """int8 [64], twice, and int32 [16], extremes among them."""
    for value in (-128, 127):
        for unsigned, signed, total in byte_cases(255):
            yield np.full(64, value, np.int8), signed, total
            yield unsigned.view(np.int8), signed, total


def fours(unsigned, signed):
    return (unsigned.astype(np.int32) * signed).reshape(16, 4).sum(axis=1, dtype=np.int32)


@levels
@pytest.mark.parametrize("largest", [127, 128, 255])
def test_byte_dots(level, largest, run_piece):
    of = target_at(level)
    for unsigned, signed, total in byte_cases(largest):
        out = run_piece(
            lambda b, t, u, s: add_byte_dots(b, t, u, s, largest, of), np.zeros(16, np.int32), total, unsigned, signed
        )
        assert np.array_equal(out, total + fours(unsigned, signed))


def dots_with_a_word(of):
    """Products of all lanes with word 3 of the signed bytes, and the bias added as a caller does."""

    def generate(builder, total, unsigned, signed):
        dots = ByteDots(builder, of)
        word = builder.extract_element(builder.bitcast(signed, I32X16), I32(3))
        sums = I32(0)
        for i in range(12, 16):
            sums = builder.add(sums, builder.sext(builder.extract_element(signed, I32(i)), I32))
        start = builder.insert_element(constant(I32X16, 0), builder.mul(sums, I32(dots.bias)), I32(0))
        total = builder.add(total, shuffle(builder, start, None, [0] * 16))
        return dots.add(total, dots.unsigned(builder.bitcast(unsigned, I32X16)), dots.signed_word(word))

    return generate


@levels
def test_byte_dots_with_a_word_for_all_lanes(level, run_piece):
    for unsigned, signed, total in byte_cases(255):
        out = run_piece(dots_with_a_word(target_at(level)), np.zeros(16, np.int32), total, unsigned, signed)
        assert np.array_equal(out, total + fours(unsigned, np.tile(signed[12:16], 16)))


@levels
def test_signed_bytes(level, run_piece):
    of = target_at(level)
    if not multiplies_signed(of):
        pytest.skip("this level multiplies unsigned bytes with signed ones")
    for a, signed, total in signed_cases():
        out = run_piece(lambda b, *v: add_signed_byte_dots(b, *v, of), np.zeros(16, np.int32), total, a, signed)
        assert np.array_equal(out, total + fours(a, signed))


@levels
def test_bytes_get_signs(level, run_piece):
    of = target_at(level)
    if not of.has("ssse3"):
        pytest.skip("this level has no instruction for it")
    rng = np.random.default_rng(5)
    value, signs = (rng.integers(-127, 128, 64).astype(np.int8) for _ in range(2))
    signs[signs == 0] = 1
    out = run_piece(lambda b, *v: apply_signs(b, *v, of), np.zeros(64, np.int8), value, signs)
    assert np.array_equal(out, np.where(signs < 0, -value, value))


def scaled(of, largest, order=range(16)):
    def generate(builder, total, a, b, scales):
        (permuted,) = scales_of_dots(builder, scales, [order], of)
        return add_scaled_dots(builder, total, a, b, permuted, largest, of)

    return generate


@levels
@pytest.mark.parametrize("largest", [128, None])
def test_scaled_dots(level, largest, run_piece):
    of = target_at(level)
    if largest is None and not multiplies_signed(of):
        pytest.skip("this level multiplies unsigned bytes with signed ones")
    for a, b, total in byte_cases(largest) if largest else signed_cases():
        scales = RANDOM.integers(-200, 200, 16).astype(np.int16)
        out = run_piece(scaled(of, largest), np.zeros(16, np.int32), total, a, b, scales)
        assert np.array_equal(out, total + scales.astype(np.int32) * fours(a, b))


@levels
@pytest.mark.parametrize("order", [[0, 2, 4, 6], [0, 1, 8, 9], [13, 12, 5, 3], [1, 9, 14, 0], [2, 11, 7, 8]])
def test_scales_are_permuted(level, order, run_piece):
    """Of the first eight, of each eight in turn, of both for one half, and of its own eight for each half."""
    of, places = target_at(level), np.repeat(order, 4)
    for a, b, total in byte_cases(128):
        scales = RANDOM.integers(-200, 200, 16).astype(np.int16)
        out = run_piece(scaled(of, 128, places.tolist()), np.zeros(16, np.int32), total, a, b, scales)
        assert np.array_equal(out, total + scales[places].astype(np.int32) * fours(a, b))


@levels
def test_sums_of_bytes(level, run_piece):
    values = RANDOM.integers(0, 64, 64).astype(np.uint8)
    values[:4] = 63
    out = run_piece(lambda b, v: byte_sums(b, v, target_at(level)), np.zeros(16, np.int32), values)
    assert np.array_equal(out, values.reshape(16, 4).sum(axis=1))


@levels
@pytest.mark.parametrize("largest", [15, 31, 63, 128, 255])
def test_sums_of_pairs(level, largest, run_piece):
    """As many sums of pairs as fit 16 bits, of the largest and the smallest products among them."""
    of = target_at(level)
    if not of.has("ssse3"):
        pytest.skip("this level has no products of pairs of bytes")
    run = 32767 // (254 * largest)
    assert pairs_that_fit(largest, of) == (None if of.has_vnni or of.has_avx_vnni else run)
    if not run:
        return

    def generate(builder, total, unsigned, signed):
        dots, sums = PairDots(builder, run, of), None
        word = builder.extract_element(builder.bitcast(signed, I32X16), I32(3))
        for _ in range(run):
            sums = dots.add_pairs(sums, dots.unsigned(unsigned), dots.signed_word(word))
        return dots.widen(total, sums)

    for unsigned, signed, total in byte_cases(largest):
        out = run_piece(generate, np.zeros(16, np.int32), total, unsigned, signed)
        assert np.array_equal(out, total + run * fours(unsigned, np.tile(signed[12:16], 16)))


@levels
def test_pairs_of_bytes(level, run_piece):
    for unsigned, signed, _ in byte_cases(128):
        out = run_piece(lambda b, u, s: byte_pairs(b, u, s, target_at(level)), np.zeros(32, np.int16), unsigned, signed)
        assert np.array_equal(out, (unsigned.astype(np.int32) * signed).reshape(32, 2).sum(axis=1))


@levels
@pytest.mark.parametrize("count", [16, 32])
def test_pairs_of_words(level, count, run_piece):
    a, b = (RANDOM.integers(-(2**15) + 1, 2**15, count).astype(np.int16) for _ in range(2))
    a[:2] = b[:2] = -(2**15) + 1
    expected = (a.astype(np.int32) * b).reshape(-1, 2).sum(axis=1, dtype=np.int32)
    out = run_piece(lambda w, x, y: word_pairs(w, x, y, target_at(level)), np.zeros(count // 2, np.int32), a, b)
    assert np.array_equal(out, expected)
    if count == 32:
        total = RANDOM.integers(-1000, 1000, 16).astype(np.int32)
        out = run_piece(lambda w, t, x, y: add_word_pairs(w, t, x, y, target_at(level)), np.zeros(16, np.int32), total, a, b)
        assert np.array_equal(out, total + expected)


@pytest.fixture
def arm_instructions(monkeypatch):
    """The dot products of ARM processors, executed by what stands in for them here."""

    def fours_of(extend):
        def dots(builder, total, a, b):
            wide = vector(I32, 16)
            products = builder.mul(extend(builder)(a, wide), builder.sext(b, wide))
            for first in range(4):
                total = builder.add(total, shuffle(builder, products, None, range(first, 16, 4)))
            return total

        return dots

    def neighbours(builder, wide):
        """Sums of neighbouring numbers."""
        even, odd = (shuffle(builder, wide, None, range(first, wide.type.count, 2)) for first in (0, 1))
        return builder.add(even, odd)

    def saddlp(builder, value):
        return neighbours(builder, builder.sext(value, vector({8: I16, 16: I32}[value.type.element.width], value.type.count)))

    def addp(builder, a, b):
        return neighbours(builder, concat(builder, [a, b]))

    monkeypatch.setattr(arm, "sdot", fours_of(lambda builder: builder.sext))
    monkeypatch.setattr(arm, "usdot", fours_of(lambda builder: builder.zext))
    monkeypatch.setattr(arm, "saddlp", saddlp)
    monkeypatch.setattr(arm, "addp", addp)


@pytest.mark.slow(keep=["neon dotprod i8mm"])
@pytest.mark.parametrize("features", list(NEON))
def test_the_arithmetic_around_arm_instructions(features, run_piece, arm_instructions):
    of = NEON[features]
    for largest in (127, 128, 255):
        for unsigned, signed, total in byte_cases(largest):
            out = np.zeros(16, np.int32)
            run_piece(lambda b, t, u, s, n=largest: add_byte_dots(b, t, u, s, n, of), out, total, unsigned, signed)
            assert np.array_equal(out, total + fours(unsigned, signed))
            if multiplies_signed(of):
                a = unsigned.view(np.int8)
                run_piece(lambda b, *v: add_signed_byte_dots(b, *v, of), out, total, a, signed)
                assert np.array_equal(out, total + fours(a, signed))
            run_piece(dots_with_a_word(of), out, total, unsigned, signed)
            assert np.array_equal(out, total + fours(unsigned, np.tile(signed[12:16], 16)))
            if largest <= 128:
                scales = RANDOM.integers(-200, 200, 16).astype(np.int16)
                run_piece(scaled(of, 128), out, total, unsigned, signed, scales)
                assert np.array_equal(out, total + scales.astype(np.int32) * fours(unsigned, signed))
    values = RANDOM.integers(0, 64, 64).astype(np.uint8)
    sums = run_piece(lambda b, v: byte_sums(b, v, of), np.zeros(16, np.int32), values)
    assert np.array_equal(sums, values.reshape(16, 4).sum(axis=1))


@pytest.mark.parametrize(
    ("features", "largest", "counts"),
    [
        ("neon dotprod i8mm", 255, {"usdot": 4}),
        ("neon dotprod", 255, {"sdot": 12, "eor": 4}),
        ("neon dotprod", 127, {"sdot": 4, "eor": 0}),
        ("neon", 255, {"smull": 4, "smull2": 4, "addp": 4, "sadalp": 4, "saddlp": 8, "eor": 4}),
        ("neon", 127, {"smull": 4, "smull2": 4, "addp": 4, "sadalp": 4, "saddlp": 0, "eor": 0}),
    ],
)
def test_arm_takes_its_own_instructions(features, largest, counts, arm_assembly):
    of = NEON[features]
    text = arm_assembly(lambda b, t, u, s: add_byte_dots(b, t, u, s, largest, of), of.flags, I32X16, I8X64, I8X64)
    assert {name: len(re.findall(rf"\b{name}\b", text)) for name in counts} == counts, text


def test_arm_adds_neighbouring_bytes(arm_assembly):
    text = arm_assembly(lambda b, v: byte_sums(b, v, NEON["neon"]), "+neon", I8X64)
    assert len(re.findall(r"\baddp\b", text)) == 3


@pytest.mark.parametrize("features", list(NEON))
def test_arm_scales_integers(features, arm_assembly):
    of, ir_types = NEON[features], (I32X16, I8X64, I8X64, vector(I16, 16))
    text = arm_assembly(lambda b, t, u, s, c: scaled(of, 128)(b, t, u, s, c), of.flags, *ir_types)
    assert len(re.findall(r"\bmla\b", text)) == 4


def test_arm_multiplies_pairs_of_words_widening(arm_assembly):
    text = arm_assembly(lambda b, x, y: word_pairs(b, x, y, NEON["neon"]), "+neon", I16X32, I16X32)
    assert len(re.findall(r"\bsmull2?\b", text)) == 8
