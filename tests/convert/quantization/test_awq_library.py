"""AWQ's weights against AutoAWQ's own packing and unpacking."""

import numpy as np
import pytest

pytestmark = pytest.mark.oracle

ROWS, COLUMNS, GROUP = 64, 192, 64


def test_weights_are_those_of_the_library(check_weight):
    torch = pytest.importorskip("torch")
    packing = pytest.importorskip("awq.utils.packing_utils", exc_type=ImportError)
    gemm = pytest.importorskip("awq.modules.linear.gemm", exc_type=ImportError)
    draw = torch.Generator().manual_seed(3)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    scales = 0.01 + torch.rand(ROWS, COLUMNS // GROUP, generator=draw)
    zeros = torch.randint(0, 16, (ROWS, COLUMNS // GROUP), generator=draw)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=draw)
    values = (codes - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)
    linear.weight = torch.nn.Parameter(values)
    # The library's packing takes scales and zero points transposed, [groups, rows].
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    expected = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).t().contiguous()
    assert np.abs(expected.float().numpy() - values.numpy()).max() < 0.02
    tensors = {name: getattr(packed, name).numpy() for name in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    check_weight(settings, tensors, expected.float().numpy(), 2**-10)  # the library decodes in half precision
