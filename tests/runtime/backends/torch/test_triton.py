"""Triton's kernels in its interpreter, or on the device that tests are run on, against the decoder of the layouts; and their
code for a GPU, compiled only."""

import ast
import os
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from triton_place import IS_INTERPRETED, PLACE, at_place, on_device  # noqa: E402, F401

from ggufmill.formats import TYPES  # noqa: E402
from ggufmill.formats.layouts import decode, layout_of  # noqa: E402
from ggufmill.formats.layouts.byte_parts import straight_line  # noqa: E402
from ggufmill.runtime.backends.torch import triton as kernels_package  # noqa: E402
from ggufmill.runtime.backends.torch.decode import PackedMatrix  # noqa: E402
from ggufmill.runtime.backends.torch.triton import launch  # noqa: E402
from ggufmill.runtime.backends.torch.triton.block_format import block_format, field_of  # noqa: E402
from ggufmill.runtime.backends.torch.triton.launch import PackedProducts  # noqa: E402
from ggufmill.runtime.backends.torch.triton.rows import as_bytes  # noqa: E402
from ggufmill.runtime.backends.torch.triton.units import units_of  # noqa: E402

pytestmark = pytest.mark.oracle

# One of each way in which codes become bytes: whole, halves, with high bits, by tables of 16 and 8 for one run and for two,
# points of codebooks with signs and without.
BYTES_TRIED = ("q8_0", "q4_K", "q6_K", "iq4_xs", "iq4_k", "iq3_k", "iq2_xxs", "iq3_s", "iq1_s")
# Codes in five or more pieces, and tables of more than 16 entries.
NO_BYTES = {"q5_0", "q5_1", "q2_0", "q1_0_g128", "iq5_k", "iq5_ks", "iq6_k", "iq3_kt"}
SERVED = [name for name in TYPES if block_format(name) is not None]


def finite_rows(name: str, rows: int, n: int, seed: int) -> np.ndarray:
    """Random bytes of rows whose weights are all finite and of ordinary size: float scales of the blocks are replaced."""
    kind, layout, rng = TYPES[name], layout_of(name), np.random.default_rng(seed)
    groups = rows // kind.rows
    meta = kind.rows * kind.row_meta
    q = rng.integers(0, 256, (groups, kind.rows * kind.row_bytes(n)), dtype=np.uint8)
    blocks = q[:, meta:].reshape(groups, n // layout.block, -1)
    for field, bits in (("d", layout.d), ("dmin", layout.dmin), ("offset", layout.offset)):
        if bits is not None and bits.shape[-1] > 8:
            dtype = np.float32 if field == "d" and layout.d_format == "f32" else np.float16
            stored = np.unpackbits(blocks, axis=-1, bitorder="little")
            for row in range(kind.rows):
                scales = rng.uniform(0.5, 1.5, (groups, blocks.shape[1], 1)).astype(dtype)
                stored[:, :, bits[row, 0]] = np.unpackbits(scales.view(np.uint8), axis=-1, bitorder="little")
            blocks[:] = np.packbits(stored, axis=-1, bitorder="little")
        elif bits is not None:
            at = np.unique(bits // 8)
            blocks[:, :, at] = rng.integers(120, 132, (groups, blocks.shape[1], len(at)))
    if layout.row_scale is not None:
        dtype = np.float16 if layout.row_scale == "f16" else np.float32
        metas = q[:, :meta].reshape(groups, kind.rows, kind.row_meta)
        scales = rng.uniform(0.5, 1.5, (groups, kind.rows, 1)).astype(dtype)
        metas[:, :, : scales.itemsize] = scales.view(np.uint8)
    return q.reshape(rows, -1)


def close_to(found, expected, scale):
    """scale: the largest sum of magnitudes, of whose rounding sums may differ."""
    torch.testing.assert_close(
        found.cpu().double(), torch.as_tensor(expected).cpu().double(), rtol=1e-5, atol=1e-5 * float(scale)
    )


@pytest.mark.parametrize("name", SERVED)
def test_decoded_rows_and_products_of_every_type(name):
    kind = TYPES[name]
    rows, n, matrices = 2 * max(kind.rows, 4), 2 * max(layout_of(name).block, 128), 3
    q = finite_rows(name, matrices * rows, n, 1)
    weights = decode(q, name, n)
    data, products = on_device(q).reshape(-1), PackedProducts(name, PLACE)
    actual = products.decode(data, n, kind.rows, 2 * rows - kind.rows).cpu().numpy()
    np.testing.assert_array_equal(actual, weights[kind.rows : 2 * rows])
    x = np.random.default_rng(2).standard_normal((2, n)).astype(np.float32)
    close = {"rtol": 1e-5, "atol": 1e-5 * np.abs(weights).max() * np.sqrt(n)}
    chosen = torch.tensor([2, 0, 1, 1])
    expected = np.einsum("pc,prc->pr", x.repeat(2, axis=0), weights.reshape(matrices, rows, n)[chosen.cpu().numpy()])
    np.testing.assert_allclose(products.matvec(data, on_device(x), chosen, rows).cpu().numpy(), expected, **close)
    same = torch.full((2,), 1)
    expected = x @ weights[rows : 2 * rows].T
    np.testing.assert_allclose(products.matvec(data, on_device(x), same, rows, same=True).cpu().numpy(), expected, **close)


@pytest.mark.parametrize("name", BYTES_TRIED if IS_INTERPRETED else [name for name in SERVED if launch.byte_tile(name)])
def test_products_of_bytes(name):
    """Of vectors in 16 bits, a millionth of the largest of 32 off."""
    n, x = 2 * max(layout_of(name).block, 128), np.random.default_rng(3).standard_normal((2, 512)).astype(np.float32)
    q, x = finite_rows(name, 8, n, 4), x[:, :n]
    weights, which = decode(q, name, n)[4:], torch.ones(2, dtype=torch.int64)
    products = PackedProducts(name, PLACE)
    found = products.matvec_bytes(on_device(q).reshape(-1), as_bytes(on_device(x.copy())), which, 4, n, same=True)
    close_to(found, x @ weights.T, (np.abs(x) @ np.abs(weights).T).max())


def test_products_of_several_matrices_by_one_kernel():
    n, x = 256, np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32)
    packed = [finite_rows("q4_K", count, n, seed) for seed, count in enumerate((5, 3, 9))]
    products, parts = PackedProducts("q4_K", PLACE), [(on_device(q).reshape(-1), len(q)) for q in packed]
    found = products.matvec_bytes_of(parts, as_bytes(on_device(x.copy())), torch.zeros(1, dtype=torch.int64), n)
    for product, q in zip(found, packed, strict=True):
        weights = decode(q, "q4_K", n)
        close_to(product, x @ weights.T, (np.abs(x) @ np.abs(weights).T).max())


@pytest.fixture
def served_cpu(monkeypatch):
    """Packed matrices on the processor use the kernels, interpreted."""
    monkeypatch.setattr(kernels_package, "_DEVICES", ("cpu", "cuda"))
    for cached in (
        kernels_package.kernels_of,
        kernels_package.row_kernels,
        kernels_package.attention_kernels,
        kernels_package._served,
    ):
        cached.cache_clear()
    yield
    for cached in (
        kernels_package.kernels_of,
        kernels_package.row_kernels,
        kernels_package.attention_kernels,
        kernels_package._served,
    ):
        cached.cache_clear()


def test_packed_matrices_multiply_by_kernels(served_cpu, monkeypatch):
    rows, n, matrices = 12, 256, 3
    q = finite_rows("iq4_ks", matrices * rows, n, 5)
    weights = on_device(decode(q, "iq4_ks", n)).view(matrices, rows, n)
    matrix = PackedMatrix("iq4_ks", n, rows, matrices, on_device(q))
    monkeypatch.setattr(matrix, "_decoder", None)  # what torch would decode with
    assert torch.equal(matrix.rows(3, 11, 2), weights[2, 3:11])
    close = {"rtol": 1e-5, "atol": float(weights.abs().max()) * 1e-4}
    for tokens in (1, 3, 9):
        x = torch.randn(tokens, n)
        torch.testing.assert_close(matrix.matmul(x, matrix=1), x @ weights[1].T, **close)
    x, experts = torch.randn(2, n), torch.tensor([[0, 2], [1, 0]])
    expected = torch.einsum("nc,nkrc->nkr", x, weights[experts])
    torch.testing.assert_close(matrix.matmul_experts(x, experts), expected, **close)
    many = torch.tensor([[0, 2], [1, 0]]).repeat(20, 1)  # more pairs than are multiplied one by one
    expected = torch.einsum("nc,nkrc->nkr", x.repeat(20, 1), weights[many])
    torch.testing.assert_close(matrix.matmul_experts(x.repeat(20, 1), many), expected, **close)


def test_kernels_that_cannot_be_built_are_said_once_and_done_without(served_cpu, monkeypatch):
    def no_compiler(self, *arguments):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(PackedProducts, "matvec", no_compiler)
    with pytest.warns(UserWarning, match="Triton's kernels are not used on .*: Failed to find C compiler"):
        assert kernels_package.kernels_of("q4_0", PLACE) is None
    assert kernels_package.kernels_of("q8_0", PLACE) is None  # without another warning
    x = torch.randn(1, 32)
    q = finite_rows("q4_0", 4, 32, 6)
    product = PackedMatrix("q4_0", 32, 4, 1, on_device(q)).matmul(x)
    torch.testing.assert_close(product, x @ on_device(decode(q, "q4_0", 32)).T)


def test_the_warning_gives_the_innermost_reason(served_cpu, monkeypatch):
    def broken(self, *arguments):
        inner = RuntimeError("at 19:15:\n    code = number(block)\n           ^\nAttributeError('no type')")
        raise RuntimeError("at 18:19:\n    tile = decoded(data)\n           ^") from inner

    monkeypatch.setattr(PackedProducts, "matvec", broken)
    with pytest.warns(UserWarning, match=rf"not used on {PLACE}: at 19:15: AttributeError\('no type'\)$"):
        assert kernels_package.kernels_of("q4_0", PLACE) is None


def test_functions_of_kernels_are_given_no_parts_of_a_format():
    """Triton before 3.8 takes what is read from a constant, but numbers, as an argument only by the name of a constant."""
    source = Path(kernels_package.__file__).with_name("kernels.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    given = [ast.unparse(argument) for call in calls if ast.unparse(call.func)[0] == "_" for argument in call.args]
    assert len(given) > 20
    parts = [text for text in given if re.fullmatch(r"[A-Z]\w*\.[\w.\[\]]+", text)]
    assert [text for text in parts if not text.endswith((".count", ".scrambled"))] == []


@pytest.mark.parametrize("words", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["q4_K", "q6_K", "iq2_xs", "iq1_s", "mxfp4"])
def test_units_of_any_size(name, words, monkeypatch):
    monkeypatch.setattr(launch, "unit_tile", lambda type_name: (words, 2))
    rows, n = 5, 3 * max(layout_of(name).block, 128)
    q = finite_rows(name, rows, n, 7)
    x = torch.randn(1, n)
    if units_of(name, words) is None:
        pytest.skip("no such units")
    actual = PackedProducts(name, PLACE).matvec(on_device(q).reshape(-1), x, torch.zeros(1, dtype=torch.int64), rows)
    expected = x.double() @ on_device(decode(q, name, n)).double().T
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-4 * float(expected.abs().max()))


def test_types_that_have_no_units():
    plain = {name for name in SERVED if TYPES[name].rows == 1}
    assert {name for name in plain if not launch.unit_tile(name)[0]} == {"iq4_kss", "iq2_kl"}


def test_types_whose_bytes_are_multiplied():
    plain = {name for name in SERVED if launch.unit_tile(name)[0]}
    assert plain - {name for name in plain if launch.byte_tile(name)} == NO_BYTES


def test_words_at_odd_addresses_are_not_loaded_whole():
    """A kernel of units would read beside them."""
    q = on_device(finite_rows("q4_0", 4, 64, 8)).reshape(-1)
    shifted = torch.empty(len(q) + 1, dtype=torch.uint8)[1:]
    shifted[:] = q
    x, first, products = torch.randn(1, 64), torch.zeros(1, dtype=torch.int64), PackedProducts("q4_0", PLACE)
    torch.testing.assert_close(products.matvec(shifted, x, first, 4), products.matvec(q, x, first, 4))


def test_sizes_that_fill_no_tile():
    rows, n = 19, 5 * 32
    q = finite_rows("q5_0", rows, n, 3)
    weights = decode(q, "q5_0", n)
    data, products = on_device(q).reshape(-1), PackedProducts("q5_0", PLACE)
    x = torch.randn(3, n)
    np.testing.assert_array_equal(products.decode(data, n, 3, 16).cpu().numpy(), weights[3:])
    expected = x.double() @ on_device(weights).double().T
    vectors = products.matvec(data, x, torch.zeros(3, dtype=torch.int64), rows)
    torch.testing.assert_close(vectors, expected.float(), rtol=1e-5, atol=1e-3)


def test_rows_rounded_to_float16():
    q = finite_rows("q4_K", 8, 256, 4)
    actual = PackedProducts("q4_K", PLACE).decode(on_device(q).reshape(-1), 256, 0, 8, torch.float16)
    torch.testing.assert_close(actual, on_device(decode(q, "q4_K", 256)).half(), rtol=0, atol=0)


def test_types_that_kernels_do_not_read_are_named_by_none():
    assert {name for name in TYPES if block_format(name) is None} == {
        *("f32", "f16", "bf16", "bf16_r16", "f64", "i8", "i16", "i32", "i64"),
        *("tq1_0", "iq1_bn"),
    }
    with pytest.raises(KeyError):
        PackedProducts("tq1_0", PLACE)


def test_addresses_that_are_no_sum_over_bits_are_no_field():
    addresses = np.array([0, 8, 24, 16])[None, :, None] + np.arange(4)
    assert field_of(addresses) is None
    assert field_of(np.array([0, 8, 24, 32])[None, :, None] + np.arange(4)) is not None
    assert field_of(np.arange(0, 24, 8)[None, :, None] + np.arange(4)) is None  # three numbers


def test_tables_that_are_computed():
    assert straight_line(np.arange(8)[:, None] * 2 - 7).step == 2
    assert straight_line(np.arange(16) ^ 8).flip == 8
    assert straight_line(np.array([0, 1, 3, 2])).step == 0


def test_kernels_compile_for_a_gpu():
    """In a process of its own: what is interpreted here cannot be compiled here."""
    import subprocess
    import sys

    if not triton.backends.backends.get("nvidia"):
        pytest.skip("this Triton has no compiler for NVIDIA's GPUs")
    code = """
import triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from ggufmill.runtime.backends.torch.triton import kernels
from ggufmill.runtime.backends.torch.triton.block_format import block_format
from ggufmill.runtime.backends.torch.triton.byte_source import byte_kernel
from ggufmill.runtime.backends.torch.triton.launch import byte_tile, unit_tile
from ggufmill.runtime.backends.torch.triton.unit_source import unit_kernel
types = dict(data="*u8", values="*fp32", levels="*fp32", out="*fp32", matrices="*i64", distance1="i64", distance2="i64")
begun = dict(DEPENDENT=True)
for name in ("q4_K", "iq4_xs", "iq2_s", "q4_k_r4", "mxfp4", "iq2_ks", "iq4_kss", "iq3_xxs"):
    form = block_format(name)
    for kernel, x, constants in (
        (kernels.matvec, "*fp32", dict(FORMAT=form, ROWS=8, WIDTH=512, SAME=True)),
        (kernels.decode_rows, "*bf16", dict(FORMAT=form, ROWS=4, WIDTH=512)),
        (unit_kernel(name, *unit_tile(name), 1), "*bf16", dict(EVEN=False, SAME=False)),
        (byte_kernel(name, byte_tile(name), 2, 1, 64), "*i32", dict(EVEN=False, SAME=True, SEVERAL=True)),
    ):
        if kernel is None:
            continue
        print(name, kernel.__name__)
        types["values"] = "*i32" if form.size > 1 and "EVEN" in constants or "SEVERAL" in constants else "*fp32"
        constants |= begun
        signature = {k: "constexpr" if k in constants else x if k == "x" else types.get(k, "i32") for k in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
        assert ".target sm_90" in compiled.asm["ptx"]
        assert "griddepcontrol.wait" in compiled.asm["ptx"]
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
