"""Codecs of all families against bytes and floats of the reference implementation, and against the gguf package's decoder."""

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode

DATA = Path(__file__).parents[2] / "data"


class Golden(NamedTuple):
    """Of one type: rows, importance, the reference's bytes with and without importance, its floats for the first rows of `im`.

    What the file does not have is None.
    """

    x: np.ndarray
    imatrix: np.ndarray
    im: np.ndarray
    no: np.ndarray | None
    dequant: np.ndarray | None


def load_golden(family: str, rows: str) -> dict[str, Golden]:
    """Type name -> its golden data in golden_FAMILY.npz; rows: the family whose file has x and imatrix."""
    inputs, file = (np.load(DATA / f"golden_{name}.npz") for name in (rows, family))
    golden = {}
    for prefix in {key.removesuffix("im") for key in file.files if key.rpartition("/")[2] == "im"}:
        arrays = (file[key] if (key := prefix + part) in file.files else None for part in ("im", "no", "dequant"))
        golden[prefix.rstrip("/") or family] = Golden(inputs["x"], inputs["imatrix"], *arrays)
    return dict(sorted(golden.items()))


FAMILIES = {
    "standard": "standard",
    "legacy": "standard",
    "kquants": "standard",
    "iq4": "standard",
    "iquants": "standard",
    "mxfp4": "standard",
    "llama_cpp": "standard",
    "q8_rows": "standard",
    "iqk": "iqk",
    "iq2_kl": "iqk",
    "iq4_kss": "iqk",
    "trellis": "trellis",
}
GOLDEN = {name: golden for family, rows in FAMILIES.items() for name, golden in load_golden(family, rows).items()}

# Types whose encoders give the reference's bytes, with and without importance. The others are searched more thoroughly, or
# differ in near-ties: their families' tests compare errors.
EXACT = (
    *("q8_0", "q5_0", "q5_1", "q4_1", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"),
    *("iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq3_ks", "iq4_ks", "iq5_ks"),
    *("q8_KV", "q8_KV_r8", "q8_k_r8", "tq1_0", "tq2_0", "q2_0"),
)
WITHOUT_IMPORTANCE = (
    "q8_0",
    "q8_KV",
    "q8_KV_r8",
    "q8_k_r8",
    "tq1_0",
    "tq2_0",
    "q2_0",
)  # the same bytes whether there is importance or not

# Bytes of a block that hold its float16 scales and minima, of types that the gguf package decodes.
SCALES_AT = {
    **dict.fromkeys(("q8_0", "q5_0", "q4_0", "iq4_nl", "iq4_xs"), slice(0, 2)),
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), slice(0, 2)),
    **dict.fromkeys(("q5_1", "q4_1", "q4_K", "q5_K"), slice(0, 4)),
    "q2_K": slice(80, 84),
    "q3_K": slice(108, 110),
    "q6_K": slice(208, 210),
    "tq1_0": slice(52, 54),
    "tq2_0": slice(64, 66),
}


def bits(y: np.ndarray) -> np.ndarray:
    return y.view(np.uint32)


@pytest.mark.parametrize("name", [name for name, golden in GOLDEN.items() if golden.dequant is not None])
def test_decode_is_bit_exact(name):
    golden = GOLDEN[name]
    y = decode(golden.im, name, golden.x.shape[1])
    assert y.dtype == np.float32
    assert np.array_equal(bits(y[: len(golden.dequant)]), bits(golden.dequant))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("weighted", [True, False])
def test_encode_matches_the_reference_byte_for_byte(name, weighted):
    golden = GOLDEN[name]
    expected = golden.im if weighted or name in WITHOUT_IMPORTANCE else golden.no
    assert np.array_equal(encode(golden.x, name, golden.imatrix if weighted else None), expected)


@pytest.mark.parametrize("name", SCALES_AT)
def test_decode_of_random_bytes_matches_gguf(name):
    tensor_type, rng = TYPES[name], np.random.default_rng(5)
    n = 5 * tensor_type.block
    q = rng.integers(0, 256, (7, tensor_type.row_bytes(n)), np.uint8)
    blocks, scales = q.reshape(-1, tensor_type.block_bytes), SCALES_AT[name]
    numbers = rng.standard_normal((len(blocks), (scales.stop - scales.start) // 2)).astype(np.float16)
    blocks[:, scales] = numbers.view(np.uint8)
    expected = dequantize(q, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(bits(decode(q, name, n)), bits(expected))
