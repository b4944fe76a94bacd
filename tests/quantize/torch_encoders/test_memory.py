"""A device whose memory does not suffice: the same rows alone, then fewer at a time, or one line, and a job that goes on."""

import numpy as np
import pytest
from covariances import covariance, weights

torch = pytest.importorskip("torch")
from gpu_on_processor import DEVICE, use_it  # noqa: E402

from ggufmill import quantize  # noqa: E402
from ggufmill.errors import MillError  # noqa: E402
from ggufmill.quantize.torch_encoders import encode_on_gpu, gpu_refinement  # noqa: E402
from ggufmill.quantize.torch_encoders.gpu_refinement import GpuScalarRefinement, GpuVectorRefinement  # noqa: E402

pytestmark = pytest.mark.oracle

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ...")
FULL_ON_MPS = RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    use_it(monkeypatch)


def limit_rows(monkeypatch, target, name, most, error=FULL) -> list[int]:
    """Makes a function fail where it is given more than `most` rows: the numbers of rows it is given, as they come."""
    work, given = getattr(target, name), []

    def limited(x, *arguments):
        rows = x.x if hasattr(x, "x") else x
        given.append(len(rows))
        if len(rows) > most:
            raise error
        return work(x, *arguments)

    monkeypatch.setattr(target, name, limited)
    return given


@pytest.mark.parametrize(
    ("name", "refinement", "given", "error"),
    [
        ("q4_K", GpuScalarRefinement, [8, 8, 4, 4], FULL),
        ("iq1_s_r4", GpuVectorRefinement, [8, 8, 4, 4], FULL_ON_MPS),
    ],
)
def test_fewer_rows_are_refined_at_a_time(monkeypatch, name, refinement, given, error):
    x, h = weights(8, 256), covariance(256, 40)
    expected = quantize.encode(x, name, covariance=h, effort=0, device=DEVICE)
    seen = limit_rows(monkeypatch, refinement, "choose_codes", 7 if name == "q4_K" else 4, error)
    actual = quantize.encode(x, name, covariance=h, effort=0, device=DEVICE)
    assert np.array_equal(actual, expected)
    assert seen == given


def test_fewer_rows_are_encoded_at_a_time(monkeypatch):
    x = weights(8, 512)
    expected, seen = quantize.encode(x, "q4_K"), []
    monkeypatch.setattr(encode_on_gpu, "_records", {})

    class Small(encode_on_gpu.Workspace):
        def __init__(self, recorded):
            seen.append(recorded.rows)
            if recorded.rows > 4:
                raise FULL
            super().__init__(recorded)

    monkeypatch.setattr(encode_on_gpu, "Workspace", Small)
    monkeypatch.setattr(encode_on_gpu, "PIECE", 6 * 512)  # two pieces of four rows
    assert np.array_equal(quantize.encode(x, "q4_K", device=DEVICE), expected)
    assert set(seen) == {6, 4}


def test_matrices_are_sent_again_after_a_failure(monkeypatch):
    x, h = weights(4, 256), covariance(256, 40)
    freed = []
    monkeypatch.setattr(gpu_refinement, "forget_matrices", lambda: freed.append(True))
    limit_rows(monkeypatch, GpuScalarRefinement, "choose_codes", 2)
    quantize.encode(x, "q4_K", covariance=h, effort=0, device=DEVICE)
    assert freed


def test_one_row_is_too_much(monkeypatch):
    limit_rows(monkeypatch, GpuScalarRefinement, "choose_codes", 0)
    with pytest.raises(
        MillError, match=rf"^{DEVICE} has too little memory to refine q4_K.*even for one row: .*--device none"
    ) as info:
        quantize.encode(weights(4, 256), "q4_K", covariance=covariance(256, 40), effort=0, device=DEVICE)
    assert "\n" not in str(info.value)


def test_other_errors_stay_what_they_are(monkeypatch):
    limit_rows(monkeypatch, GpuScalarRefinement, "choose_codes", 0, RuntimeError("device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        quantize.encode(weights(4, 256), "q4_K", covariance=covariance(256, 40), effort=0, device=DEVICE)
