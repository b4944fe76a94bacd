"""The layouts of all types: every bit has one meaning, and the decoder derived from them equals every other decoder.

Random bytes make every code, scale, flag and sign occur, NaN and infinite scales included.
"""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggufmill import quantize
from ggufmill.formats import TYPES, PlanError
from ggufmill.formats.layouts import decode, layout_of, tables
from ggufmill.repack import unpack

DATA = Path(__file__).parent.parent / "data"
SHARED = Path(os.environ.get("GGUFMILL_SHARED", "/nowhere"))
WITH_CODEC = [name for name, kind in TYPES.items() if quantize.can_encode(kind)]
GGUF_TYPES = {t.name.lower(): t for t in gguf.GGMLQuantizationType if t in gguf.quants._type_traits}
# iq1_bn and tq1_0: five digits to a byte; iq4_kss: words in Gray code over a bit of the scale; iq4_kt: one bit of eight codes.
SHARED_BITS = {"iq1_bn", "tq1_0", "iq4_kss", "iq4_kt"}


def random_rows(name: str, groups: int, n: int, seed: int) -> np.ndarray:
    kind = TYPES[name]
    return np.random.default_rng(seed).integers(0, 256, (groups * kind.rows, kind.row_bytes(n)), dtype=np.uint8)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal float32, signs of zeros included; a NaN equals every NaN."""
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[is_number]), np.signbit(expected[is_number]))


def golden() -> list[tuple[str, str, np.ndarray, np.ndarray]]:
    """(file, type, the reference's bytes, its floats for the first of these rows)."""
    cases = []
    files = sorted(DATA.glob("golden_*.npz"))
    if (SHARED / "golden").is_dir():
        files.append(SHARED / "golden" / "quants.npz")
    for path in files:
        with np.load(path) as arrays:
            for key in arrays.files:
                if key == "dequant" or key.endswith("/dequant"):
                    name = key.rpartition("/")[0] or path.stem.removeprefix("golden_")
                    if name not in ("iq1_bn", "iq2_bn"):  # of these two the reference's to_float leaves out the row's scale
                        cases.append((path.name, name, arrays[key.replace("dequant", "im")], arrays[key]))
    return cases


@pytest.mark.parametrize("name", list(TYPES))
def test_a_layout_accounts_for_every_bit_of_a_block(name):
    kind, layout = TYPES[name], layout_of(name)
    assert layout.block % kind.block == 0
    addresses = np.concatenate([bits.reshape(-1) for bits in layout.bit_arrays().values()])
    expected = np.arange(8 * kind.rows * (kind.row_bytes(layout.block) - kind.row_meta))
    assert np.array_equal(np.unique(addresses), expected)
    assert (len(addresses) > len(expected)) == (name in SHARED_BITS)


@pytest.mark.parametrize("name", list(TYPES))
def test_the_numbers_of_a_layout_divide_its_block(name):
    kind, layout = TYPES[name], layout_of(name)
    for field, bits in layout.bit_arrays().items():
        assert bits.ndim == 3, field
        assert len(bits) == kind.rows, field
        assert field == "sums" or layout.block % bits.shape[1] == 0, field
    assert (layout.row_scale is not None) == (kind.row_meta > 0)
    assert (layout.scales is None) == (layout.levels is None)
    assert layout.levels is None or len(layout.levels) == 1 << layout.scales.shape[-1]
    if layout.number is None:
        entries, size = layout.values.shape
        assert size == layout.size
        assert entries == 1 << layout.codes.shape[-1] or layout.digits is not None


@pytest.mark.parametrize("name", WITH_CODEC)
def test_decoder_equals_the_codec_on_random_bytes(name):
    for seed, (groups, blocks) in enumerate([(1, 1), (2, 3), (5, 5)]):
        n = blocks * layout_of(name).block
        q = random_rows(name, groups, n, seed)
        with np.errstate(all="ignore"):
            expected = quantize.decode(q, name, n)
        assert_same(decode(q, name, n), expected)


@pytest.mark.parametrize(
    ("file", "name", "q", "expected"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in golden()]
)
def test_decoder_equals_the_reference(file, name, q, expected):
    n = expected.shape[1]
    rows = -(-len(expected) // TYPES[name].rows) * TYPES[name].rows
    assert_same(decode(q[:rows], name, n)[: len(expected)], expected)


def test_interleaved_bytes_of_the_reference_decode_like_the_plain_ones():
    with np.load(DATA / "golden_repack.npz") as arrays:
        names = sorted({key.partition("/")[0] for key in arrays.files})
        assert len(names) >= 25
        for name in names:
            plain, base = arrays[f"{name}/base"], TYPES[TYPES[name].base]
            n = (plain.shape[1] - base.row_meta) // base.block_bytes * base.block
            assert_same(decode(arrays[f"{name}/packed"], name, n), decode(plain, base.name, n))


@pytest.mark.parametrize("name", [name for name in TYPES if name.lower() in GGUF_TYPES and name != "f64"])
def test_decoder_equals_that_of_the_gguf_package(name):
    n = 3 * max(TYPES[name].block, 2)
    q = random_rows(name, 4, n, 1)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(q, GGUF_TYPES[name.lower()])
    np.testing.assert_array_equal(decode(q, name, n), expected)


def test_types_of_the_gguf_package_are_among_those_compared():
    assert {"tq1_0", "tq2_0", "nvfp4", "mxfp4", "q4_k", "iq1_m"} <= GGUF_TYPES.keys() & {name.lower() for name in TYPES}


@pytest.mark.parametrize(("name", "dtype"), [("i8", "i1"), ("i16", "<i2"), ("i32", "<i4"), ("i64", "<i8"), ("f64", "<f8")])
def test_numbers(name, dtype):
    q = random_rows(name, 2, 5, 2)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(decode(q, name, 5), q.view(dtype).astype(np.float32))


def test_q8_k_r16_from_its_definition():
    """Sixteen float16 scales, then four codes of each row in turn, their highest bits flipped."""
    q = random_rows("q8_k_r16", 1, 512, 3)
    for row in range(16):
        for block in range(2):
            data = q.reshape(2, 16 * 258)[block]
            scale = data[2 * row : 2 * row + 2].view(np.float16)[0].astype(np.float32)
            e = np.arange(256)
            codes = data[32 + 64 * (e // 4) + 4 * row + e % 4] ^ 0x80
            with np.errstate(invalid="ignore"):
                expected = scale * codes.view(np.int8).astype(np.float32)
            assert_same(decode(q, "q8_k_r16", 512)[row, 256 * block : 256 * (block + 1)], expected)


@pytest.mark.parametrize(("name", "first", "scale"), [("q8_1", 4, np.float16), ("q8_K", 8, np.float32)])
def test_formats_of_activations_from_their_definition(name, first, scale):
    block = TYPES[name].block
    q = random_rows(name, 3, block, 4)
    d = np.ascontiguousarray(q[:, : np.dtype(scale).itemsize]).view(scale).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = d * np.ascontiguousarray(q[:, first : first + block]).view(np.int8).astype(np.float32)
    assert_same(decode(q, name, block), expected)


def test_q4_0_of_older_files_decodes_like_its_plain_form():
    for name in ("q4_0_4x4", "q4_0_4x8", "q4_0_8x8"):
        q = random_rows(name, 2, 96, 5)
        assert_same(decode(q, name, 96), decode(unpack(q, name, 96)[0], "q4_0", 96))


def test_value_tables_equal_the_specification():
    folder = SHARED / "spec"
    if not folder.is_dir():
        pytest.skip("GGUFMILL_SHARED has no spec")
    spec = json.loads((folder / "codebooks.json").read_text())
    for key, values, (_, shift) in (
        ("iq2nl", tables.IQ2_VALUES, tables.IQ2_SHIFTS),
        ("iq3nl", tables.IQ3_VALUES, tables.IQ3_SHIFTS),
        ("iq4k", tables.IQ4_VALUES, tables.IQ4_SHIFTS),
        ("iq5nl", tables.IQ5_VALUES, tables.IQ5_SHIFTS),
        ("iq6nl", tables.IQ6_VALUES, tables.IQ6_SHIFTS),
    ):
        assert values.tolist() == spec[key]["base"]
        assert (values + shift).tolist() == spec[key]["shifted"]
    assert tables.IQ2_KL_PAIRS.tolist() == spec["iq2kl_pairs"]
    assert tables.E2M1_DOUBLED.tolist() == spec["mxfp4"]
    assert np.array_equal(tables.IQ6_DECODED, np.array(spec["iq6k_values_fma_f32"], np.float32))
    with np.load(folder / "codebooks.npz") as grids:
        for name, grid in tables.GRIDS.items():
            scale = 8 if name == "iq1s" else 1
            assert np.array_equal(tables.codebook_values(name), grids[f"{name}_grid"].astype(int) * scale)
            assert len(grid.levels) in (3, 8)


@pytest.mark.parametrize(
    ("name", "shape", "n"), [("q4_K", (1, 143), 256), ("q4_k_r4", (2, 144), 256), ("bf16_r16", (16, 6), 3)]
)
def test_rows_that_fill_no_groups_are_refused(name, shape, n):
    with pytest.raises(PlanError, match=f"{name} rows of {n} elements"):
        decode(np.zeros(shape, np.uint8), name, n)


def test_names_in_any_case_and_unknown_ones():
    assert layout_of("Q4_k") is not None
    assert np.array_equal(layout_of("q8_kv_R8").codes, layout_of("q8_KV_r8").codes)
    with pytest.raises(KeyError):
        layout_of("q9_K")
