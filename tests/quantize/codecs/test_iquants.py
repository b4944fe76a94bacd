"""The iq1, iq2 and iq3 types: decoders against the gguf package and the layouts; errors of encoders."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats import TYPES
from ggufmill.quantize import can_encode, decode, encode
from ggufmill.quantize.codecs.iquants import codebooks
from ggufmill.quantize.codecs.iquants.codebooks import NEIGHBOURS, codebook

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_iquants.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
STANDARD = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
INTERLEAVED = ("iq1_s_r4", "iq1_m_r4")
PACKED = ("iq2_xxs_r4", "iq2_xs_r4", "iq2_s_r4", "iq3_xxs_r4", "iq3_s_r4")
ALL = STANDARD + INTERLEAVED
GRIDS = ("iq1s", "iq2xxs", "iq2xs", "iq2s", "iq3xxs", "iq3s")


def bits(y):
    return y.view(np.uint32)


def error(x, y, importance=None):
    """Weighted squared error relative to the weighted square of x."""
    w = np.ones(x.shape[1]) if importance is None else importance
    return ((y.astype(float) - x) ** 2 * w).sum() / (x.astype(float) ** 2 * w).sum()


def random_bytes(name, n, rows, seed=5):
    """Random bytes of a type with normally distributed float16 scales."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 256, (rows, TYPES[name].row_bytes(n)), np.uint8)
    scales = rng.standard_normal(rows * n).astype(np.float16).view(np.uint8)
    if name in INTERLEAVED:
        groups = q.reshape(rows // 4, -1)
        groups[:, :8] = scales[: groups[:, :8].size].reshape(-1, 8)
    elif name == "iq1_m":  # d is in the top nibbles of four words, its sign and exponent in the last one
        q.reshape(-1, 56)[:, 55] &= 0x3F
    else:
        blocks = q.reshape(-1, TYPES[name].block_bytes)
        blocks[:, :2] = scales[: 2 * len(blocks)].reshape(-1, 2)
    return q


def test_decode_of_random_iq1_m_bytes_matches_gguf():
    q = random_bytes("iq1_m", 1024, 8)
    expected = dequantize(q, gguf.GGMLQuantizationType.IQ1_M)
    assert np.array_equal(bits(decode(q, "iq1_m", 1024)), bits(expected))


def decode_interleaved(name, q, n):
    """By docs/formats/interleaved.md, element by element."""
    levels = (codebook("iq1s").points[:, None] >> (2 * np.arange(8)) & 3).astype(np.float32) - 1
    out = np.empty((len(q), n), np.float32)
    size = 24 if name == "iq1_s_r4" else 28
    for group in range(len(q) // 4):
        group_bytes = q[4 * group : 4 * group + 4].reshape(-1)
        d = group_bytes[:8].view(np.float16).astype(np.float32)
        for c in range(n // 32):
            block = group_bytes[8 + size * c : 8 + size * (c + 1)]
            for k in range(4):
                for g in range(4):
                    if name == "iq1_s_r4":
                        word = int(block[16:].view(np.uint16)[k])
                        high, minus, scale = word >> (3 * g) & 7, word >> 15, 2 * (word >> 12 & 7) + 1
                    else:
                        nibble = int(block[16 + 4 * (g // 2) + k]) >> (4 * (g % 2)) & 15
                        high, minus, scale = nibble & 7, nibble >> 3, int(block[24 + k]) >> (4 * (g // 2)) & 15
                    values = levels[int(block[4 * g + k]) | high << 8] + np.float32(-0.125 if minus else 0.125)
                    at = 32 * c + 8 * g
                    out[4 * group + k, at : at + 8] = d[k] * np.float32(scale) * values
    return out


@pytest.mark.parametrize("name", INTERLEAVED)
def test_decode_of_interleaved_types_follows_the_layout(name):
    for q, n in ((random_bytes(name, 96, 8), 96), (np.ascontiguousarray(GOLDEN[f"{name}/im"][:4]), 1024)):
        assert np.array_equal(bits(decode(q, name, n)), bits(decode_interleaved(name, q, n)))


# The reference does not encode all of them without importance.
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in ALL for case in ("im", "no") if f"{name}/{case}" in GOLDEN]
)
def test_error_is_well_below_that_of_the_reference(name, case):
    importance = IMATRIX if case == "im" else None
    reference = error(X, decode(GOLDEN[f"{name}/{case}"], name, 1024), importance)
    assert error(X, decode(encode(X, name, importance), name, 1024), importance) < 0.9 * reference


# Relative squared error of normally distributed weights; 2^(-2 * bits per weight) is the rate-distortion bound.
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("iq1_s", 0.225),
        ("iq1_m", 0.195),
        ("iq1_s_r4", 0.225),
        ("iq1_m_r4", 0.19),
        ("iq2_xxs", 0.115),
        ("iq2_xs", 0.09),
        ("iq2_s", 0.0625),
        ("iq3_xxs", 0.0335),
        ("iq3_s", 0.018),
    ],
)
def test_error_of_normal_weights_at_any_magnitude(name, limit):
    x = np.random.default_rng(6).standard_normal((8, 512)).astype(np.float32)
    bound = 2.0 ** (-2 * 8 * TYPES[name].row_bytes(512) / 512)
    for magnitude in (0.02, 1, 1000):
        scaled = x * np.float32(magnitude)
        assert bound < error(scaled, decode(encode(scaled, name), name, 512)) < limit


@pytest.mark.parametrize("name", ALL)
def test_encoding_decoded_rows_again_changes_little(name):
    y = decode(encode(X, name), name, 1024)
    assert error(y, decode(encode(y, name), name, 1024)) < 0.35 * error(X, y)


@pytest.mark.parametrize("name", ["iq1_s", "iq1_m", "iq1_s_r4", "iq1_m_r4"])
def test_iq1_types_preserve_the_norm(name):
    """With least squares alone it would be 0.93 to 0.96 of the original."""
    x = np.random.default_rng(6).standard_normal((8, 512)).astype(np.float32)
    assert 0.98 < np.linalg.norm(decode(encode(x, name), name, 512)) / np.linalg.norm(x) < 1.06


@pytest.mark.parametrize("name", ALL)
def test_important_columns_have_lower_errors(name):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((8, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 2 == 0, 100, 1).astype(np.float32)
    squares = (decode(encode(x, name, importance), name, 256) - x) ** 2
    assert squares[:, ::2].mean() < 0.7 * squares[:, 1::2].mean()


@pytest.mark.parametrize("name", ALL)
def test_a_factor_on_the_importance_changes_nothing(name):
    want = encode(X[:4], name, IMATRIX)
    for factor in (2.0**-20, 2.0**30):
        assert np.array_equal(encode(X[:4], name, IMATRIX * np.float32(factor)), want)
    ones = encode(X[:4], name, np.full(1024, 8, np.float32))
    assert error(X[:4], decode(ones, name, 1024)) == pytest.approx(
        error(X[:4], decode(encode(X[:4], name), name, 1024)), rel=1e-3
    )


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name):
    x = np.zeros((4, 256), np.float32)
    for importance in (None, np.ones(256, np.float32), np.zeros(256, np.float32)):
        assert not decode(encode(x, name, importance), name, 256).any()


@pytest.mark.parametrize("name", ALL)
def test_superblocks_without_importance_are_still_encoded_well(name):
    x = np.random.default_rng(8).standard_normal((4, 768)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 256)
    y = decode(encode(x, name, importance), name, 768)
    for columns in (slice(0, 256), slice(256, 512), slice(512, 768)):
        assert error(x[:, columns], y[:, columns]) < 0.3


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_rows_of_any_multiple_of_32(name):
    x = np.random.default_rng(9).standard_normal((8, 96)).astype(np.float32)
    q = encode(x, name)
    assert error(x, decode(q, name, 96)) < 0.25
    assert np.array_equal(encode(x[4:], name), q[4:])


@pytest.mark.parametrize("name", PACKED)
def test_packed_types_equal_their_base_types(name):
    assert can_encode(TYPES[name])
    y = decode(encode(X[:4], name, IMATRIX), name, 1024)
    assert np.array_equal(y, decode(encode(X[:4], TYPES[name].base, IMATRIX), TYPES[name].base, 1024))


def test_decode_of_packed_bytes_of_the_reference():
    y = decode(GOLDEN["iq2_xs_r4/im"], "iq2_xs_r4", 1024)
    assert np.array_equal(y, decode(GOLDEN["iq2_xs/im"][:4], "iq2_xs", 1024))


def test_neighbours_take_little_memory_and_are_found_once(monkeypatch):
    """Those of iq1_s took 150 MiB, in each thread that encoded its first rows at the same time."""
    codebook("iq1s")  # reads the points
    found, find = [], codebooks._nearest_points
    monkeypatch.setattr(codebooks, "_nearest_points", lambda *given: found.append(len(given[0])) or find(*given))
    codebooks._found.cache_clear()
    tracemalloc.start()
    with ThreadPoolExecutor(4) as pool:
        books = list(pool.map(codebook, ["iq1s"] * 4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [3**8]
    assert all(book is books[0] for book in books)
    assert peak < 20 << 20


@pytest.mark.parametrize("name", GRIDS)
def test_neighbours_are_the_nearest_grid_points(name):
    book = codebook(name)
    shifts, mask = book.bits * np.arange(book.size), (1 << book.bits) - 1
    points = book.levels[book.points[:, None] >> shifts & mask]
    neighbours = book.levels[book.neighbours.reshape(-1, NEIGHBOURS)[:, :, None] >> shifts & mask]
    count = len(book.levels)
    for rank in np.random.default_rng(4).integers(0, len(book.grid_index), 50):
        level = rank // count ** np.arange(book.size) % count
        code = int((level << shifts).sum())
        assert book.ranks[0, code & 255] + book.ranks[1, code >> 8] == rank
        distances = ((points - book.levels[level]) ** 2).sum(axis=1)
        neighbour_distances = ((neighbours[rank] - book.levels[level]) ** 2).sum(axis=1)
        assert np.array_equal(neighbour_distances, np.sort(distances)[:NEIGHBOURS])
        assert (book.grid_index[rank] >= 0) == (distances.min() == 0)
        if book.grid_index[rank] >= 0:
            assert book.points[book.grid_index[rank]] == code
