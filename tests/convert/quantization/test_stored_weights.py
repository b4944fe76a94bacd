import ml_dtypes
import numpy as np
import pytest

from ggufmill.convert.config import Config
from ggufmill.convert.quantization.methods import WeightFinder
from ggufmill.convert.quantization.stored_weights import StoredWeight, find_scale
from ggufmill.formats import FormatError
from ggufmill.formats.safetensors import open_safetensors

E4M3, E5M2, BF16, E8M0 = (getattr(ml_dtypes, n) for n in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float8_e8m0fnu"))
DRAW = np.random.default_rng(5)


@pytest.fixture
def make_weight(tmp_path, write_checkpoint):
    """make_weight(values, scale, block) -> StoredWeight, as `assemble` makes it for one tensor."""

    def build(weight, scale=None, block=None, scale_name="weight_scale_inv"):
        tensors = {"x.weight": weight} | ({} if scale is None else {f"x.{scale_name}": scale})
        stored = open_safetensors(write_checkpoint(tmp_path / "model", {}, tensors))
        return StoredWeight(stored["x.weight"], find_scale("x.weight", stored), block)

    return build


def expand(scale, block, shape):
    """The scale of every element."""
    return np.repeat(np.repeat(np.float32(scale), block[0], 0), block[1], 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.float64])
def test_floats(make_weight, dtype):
    x = DRAW.standard_normal((6, 10)).astype(dtype)
    weight = make_weight(x)
    assert np.array_equal(weight.read(slice(2, 5)), x[2:5].astype(np.float32))
    assert np.array_equal(weight.read(np.array([4, 0, 4])), x[[4, 0, 4]].astype(np.float32))
    assert weight.read(slice(0, 6)).flags.writeable
    assert not weight.has_read_bf16
    if dtype is np.float64:
        assert weight.ggml_type is None
    else:
        assert weight.ggml_type is not None
        assert weight.ggml_type.name == weight.source_type
        assert weight.raw(slice(1, 4)).tobytes() == x[1:4].tobytes()
        assert weight.raw(slice(1, 4)).shape == (3, 10 * x.itemsize)


@pytest.mark.parametrize("block", [(128, 128), (4, 8), (3, 7), (1, 5), (16, 1), (1000, 1000)])
@pytest.mark.parametrize("shape", [(130, 257), (12, 40)])
def test_fp8_in_blocks(make_weight, block, shape):
    x = DRAW.standard_normal(shape).astype(E4M3)
    scale = DRAW.random((-(-shape[0] // block[0]), -(-shape[1] // block[1])), np.float32)
    weight = make_weight(x, scale, block)
    dense = x.astype(np.float32) * expand(scale, block, shape)
    assert np.array_equal(weight.read(slice(0, shape[0])), dense)
    assert np.array_equal(weight.read(slice(5, 11)), dense[5:11])
    rows = np.array([11, 0, 7, 7])
    assert np.array_equal(weight.read(rows), dense[rows])
    assert weight.ggml_type is None
    assert weight.source_type == "f8_e4m3"
    assert weight.has_read_bf16
    for selection in (slice(5, 11), rows):
        assert weight.read_bf16(selection).tobytes() == dense[selection].astype(BF16).tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (9,), (9, 1)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_scales_per_matrix_and_per_row(make_weight, shape, dtype):
    x = DRAW.standard_normal((9, 20)).astype(dtype)
    scale = np.asarray(DRAW.random(shape), np.float32)
    weight = make_weight(x, scale, None, "weight_scale")
    factors = scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(1, 1)
    assert np.array_equal(weight.read(slice(0, 9)), x.astype(np.float32) * factors)
    assert np.array_equal(weight.read(slice(3, 6)), (x.astype(np.float32) * factors)[3:6])


@pytest.mark.parametrize("dtype", [np.float16, BF16, E8M0])
def test_scale_dtypes(make_weight, dtype):
    x = DRAW.standard_normal((8, 16)).astype(E4M3)
    scale = (2.0 ** DRAW.integers(-3, 4, (2, 2))).astype(dtype)
    expected = x.astype(np.float32) * expand(scale.astype(np.float32), (4, 8), (8, 16))
    assert np.array_equal(make_weight(x, scale, (4, 8)).read(slice(0, 8)), expected)


def test_against_torch(make_weight):
    torch = pytest.importorskip("torch")
    x = DRAW.standard_normal((32, 48)).astype(E4M3)
    scale = DRAW.random((2, 3), np.float32)
    theirs = torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn).float()
    theirs = theirs * torch.from_numpy(scale).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert np.array_equal(make_weight(x, scale, (16, 16)).read(slice(0, 32)), theirs.numpy())


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (4,), (16,), (2, 2, 1)])
def test_a_scale_of_the_wrong_shape(make_weight, shape):
    with pytest.raises(FormatError, match=r"x.weight_scale_inv of shape .* does not fit a weight of 8 x 16"):
        make_weight(np.zeros((8, 16), E4M3), np.ones(shape, np.float32), (4, 8))


def test_unsupported_dtypes(make_weight):
    with pytest.raises(FormatError, match=r"x.weight is F8_E4M3 without a weight_scale_inv or weight_scale"):
        make_weight(np.zeros((8, 16), E4M3))
    with pytest.raises(FormatError, match=r"x.weight is I8; weights can be F64, F32"):
        make_weight(np.zeros((8, 16), np.int8))
    with pytest.raises(FormatError, match=r"x.weight_scale is F64; scales can be"):
        make_weight(np.zeros((8, 16), E4M3), np.ones((1,), np.float64), None, "weight_scale")


def block_of(tmp_path, settings):
    return WeightFinder(Config(tmp_path / "config.json", {"quantization_config": settings})).block


def test_block_of_the_scales(tmp_path):
    assert WeightFinder(Config(tmp_path / "config.json", {})).block is None
    assert block_of(tmp_path, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}) == (128, 64)
    assert block_of(tmp_path, {"quant_method": "fbgemm_fp8"}) is None
    assert block_of(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}) is None
    for producer in ("modelopt", {"name": "modelopt", "version": "0.31.0"}):  # early exporters: without a quant_method
        assert block_of(tmp_path, {"quant_algo": "FP8", "producer": producer}) is None
        assert block_of(tmp_path, {"quant_method": None, "quant_algo": "FP8", "producer": producer}) is None
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    assert block_of(tmp_path, settings) == (32, 16)
    settings["config_groups"] = {"group_0": {"weights": {"strategy": "channel"}}}
    assert block_of(tmp_path, settings) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "exl3", "bits": 4}, "quant_method 'exl3'; known are fp8, fbgemm_fp8, compressed-tensors, modelopt"),
        ({"quant_method": ["fp8"]}, "quant_method ['fp8']; known are fp8, "),
        ({"quant_method": {"fp8": 1}}, "quant_method {'fp8': 1}; known are fp8, "),
        ({"quant_method": "fp8", "fmt": ["e4m3"]}, "fmt ['e4m3']; known are e4m3, e5m2"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {n: {"weights": {"block_structure": s}} for n, s in (("a", [1, 2]), ("b", [1, "2"]))},
            },
            "several block structures",
        ),
        ({"bits": 4}, "quant_method None"),
        ({"quant_algo": "FP8", "producer": {"name": "another"}}, "quant_method None"),
        ({"quant_algo": "W4A8_AWQ", "producer": "modelopt"}, "quant_algo 'W4A8_AWQ'; known are FP8, "),
        ([1], "not an object"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'; known are float-quantized, "),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": []}, "lacks config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'; known are FP8, "),
        ({"quant_method": "gptq", "bits": 5}, "bits 5; known are 2, 3, 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "'marlin'; known are gptq, gptq_v2",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'; only gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits 8; only 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size is"),
    ],
)
def test_unsupported_quantizations(tmp_path, settings, message):
    with pytest.raises(FormatError, match=message.replace("[", r"\[")):
        block_of(tmp_path, settings)
