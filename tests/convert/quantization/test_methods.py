"""Quantised checkpoints: each method against a decoder written from its definition, and against the original libraries."""

import numpy as np
import pytest
from quantized_weights import BF16, COLUMNS, CT, DRAW, E2M1, E4M3, ROWS, gptq, packed, random_scales

from ggufmill.formats import FormatError


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("variant", ["groups", "act_order", "symmetric", "v2", "one_group"])
def test_gptq(check_weight, bits, variant):
    group = COLUMNS if variant == "one_group" else 32
    order = DRAW.permutation(COLUMNS) // group if variant == "act_order" else None
    tensors, expected = gptq(bits, group, order, variant == "symmetric", variant != "v2")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": -1 if variant == "one_group" else group, "sym": True}
    if variant == "v2":
        settings["checkpoint_format"] = "gptq_v2"
    weight = check_weight(settings, tensors, expected)
    assert weight.source_type == f"gptq_{bits}bit"
    if variant != "act_order":
        del tensors["g_idx"]
        check_weight(settings, tensors, expected)


def test_3_bit_words_are_packed_as_by_gptq():
    """Frantar's packing of 32 codes: 10, one across two words, 10, one across two words, 10."""
    codes, words = DRAW.integers(0, 8, 32).astype(np.uint32), np.zeros(3, np.uint32)
    for i in range(10):
        words[0] |= codes[i] << np.uint32(3 * i)
    words[0] |= codes[10] << np.uint32(30)
    words[1] |= codes[10] >> np.uint32(2) & np.uint32(1)
    for i in range(10):
        words[1] |= codes[11 + i] << np.uint32(3 * i + 1)
    words[1] |= codes[21] << np.uint32(31)
    words[2] |= codes[21] >> np.uint32(1) & np.uint32(3)
    for i in range(10):
        words[2] |= codes[22 + i] << np.uint32(3 * i + 2)
    assert np.array_equal(packed(codes[None], 3)[0].view(np.uint32), words)


@pytest.mark.parametrize("group", [32, 64, COLUMNS])
def test_awq(check_weight, group):
    codes, groups = DRAW.integers(0, 16, (COLUMNS, ROWS)), COLUMNS // group
    zeros, scales = DRAW.integers(0, 16, (groups, ROWS)), random_scales(groups, ROWS)

    def words(table):
        out = np.zeros((len(table), ROWS // 8), np.uint32)
        for word in range(ROWS // 8):
            for i, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, word] |= table[:, word * 8 + row].astype(np.uint32) << np.uint32(4 * i)
        return out.view(np.int32)

    index = np.arange(COLUMNS) // group
    expected = ((codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM", "zero_point": True}
    check_weight(settings, {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, expected)


@pytest.mark.parametrize("bits", [4, 8, 2, 3, 6])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("groups", "order"), [(6, False), (1, False), (6, True)])
def test_pack_quantized(check_weight, bits, zero_points, groups, order):
    half = 1 << (bits - 1)
    values, scales = DRAW.integers(-half, half, (ROWS, COLUMNS)), random_scales(ROWS, groups, BF16)
    zeros = DRAW.integers(-half, half, (ROWS, groups)) if zero_points else np.zeros((ROWS, groups), int)
    index = DRAW.permutation(COLUMNS) * groups // COLUMNS if order else np.arange(COLUMNS) * groups // COLUMNS
    tensors = {"weight_packed": packed(values + half, bits), "weight_scale": scales}
    tensors["weight_shape"] = np.array([ROWS, COLUMNS])
    if zero_points:
        tensors["weight_zero_point"] = np.ascontiguousarray(packed((zeros + half).T, bits).T)
    if order:
        tensors["weight_g_idx"] = index.astype(np.int32)
    expected = (values - zeros[:, index]).astype(np.float32) * scales.astype(np.float32)[:, index]
    check_weight(CT | {"format": "pack-quantized"}, tensors, expected)


def test_symmetric_int4_in_groups_of_32_is_q4_0(check_weight):
    """Bit for bit what gguf's own decoder reads; scales that half precision cannot hold are refused, not rounded."""
    gguf = pytest.importorskip("gguf")
    values, scales = DRAW.integers(-8, 8, (ROWS, COLUMNS)), random_scales(ROWS, COLUMNS // 32, BF16)
    scales[0, :3] = 2.0**-17 * 1.9921875, 65280, -0.0
    scales[1, 0] = 2.0**-24
    expected = values * np.repeat(scales.astype(np.float32), 32, 1)
    settings = CT | {"format": "pack-quantized"}
    weight = check_weight(settings, {"weight_packed": packed(values + 8, 4), "weight_scale": scales}, expected)
    assert (weight.source_type, weight.ggml_type.name) == ("int4", "q4_0")
    raw = weight.raw(slice(0, ROWS))
    decoded = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(decoded, expected)
    assert np.array_equal(weight.raw(slice(13, 30)), raw[13:30])
    order = np.array([51, 33, 50, 50])
    assert np.array_equal(weight.raw(order), raw[order])
    for impossible in (65536, 2.0**-18 * 1.9921875):
        scales[40, 1] = impossible
        tensors = {"weight_packed": packed(values + 8, 4), "weight_scale": scales}
        expected = values * np.repeat(scales.astype(np.float32), 32, 1)
        weight = check_weight(settings, tensors, expected)
        with pytest.raises(FormatError, match="row 40, which q4_0 cannot hold"):
            weight.raw(slice(30, 50))
    # Other groups, zero points and column orders have no such form.
    for other in (
        {"weight_zero_point": packed(np.full((ROWS, COLUMNS // 32), 8).T, 4).T},
        {"weight_g_idx": np.arange(COLUMNS) // 32},
    ):
        tensors = {"weight_packed": packed(values + 8, 4), "weight_scale": np.ones_like(scales)}
        more = {name: np.ascontiguousarray(array, np.int32) for name, array in other.items()}
        assert check_weight(settings, tensors | more, values.astype(np.float32)).ggml_type is None


@pytest.mark.parametrize("shape", [(ROWS, 1), (ROWS,), (1,), (), (ROWS, 4)])
@pytest.mark.parametrize("zero_points", [False, True])
def test_int_quantized(check_weight, shape, zero_points):
    values = DRAW.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    scales = np.asarray(0.01 + DRAW.random(shape), np.float32)
    zeros = DRAW.integers(-128, 128, shape).astype(np.int8) if zero_points else np.zeros(shape, np.int8)

    def broadcast(table):
        table = np.asarray(table, np.float32)
        if table.size == 1:
            return table.reshape(1, 1)
        return np.repeat(table.reshape(ROWS, -1), COLUMNS * ROWS // table.size, 1)

    tensors = {"weight": values, "weight_scale": scales} | ({"weight_zero_point": np.asarray(zeros)} if zero_points else {})
    check_weight(CT | {"format": "int-quantized"}, tensors, (values.astype(np.float32) - broadcast(zeros)) * broadcast(scales))


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_nvfp4(check_weight, method):
    codes = DRAW.integers(0, 256, (ROWS, COLUMNS // 2)).astype(np.uint8)
    scales, global_scale = DRAW.uniform(0.1, 400, (ROWS, COLUMNS // 16)).astype(E4M3), np.float32(0.0123)
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(ROWS, COLUMNS)
    factors = scales.astype(np.float32)
    if method == "modelopt":
        factors = factors * global_scale
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": np.asarray(global_scale)}
        settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    else:
        factors = factors / global_scale
        tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": global_scale.reshape(1)}
        settings = CT | {"format": "nvfp4-pack-quantized"}
    weight = check_weight(settings, tensors, values * np.repeat(factors, 16, 1))
    assert weight.source_type == "f4_e2m1"


def test_mxfp4_of_compressed_tensors(check_weight):
    codes = DRAW.integers(0, 256, (ROWS, COLUMNS // 2)).astype(np.uint8)
    scales = DRAW.integers(100, 140, (ROWS, COLUMNS // 32)).astype(np.uint8)
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(ROWS, COLUMNS)
    factors = np.exp2(scales.astype(np.float32) - 127)
    check_weight(
        CT | {"format": "mxfp4-pack-quantized"},
        {"weight_packed": codes, "weight_scale": scales},
        values * np.repeat(factors, 32, 1),
    )


def test_mxfp8(check_weight):
    """fp8 with an e8m0 scale per 32 columns."""
    x = DRAW.standard_normal((ROWS, COLUMNS)).astype(E4M3)
    scales = DRAW.integers(120, 130, (ROWS, COLUMNS // 32)).astype(np.uint8)
    expected = x.astype(np.float32) * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, 1)
    check_weight(CT | {"format": "mxfp8-quantized"}, {"weight": x, "weight_scale": scales}, expected)


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1), (4, 2, 3), (4, 16), (4, 16, 1)])
def test_stacks_of_fp8_matrices(check_weight, shape):
    x, scale = DRAW.standard_normal((4, 16, COLUMNS)).astype(E4M3), DRAW.random(shape, np.float32)
    factors = scale.reshape(4, -1, shape[2] if len(shape) == 3 else 1)
    factors = np.repeat(np.repeat(factors, 16 // factors.shape[1], 1), COLUMNS // factors.shape[2], 2)
    settings = {"quant_method": "fp8", "weight_block_size": [8, 64]}
    check_weight(settings, {"weight": x, "weight_scale": scale}, x.astype(np.float32) * factors)


# format -> QuantizationArgs of compressed-tensors
LIBRARY = {
    "pack-quantized": [
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        {"num_bits": 8, "strategy": "channel", "symmetric": True},
        {"num_bits": 3, "strategy": "channel", "symmetric": False},
    ],
    "int-quantized": [{"num_bits": 8, "strategy": "channel", "symmetric": True}],
    "float-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32], "symmetric": True},
    ],
    "nvfp4-pack-quantized": [{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}],
}


@pytest.mark.parametrize(("form", "number"), [(form, i) for form, rows in LIBRARY.items() for i in range(len(rows))])
def test_against_the_compressed_tensors_library(check_weight, form, number):
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("compressed_tensors.quantization")
    arguments = LIBRARY[form][number]
    args = library.QuantizationArgs(**arguments)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=args, format=form)
    groups = {"channel": 1, "tensor": 1}.get(arguments["strategy"]) or COLUMNS // arguments.get("group_size", 32)
    rows = {"tensor": 1, "block": ROWS // 16}.get(arguments["strategy"], ROWS)
    shape = (1,) if arguments["strategy"] == "tensor" else (rows, groups)
    largest = 448 if arguments.get("type") == "float" else (1 << (arguments["num_bits"] - 1)) - 1
    weight = torch.randn(ROWS, COLUMNS)
    state = {"weight": weight, "weight_scale": (0.5 + torch.rand(shape)) * 3 / largest}
    if form.startswith("nvfp4"):
        state |= {"weight_scale": 0.5 + 10 * torch.rand(shape), "weight_global_scale": torch.tensor([20.0])}
        state["weight_scale"] = state["weight_scale"].to(torch.float8_e4m3fn).float()
    if not arguments["symmetric"]:
        half = 1 << (arguments["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half // 2, half // 2, shape, dtype=torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed_state = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(packed_state), scheme)["weight"].float().numpy()

    def to_numpy(tensor):
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view(E4M3)
        return tensor.numpy()

    tensors = {name: to_numpy(tensor) for name, tensor in packed_state.items() if tensor is not None}
    settings = {"quant_method": "compressed-tensors", "format": form}
    group = {"weights": {k: v for k, v in arguments.items() if k != "type"}}
    if arguments["strategy"] != "block":
        group["weights"].pop("block_structure", None)
    tolerance = 2**-7 if form.startswith("nvfp4") else 0  # the library decodes in bf16
    check_weight(settings | {"config_groups": {"group_0": group}}, tensors, expected, tolerance)
    assert np.abs(expected - weight.numpy()).mean() < 0.7  # it approximates the weight
