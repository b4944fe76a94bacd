"""PTX of encoders: rounded as the processor rounds, and accepted by NVIDIA's assembler where that is there."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ggufmill.quantize.plain_rows import codec_of
from ggufmill.simd.cuda.launch import ptx, request_of, work_of
from ggufmill.simd.cuda.work_items import launching


def ptx_of(name: str) -> str:
    requests = []

    def record(kernel, items, arguments):
        requests.append((request_of(kernel, arguments, work_of(kernel, items, arguments)), items.lanes))
        with launching(None):
            kernel(*arguments)

    with launching(record):
        codec_of(name).items.encode(np.random.default_rng(1).standard_normal((4, 512), np.float32), np.ones(512, np.float32))
    return ptx(*requests[0])


def test_products_and_sums_are_not_fused():
    code = ptx_of("iq4_nl")
    assert re.search(r"\bfma\.rn\.f32\b", code)
    assert re.search(r"\bmul\.rn\.f32\b", code)
    assert not re.findall(r"\b(?:mul|add|sub)\.f(?:32|64)\b|\.approx\b|\.ftz\b", code)


@pytest.mark.oracle
@pytest.mark.slow(keep=["iq4_nl"])
@pytest.mark.parametrize("name", ["iq4_nl", "q4_K", "iq2_xxs"])  # of 1 lane, and of 16
def test_the_assembler_takes_it(name, tmp_path):
    triton = pytest.importorskip("triton")
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not assembler.is_file():
        pytest.skip("triton comes without ptxas here")
    (tmp_path / "a.ptx").write_text(ptx_of(name))
    done = subprocess.run(
        [assembler, "-arch=sm_80", tmp_path / "a.ptx", "-o", tmp_path / "a.cubin"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
