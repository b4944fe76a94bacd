"""pack and unpack against packed bytes of the reference implementation, and as inverses of each other for random bytes.

data/golden_repack.npz: TYPE/base and TYPE/packed, the reference quantiser's output for the same float rows in the plain and in
the interleaved type: one group of rows, 512 columns (q8_KV, whose row scale depends on all columns: 1024).
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, PlanError
from ggufmill.formats.layouts.interleaved import INTERLEAVINGS
from ggufmill.repack import pack, unpack

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden_repack.npz")
PACKED = [t.name for t in TYPES.values() if t.base]
WITH_GOLDEN = sorted({name.partition("/")[0] for name in GOLDEN.files})


def random_rows(name: str, groups: int, blocks: int, seed: int) -> tuple[np.ndarray, int]:
    """Random bytes for complete groups of the packed type's base, and the row length."""
    packed, base = TYPES[name], TYPES[str(TYPES[name].base)]
    n = blocks * (packed.block if packed.block > 1 else 2)
    q = np.random.default_rng(seed).integers(0, 256, (groups * packed.rows, base.row_bytes(n)), dtype=np.uint8)
    if base.name == "q8_KV":  # the sum of the quants is not free to choose
        q[:, 4:8] = q[:, 8:].view(np.int8).sum(axis=1, dtype="<i4")[:, None].view(np.uint8)
    return q, n


def test_every_type_with_a_base_has_a_layout():
    assert set(PACKED) == set(INTERLEAVINGS)
    # No reference bytes exist for these four; the tests below build them from the written definition.
    assert set(PACKED) - set(WITH_GOLDEN) == {"q4_0_4x4", "q4_0_4x8", "q4_0_8x8", "bf16_r16"}


@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_bytes_equal_the_reference(name):
    base, packed = GOLDEN[f"{name}/base"], GOLDEN[f"{name}/packed"]
    packed_type = TYPES[name]
    n = (base.shape[1] - TYPES[str(packed_type.base)].row_meta) // TYPES[str(packed_type.base)].block_bytes * packed_type.block
    out, out_name = pack(base, str(packed_type.base), n)
    assert out_name == name
    np.testing.assert_array_equal(out, packed)
    back, back_name = unpack(packed, name, n)
    assert back_name == packed_type.base
    np.testing.assert_array_equal(back, base)


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=12, deadline=None)
@given(groups=st.integers(1, 3), blocks=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_unpack_inverts_pack(name, groups, blocks, seed):
    q, n = random_rows(name, groups, blocks, seed)
    packed, packed_name = pack(q, name, n)
    assert packed_name == name
    assert packed.shape == (len(q), TYPES[name].row_bytes(n))
    back, base = unpack(packed, name, n)
    assert base == TYPES[name].base
    np.testing.assert_array_equal(back, q)
    again, _ = pack(back, base if "_4x" not in name and "_8x" not in name else name, n)
    np.testing.assert_array_equal(again, packed)


@pytest.mark.parametrize("name", PACKED)
def test_groups_and_blocks_are_packed_independently(name):
    """A group of rows alone gives the same bytes as among others; so does a run of blocks, without row scales."""
    q, n = random_rows(name, 2, 6, 7)
    packed_type, base = TYPES[name], TYPES[str(TYPES[name].base)]
    all_groups, _ = pack(q, name, n)
    np.testing.assert_array_equal(pack(q[packed_type.rows :], name, n)[0], all_groups[packed_type.rows :])
    if base.row_meta == 0:
        half = pack(q[: packed_type.rows, : base.row_bytes(n // 2)], name, n // 2)[0]
        np.testing.assert_array_equal(half.ravel(), all_groups[: packed_type.rows].ravel()[: half.size])


def test_bf16_r16_from_its_definition():
    q, n = random_rows("bf16_r16", 2, 5, 1)
    words = q.view("<u2")
    want = np.empty(words.size, "<u2")
    for row in range(32):
        for e in range(n):
            want[row // 16 * 16 * n + 32 * (e // 2) + 2 * (row % 16) + e % 2] = words[row, e]
    packed, name = pack(q, "bf16", n)
    assert name == "bf16_r16"
    np.testing.assert_array_equal(packed.view("<u2").ravel(), want)


@pytest.mark.parametrize(("name", "rows", "run"), [("q4_0_4x4", 4, 4), ("q4_0_4x8", 4, 8), ("q4_0_8x8", 8, 8)])
def test_q4_0_types_of_older_files_from_their_definition(name, rows, run):
    q, n = random_rows(name, 1, 3, 2)
    blocks = q.reshape(rows, 3, 18)
    want = []
    for block in range(3):
        want += blocks[:, block, :2].ravel().tolist()
        for t in range(16 * rows):
            row, source = t % (rows * run) // run, t // (rows * run) * run + t % run
            want.append(blocks[row, block, 2 + source] ^ 0x88)
    np.testing.assert_array_equal(pack(q, name, n)[0].ravel(), want)


def test_unpack_recomputes_the_row_sums_of_q8_kv():
    q, n = random_rows("q8_KV_r8", 1, 4, 3)
    broken = q.copy()
    broken[:, 4:8] = 0  # a wrong sum is not copied
    np.testing.assert_array_equal(unpack(pack(broken, "q8_KV", n)[0], "q8_KV_r8", n)[0], q)


def test_input_may_be_a_read_only_or_strided_view():
    q, n = random_rows("iq4_ks_r4", 2, 3, 4)
    want = pack(q, "iq4_ks", n)[0]
    wide = np.zeros((len(q), q.shape[1] + 5), np.uint8)
    wide[:, 3:-2] = q
    view = wide[:, 3:-2]
    view.flags.writeable = False
    np.testing.assert_array_equal(pack(view, "IQ4_KS", n)[0], want)
    np.testing.assert_array_equal(wide[:, 3:-2], q)


def test_zero_rows():
    packed, _ = pack(np.empty((0, 18), np.uint8), "q4_0", 32)
    assert packed.shape == (0, 18)
    assert unpack(packed, "q4_0_r8", 32)[0].shape == (0, 18)


@pytest.mark.parametrize(
    ("action", "shape", "name", "n", "message"),
    [
        (pack, (4, 144), "iq6_k", 256, "no repacked form of iq6_k"),
        (pack, (4, 194), "iq1_s_r4", 1024, "no repacked form of iq1_s_r4"),
        (unpack, (4, 144), "q4_K", 256, "no plain form of q4_K"),
        (unpack, (4, 194), "iq1_s_r4", 1024, "no plain form of iq1_s_r4"),
        (pack, (6, 144), "q4_K", 256, "q4_k_r4 interleaves 4 rows; 6 rows"),
        (unpack, (4, 34), "q8_0_r8", 32, "q8_0_r8 interleaves 8 rows; 4 rows"),
        (pack, (4, 145), "q4_K", 256, "take 144 bytes"),
        (pack, (4, 144), "q4_K", 512, "take 288 bytes"),
        (unpack, (8, 33), "q8_0_r8", 32, "take 34 bytes"),
        (pack, (4, 144), "q4_K", 250, "multiple of 256"),
        (pack, (16, 6), "bf16", 3, "even number of elements"),
        (pack, (576,), "q4_K", 256, "take 144 bytes"),
        (pack, (4, 144), "q9_K", 256, "unknown tensor type 'q9_K'"),
    ],
)
def test_refusals(action, shape, name, n, message):
    with pytest.raises(PlanError, match=message):
        action(np.zeros(shape, np.uint8), name, n)


def test_arrays_of_another_dtype_are_refused():
    with pytest.raises(PlanError, match="int8"):
        pack(np.zeros((4, 144), np.int8), "q4_K", 256)
