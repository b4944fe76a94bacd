"""What the tests of quantisation methods share."""

import json

import numpy as np
import pytest

from ggufmill.convert.config import Config
from ggufmill.convert.quantization.methods import WeightFinder
from ggufmill.formats.safetensors import open_safetensors


@pytest.fixture
def check_weight(tmp_path, write_checkpoint):
    """check(quantization_config, tensors, expected values): the weight x, after comparing runs of rows and single rows."""

    def check(settings, tensors, expected, tolerance=0.0):
        tensors = {f"x.{name}": array for name, array in tensors.items()}
        folder = write_checkpoint(tmp_path / "model", {"quantization_config": settings}, tensors)
        stored = open_safetensors(folder)
        weight, used = WeightFinder(Config(folder / "config.json", json.loads((folder / "config.json").read_text())))(
            "x.weight", stored, expected.shape
        )
        assert weight.shape == expected.shape
        assert {tensor.name for tensor in used} == set(tensors)
        rows, flat = weight.rows, expected.reshape(-1, expected.shape[-1])
        values = weight.read(slice(0, rows))
        assert np.allclose(values, flat, rtol=tolerance, atol=0)
        assert np.array_equal(weight.read(slice(13, 30)), values[13:30])
        assert np.array_equal(weight.read(slice(40, 41)), values[40:41])
        order = np.array([51, 33, 50, 50])
        assert np.array_equal(weight.read(order), values[order])
        return weight

    return check
