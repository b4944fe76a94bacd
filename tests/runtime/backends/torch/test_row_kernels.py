"""Triton's kernels of rows and of attention against torch's operations."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from row_numbers import vector_numbers  # noqa: E402
from triton_place import at_place, on_device  # noqa: E402, F401

from ggufmill.runtime.backends.torch.functions.attention import Sight, attend  # noqa: E402
from ggufmill.runtime.backends.torch.triton import attention, rows  # noqa: E402

pytestmark = pytest.mark.oracle


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(torch.as_tensor(found).cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("n", "width"), [(3, 160), (1, 1056)])
def test_norms(n, width):
    x, weight = torch.randn(n, width), torch.rand(width)
    expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    for wanted in ("bytes", "bf16", ""):
        same, found, made = rows.norm(x, weight, 1e-5, wanted)
        assert same is x
        close(found, expected)
        if wanted == "bytes":
            close(vector_numbers(made, width), expected, 2e-4)
        if wanted == "bf16":  # which the interpreter cuts off
            torch.testing.assert_close(made.float(), found, rtol=2**-7, atol=0)
        assert wanted or made is None
    added = torch.randn(n, width)
    total, found, _ = rows.norm(x, weight, 1e-5, "", added, 0.5)
    close(total, x + 0.5 * added)
    close(found, torch.nn.functional.rms_norm(x + 0.5 * added, (width,), weight, 1e-5))
    heads = torch.randn(n, 2, 24)
    close(rows.norm(heads, None, 1e-5, "bytes")[1], torch.nn.functional.rms_norm(heads, (24,), None, 1e-5))


@pytest.mark.parametrize(("is_gelu", "of"), [(False, torch.nn.functional.silu), (True, torch.nn.functional.gelu)])
def test_gated_activations(is_gelu, of):
    gate, up = torch.randn(2, 1056), torch.randn(2, 1056)
    expected = (of(gate, approximate="tanh") if is_gelu else of(gate)) * up
    found, made = rows.gated(gate, up, is_gelu, "bytes")
    close(found, expected)
    close(vector_numbers(made, 1056), expected, 4e-4)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotations(is_interleaved):
    x, cos, sin = torch.randn(3, 4, 24), torch.randn(3, 8), torch.randn(3, 8)
    first, second = (slice(4, 20, 2), slice(5, 20, 2)) if is_interleaved else (slice(4, 12), slice(12, 20))
    expected, a, b = x.clone(), x[..., first], x[..., second]
    expected[..., first] = a * cos[:, None] - b * sin[:, None]
    expected[..., second] = a * sin[:, None] + b * cos[:, None]
    close(rows.rotated(x, cos, sin, 4, is_interleaved), expected)


def test_rows_are_written_where_they_belong():
    stored = [torch.zeros(2, 10, 24, dtype=torch.float16), torch.zeros(2, 12, 16)]
    new = [torch.randn(3, 2, 24), torch.randn(3, 2, 16)]
    for count in (1, 2):
        rows.write(stored[:count], new[:count], torch.tensor([7, 8, 2]))
    for memory, own in zip(stored, new, strict=True):
        assert torch.equal(memory[:, [7, 8, 2]], own.transpose(0, 1).to(memory.dtype))
        assert not memory[:, [0, 1, 3, 4, 5, 6, 9]].any()


class Pass:
    """What `attend` asks of a pass."""

    scratch, segments = 1 << 30, [None]

    def row_blocks(self, n, row_bytes):
        return [slice(0, n)]

    def on_device(self, array):
        return on_device(array)


@pytest.mark.parametrize(
    ("n", "past", "options"),
    [
        (1, 200, {}),
        (3, 300, {"window": 50}),
        (2, 300, {"window": 64, "chunked": True, "alibi": 8.0}),
        (2, 260, {"softcap": 5.0, "sinks": True}),
        (1, 3, {}),
        (30, 0, {}),
        (40, 100, {"window": 20, "softcap": 3.0, "sinks": True}),
    ],
)
def test_attention(n, past, options):
    heads, kv_heads, width, v_width, room = 4, 2, 24, 32, 512
    q, keys = torch.randn(n, heads, width), torch.randn(kv_heads, room, width).half()
    values = torch.randn(kv_heads, room, v_width).half()
    values[:, past + n :] = torch.nan  # what is not there yet
    sight = Sight(0.3, **{**options, "sinks": torch.randn(heads) if "sinks" in options else None})
    slopes = on_device(np.array([2.0 ** -(2 * i + 2) for i in range(heads)], np.float32)) if sight.alibi else None
    expected = attend(Pass(), q, keys[:, : past + n].float(), values[:, : past + n].float(), sight)
    found, made = attention.attend(q, keys, values, torch.tensor(past) if n < 9 else past, sight, slopes)
    close(found, expected)
    if made is not None:
        close(vector_numbers(made, heads * v_width), expected.reshape(n, -1), 1e-4)
    assert (made is not None) == (n < 9)


@pytest.mark.parametrize(
    ("n", "past", "options", "is_interleaved"),
    [
        (1, 0, {}, True),
        (1, 200, {}, False),
        (3, 300, {"window": 50}, None),
        (8, 63, {"window": 4}, True),
        (2, 260, {"sinks": 1}, False),
    ],
)
def test_attention_with_keys_that_are_not_in_memory_yet(n, past, options, is_interleaved):
    """None: nothing is rotated."""
    heads, kv_heads, width, v_width, room = 24, 2, 24, 32, 512
    q = torch.randn(n, heads, width)
    memory = [torch.full((kv_heads, room, size), torch.nan).half() for size in (width, v_width)]
    for each in memory:
        each[:, :past] = torch.randn(kv_heads, past, each.shape[2])
    new = [torch.randn(n, kv_heads, size) for size in (width, v_width)]
    sight = Sight(0.3, **{**options, "sinks": torch.randn(heads) if "sinks" in options else None})
    turn = None if is_interleaved is None else (torch.randn(n, 8), torch.randn(n, 8), 4, is_interleaved)
    turned = [each if turn is None else rows.rotated(each, *turn) for each in (q, new[0])]
    expected_memory = [each.clone() for each in memory]
    for each, own in zip(expected_memory, (turned[1], new[1]), strict=True):
        each[:, past : past + n] = own.transpose(0, 1).half()
    seen = [each[:, : past + n].float() for each in expected_memory]
    expected = attend(Pass(), turned[0], *seen, sight)
    found, _ = attention.attend(q, *memory, torch.tensor(past), sight, None, attention.New(*new, turn))
    close(found, expected, 1e-4)
    for each, own in zip(memory, expected_memory, strict=True):
        close(each[:, : past + n].float(), own[:, : past + n].float(), 1e-3)
        assert each[:, past + n :].isnan().all()
