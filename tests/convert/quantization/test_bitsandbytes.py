"""bitsandbytes' weights against their definition and against the library."""

import json

import numpy as np
import pytest

from ggufmill.convert.config import Config
from ggufmill.convert.quantization.methods import WeightFinder
from ggufmill.formats import FormatError
from ggufmill.formats.safetensors import open_safetensors

ROWS, COLUMNS, BLOCK, NESTED = 60, 96, 64, 16
SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
DRAW = np.random.default_rng(8)


def as_bytes(state: dict) -> np.ndarray:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def four_bits(kind: str, nested: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(stored tensors, values) of random codes."""
    codes = DRAW.integers(0, 16, ROWS * COLUMNS).astype(np.uint8)
    table, blocks = np.sort(DRAW.uniform(-1, 1, 16)).astype(np.float32), ROWS * COLUMNS // BLOCK
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    tensors = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": table}
    if nested:
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": 0.25}
        inner, numbers = DRAW.uniform(-1, 1, 256).astype(np.float32), DRAW.integers(0, 256, blocks).astype(np.uint8)
        outer = DRAW.uniform(0.1, 1, -(-blocks // NESTED)).astype(np.float32)
        absmax = inner[numbers] * outer[np.arange(blocks) // NESTED] + np.float32(0.25)
        tensors |= {"weight.absmax": numbers, "weight.nested_absmax": outer, "weight.nested_quant_map": inner}
    else:
        absmax = tensors["weight.absmax"] = DRAW.uniform(0.1, 2, blocks).astype(np.float32)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = as_bytes(state)
    return tensors, (table[codes] * np.repeat(absmax, BLOCK)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits(check_weight, kind, nested):
    tensors, values = four_bits(kind, nested)
    assert check_weight(SETTINGS, tensors, values).source_type == f"bnb_{kind}"


def test_eight_bits(check_weight):
    codes = DRAW.integers(-127, 128, (ROWS, COLUMNS)).astype(np.int8)
    largest = DRAW.uniform(0.1, 3, ROWS).astype(np.float32)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    check_weight(SETTINGS, tensors, codes * (largest / np.float32(127))[:, None])


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_of_the_library(check_weight, kind, nested):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    # Rows of whole blocks: for others the library's decoder for processors takes other scales than its encoder wrote.
    weight = torch.randn(ROWS, 3 * BLOCK, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    expected = functional.dequantize_4bit(packed, state).numpy()
    parts = {f"weight.{name}": part.numpy() for name, part in state.as_dict(packed=True).items()}
    check_weight(SETTINGS, {"weight": packed.numpy()} | parts, expected, 3e-7)


def test_eight_bits_of_the_library(check_weight):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).half()
    codes, largest, _ = functional.int8_vectorwise_quant(weight)
    expected = functional.int8_vectorwise_dequant(codes, largest).float().numpy()
    check_weight(SETTINGS, {"weight": codes.numpy(), "SCB": largest.float().numpy()}, expected, 2e-3)  # it computes in half


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight.absmax": None}, r"x.weight.absmax is missing, which x.weight needs"),
        ({"weight.absmax": np.ones(3, np.float32)}, r"x.weight.absmax is \[3\], not \[90\]"),
        ({"weight.quant_map": np.ones(8, np.float32)}, r"x.weight.quant_map is \[8\], not \[16\]"),
        (
            {"weight.quant_state.bitsandbytes__nf4": as_bytes({"blocksize": 64, "shape": [96, 60]})},
            r"\[96, 60\], not \[60, 96\]",
        ),
        ({"weight.quant_state.bitsandbytes__nf4": as_bytes({"shape": [60, 96]})}, "lacks blocksize and shape"),
        ({"weight.quant_state.bitsandbytes__nf4": np.full(5, 200, np.uint8)}, "no JSON object in bytes"),
        ({"weight.absmax": np.ones(90, np.uint8)}, "has nested scales, but no x.weight.nested_absmax"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, write_checkpoint, change, message):
    tensors = four_bits("nf4", False)[0] | change
    stored = {f"x.{name}": array for name, array in tensors.items() if array is not None}
    folder = write_checkpoint(tmp_path / "model", {"quantization_config": SETTINGS}, stored)
    config = Config(folder / "config.json", json.loads((folder / "config.json").read_text()))
    with pytest.raises(FormatError, match=message):
        WeightFinder(config)("x.weight", open_safetensors(folder), (ROWS, COLUMNS))
