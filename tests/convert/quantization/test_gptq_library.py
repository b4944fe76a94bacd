"""GPTQ's weights against AutoGPTQ's own packing and its product with unit vectors."""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest

ROWS, COLUMNS, GROUP = 64, 192, 64


@pytest.fixture
def quant_linear(monkeypatch):
    """The library's layer. Its package imports parts of transformers that are gone since version 5, which the layer does not
    need: the package is entered as an empty one."""
    pytest.importorskip("torch")
    spec = importlib.util.find_spec("auto_gptq")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("auto_gptq is not installed")
    package = types.ModuleType("auto_gptq")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "auto_gptq", package)
    return importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("desc_act", [False, True])
def test_weights_are_those_of_the_library(check_weight, quant_linear, bits, desc_act):
    import torch

    draw = torch.Generator().manual_seed(bits)
    groups = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    if desc_act:
        groups = groups[torch.randperm(COLUMNS, generator=draw)]
    scales = (0.01 + torch.rand(ROWS, COLUMNS // GROUP, generator=draw)).half().float()
    zeros = torch.randint(1, 2**bits, (ROWS, COLUMNS // GROUP), generator=draw)
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=draw)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = torch.nn.Parameter((codes - zeros[:, groups.long()]) * scales[:, groups.long()])
    layer = quant_linear(bits, GROUP, COLUMNS, ROWS, False)
    layer.pack(linear, scales, zeros.float(), groups)
    layer.scales = layer.scales.half()
    with torch.no_grad():
        expected = layer(torch.eye(COLUMNS, dtype=torch.float16)).float().t().contiguous().numpy()
    assert np.abs(expected - linear.weight.detach().numpy()).max() < 0.002 * np.abs(expected).max()
    tensors = {name: getattr(layer, name).numpy() for name in ("qweight", "qzeros", "scales", "g_idx")}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": desc_act}
    check_weight(settings, tensors, expected, 2**-10)  # the library decodes in half precision
