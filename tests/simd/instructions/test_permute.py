"""Look-ups in small tables, by every instruction that does them."""

import re

import numpy as np
import pytest

from ggufmill.simd.instructions import arm
from ggufmill.simd.instructions.permute import lookup_bytes, lookup_floats, mask_of_bits, permute_bytes
from ggufmill.simd.llvm import F32X16, I8, I8X64, I32, I32X16, I64, concat, vector
from ggufmill.simd.target import Target, target, target_at

RANDOM = np.random.default_rng(1)
NEON = Target("neon", "aarch64", "generic", frozenset({"neon"}))
levels = pytest.mark.parametrize("level", target().levels)


@levels
@pytest.mark.parametrize("entries", [3, 16, 17, 32, 50, 64])
@pytest.mark.parametrize("count", [16, 64])
def test_constant_tables_of_bytes(level, entries, count, run_piece):
    table = RANDOM.integers(0, 256, entries)
    codes = RANDOM.permutation(np.resize(np.arange(entries, dtype=np.uint8), count))
    codes[:2] = 0, entries - 1
    out = run_piece(lambda b, c: lookup_bytes(b, list(table), c, target_at(level)), np.zeros(count, np.uint8), codes)
    assert np.array_equal(out, table[codes])


@levels
def test_permutation_of_bytes(level, run_piece):
    table, codes = RANDOM.integers(0, 256, 16).astype(np.uint8), RANDOM.permutation(16).astype(np.uint8)
    out = run_piece(lambda b, t, c: permute_bytes(b, t, c, target_at(level)), np.zeros(16, np.uint8), table, codes)
    assert np.array_equal(out, table[codes])


def as_bytes(of):
    """255 where a lane of the mask of 64 bits is set."""
    return lambda b, bits: b.sext(mask_of_bits(b, b.extract_element(bits, I32(0)), of), I8X64)


@levels
def test_masks_of_bits(level, run_piece):
    bits = RANDOM.integers(0, 2, 64).astype(np.uint8)
    out = run_piece(as_bytes(target_at(level)), np.zeros(64, np.uint8), np.packbits(bits, bitorder="little").view(np.int64))
    assert np.array_equal(out, 255 * bits)
    assert np.array_equal(run_piece(as_bytes(NEON), out, np.packbits(bits, bitorder="little").view(np.int64)), 255 * bits)


@levels
@pytest.mark.parametrize("tables", [1, 2, 4])
def test_tables_of_floats(level, tables, run_piece):
    table = RANDOM.standard_normal((tables, 16)).astype(np.float32)
    for start in range(0, 16 * tables, 16):
        indices = (start + RANDOM.permutation(16)).astype(np.int32)
        given = indices + 48 if tables == 1 else indices  # of a single table the low four bits count
        out = run_piece(
            lambda b, i, *t: lookup_floats(b, list(t), i, target_at(level)), np.zeros(16, np.float32), given, *table
        )
        assert np.array_equal(out, table.reshape(-1)[indices])


def test_the_arithmetic_around_arm_look_ups(run_piece, monkeypatch):
    def tbl(builder, tables, codes):
        table, values = concat(builder, tables), codes
        for lane in range(16):
            code = builder.zext(builder.extract_element(codes, I32(lane)), I32)
            values = builder.insert_element(values, builder.extract_element(table, code), I32(lane))
        return values

    monkeypatch.setattr(arm, "tbl", tbl)
    table, codes = RANDOM.integers(0, 256, 64), RANDOM.permutation(64).astype(np.uint8)
    out = run_piece(lambda b, c: lookup_bytes(b, list(table), c, NEON), np.zeros(64, np.uint8), codes)
    assert np.array_equal(out, table[codes])
    floats, indices = RANDOM.standard_normal((4, 16)).astype(np.float32), RANDOM.permutation(64)[:16].astype(np.int32)
    out = run_piece(lambda b, i, *t: lookup_floats(b, list(t), i, NEON), np.zeros(16, np.float32), indices, *floats)
    assert np.array_equal(out, floats.reshape(-1)[indices])


@pytest.mark.parametrize(("entries", "registers"), [(16, 1), (32, 2), (64, 4)])
def test_arm_looks_bytes_up_in_registers(entries, registers, arm_assembly):
    table = list(range(entries))
    text = arm_assembly(lambda b, c: lookup_bytes(b, list(table), c, NEON), "+neon", I8X64)
    operand_lists = re.findall(r"\btbl\s+v\d+\.16b, \{(.*?)\}", text)
    assert len(operand_lists) == 4
    assert {_registers(operands) for operands in operand_lists} == {registers}


def test_arm_looks_floats_up_by_their_bytes(arm_assembly):
    text = arm_assembly(lambda b, t, i: lookup_floats(b, [t], i, NEON), "+neon", F32X16, I32X16)
    operand_lists = re.findall(r"\btbl\s+v\d+\.16b, \{(.*?)\}", text)
    assert [_registers(operands) for operands in operand_lists] == [4] * 4
    assert re.search(r"\btbl\b", arm_assembly(lambda b, t, c: permute_bytes(b, t, c, NEON), "+neon", *[vector(I8, 16)] * 2))


def test_arm_makes_masks_of_bits_without_taking_them_out_one_by_one(arm_assembly):
    text = arm_assembly(as_bytes(NEON), "+neon", vector(I64, 1))
    assert len(re.findall(r"\bcmtst\b", text)) == 4
    assert not re.search(r"\b(umov|ubfx|sbfx)\b", text)


def _registers(operands: str) -> int:
    """How many registers "v0.16b", "v0.16b, v1.16b" or "v0.16b - v3.16b" are."""
    numbers = [int(n) for n in re.findall(r"v(\d+)", operands)]
    return (numbers[-1] - numbers[0]) % 32 + 1
