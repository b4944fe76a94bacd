"""Packed weights decoded by torch ops: bit for bit what `formats.layouts.decode` gives, for every type of the table."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ggufmill import quantize  # noqa: E402
from ggufmill.errors import PlanError  # noqa: E402
from ggufmill.formats import TYPES  # noqa: E402
from ggufmill.formats.layouts import decode, layout_of  # noqa: E402
from ggufmill.formats.layouts.byte_parts import byte_parts  # noqa: E402
from ggufmill.quantize.torch_encoders.decoder import decoder_of  # noqa: E402
from ggufmill.runtime.backends.torch.decode import PackedMatrix, packed  # noqa: E402
from ggufmill.runtime.backends.torch.decode import matrix as matrix_module  # noqa: E402

pytestmark = pytest.mark.oracle

CPU = torch.device("cpu")
WEIGHT_TYPES = [name for name, kind in TYPES.items() if quantize.can_encode(kind)]


@dataclass
class Stored:
    """A tensor as `formats.TensorInfo` describes it."""

    shape: tuple[int, ...]
    type: object
    data: np.ndarray


def random_rows(name: str, rows: int, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, TYPES[name].row_bytes(n)), dtype=np.uint8)


def encoded(name: str, rows: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        return quantize.encode(rng.standard_normal((rows, n)).astype(np.float32), name, np.ones(n, np.float32))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal float32, signs of zeros included; a NaN equals every NaN."""
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(actual), ~numbers)
    assert np.array_equal(actual.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


@pytest.mark.parametrize("name", list(TYPES))
@settings(max_examples=4, deadline=None)
@given(groups=st.integers(1, 3), blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_random_bytes_decode_as_by_the_layouts(name, groups, blocks, seed):
    kind, n = TYPES[name], blocks * layout_of(name).block
    q = random_rows(name, groups * kind.rows, n, seed)
    with np.errstate(all="ignore"):
        expected = decode(q, name, n)
    actual = decoder_of(name, CPU)(torch.from_numpy(q).view(groups, -1), n)
    assert_same_bits(actual.numpy(), expected)


@pytest.mark.parametrize("name", ["q4_K", "iq4_kss", "iq1_m", "iq3_kt", "q5_k_r4", "tq1_0"])
def test_encoded_rows_decode_as_by_the_codecs(name):
    q = encoded(name, 8, 512, 1)
    matrix = packed(Stored((512, 8), name, q), "cpu")
    assert_same_bits(matrix.rows(0, 8).numpy(), quantize.decode(q, name, 512))


@pytest.mark.parametrize("name", ["q4_K", "iq4_kss", "iq1_m", "q8_k_r8", "tq1_0", "bf16_r16"])
def test_parts_of_bytes_are_the_numbers_of_bits(name):
    layout = layout_of(name)
    block = np.random.default_rng(2).integers(0, 256, 1 + int(layout.codes.max()) // 8, dtype=np.uint8)
    bits = np.unpackbits(block, bitorder="little")[layout.codes].astype(np.int64)
    expected = (bits << np.arange(bits.shape[-1])).sum(axis=-1)
    actual = np.zeros_like(expected)
    for part in byte_parts(layout.codes):
        actual ^= (block[part.byte] >> part.shift & part.mask).astype(np.int64) << part.up
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_rows_products_and_gathered_rows_of_stacked_matrices(name, monkeypatch):
    kind = TYPES[name]
    rows, n, matrices = 2 * max(kind.rows, 5) // kind.rows * kind.rows, 2 * layout_of(name).block, 3
    monkeypatch.setattr(matrix_module, "TILE_WEIGHTS", n * kind.rows)  # several tiles
    q = encoded(name, rows * matrices, n, 3)
    weights = quantize.decode(q, name, n).reshape(matrices, rows, n)
    matrix = packed(Stored((n, rows, matrices), kind, q), "cpu")
    assert matrix.nbytes == q.size
    assert_same_bits(matrix.rows(1, rows - 1, 2).numpy(), weights[2, 1 : rows - 1])
    ids = torch.tensor([[0, rows - 1], [3, 3]])
    assert_same_bits(matrix.gather(ids, 1).numpy(), weights[1][ids.numpy()])
    x = np.random.default_rng(4).standard_normal((4, n)).astype(np.float32)
    close = {"rtol": 1e-5, "atol": 1e-4 * np.abs(weights).max()}
    np.testing.assert_allclose(matrix.matmul(torch.from_numpy(x), matrix=1).numpy(), x @ weights[1].T, **close)
    experts = np.array([[0, 2], [2, 1], [1, 1], [0, 1]])
    expected = np.einsum("nc,nkrc->nkr", x, weights[experts])
    np.testing.assert_allclose(matrix.matmul_experts(torch.from_numpy(x), torch.from_numpy(experts)).numpy(), expected, **close)


def test_inputs_of_each_expert_and_products_in_bf16():
    q = encoded("iq4_k", 12, 256, 5)
    matrix = packed(Stored((256, 4, 3), "iq4_k", q), "cpu")
    weights = torch.from_numpy(quantize.decode(q, "iq4_k", 256)).view(3, 4, 256)
    x, experts = torch.randn(2, 2, 256), torch.tensor([[0, 1], [2, 0]])
    expected = (weights[experts] @ x[..., None])[..., 0]
    torch.testing.assert_close(matrix.matmul_experts(x, experts), expected, rtol=1e-5, atol=1e-5)
    bf16 = matrix.matmul(x[:, 0], torch.bfloat16)
    assert bf16.dtype == torch.float32
    torch.testing.assert_close(bf16, (x[:, 0].bfloat16() @ weights[0].bfloat16().T).float())


def test_bytes_of_another_size_are_refused():
    with pytest.raises(PlanError, match="are not 10 bytes"):
        PackedMatrix("q4_K", 256, 2, 1, torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(PlanError, match="1 x 2 rows of 256 weights in q4_k_r4"):
        PackedMatrix("q4_k_r4", 256, 2, 1, torch.zeros(288, dtype=torch.uint8))
