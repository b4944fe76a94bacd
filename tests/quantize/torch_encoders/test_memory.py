"""A device whose memory does not suffice: fewer rows at a time, or one line, and a job that goes on."""

from pathlib import Path

import numpy as np
import pytest
from covariances import covariance, weights

torch = pytest.importorskip("torch")
from op_graphs import DEVICE  # noqa: E402

import ggufmill  # noqa: E402
from ggufmill import quantize  # noqa: E402
from ggufmill.errors import MillError  # noqa: E402
from ggufmill.quantize.torch_encoders import iqk, refine_on_device  # noqa: E402
from ggufmill.quantize.torch_encoders.device_scalar_refinement import DeviceScalarRefinement  # noqa: E402
from ggufmill.quantize.torch_encoders.device_vector_refinement import DeviceVectorRefinement  # noqa: E402
from ggufmill.recipes import FOLDER  # noqa: E402

pytestmark = pytest.mark.oracle

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ...")
FULL_ON_MPS = RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")


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


@pytest.mark.parametrize("error", [FULL, FULL_ON_MPS])
def test_fewer_rows_are_encoded_at_a_time(monkeypatch, error):
    x, qw = weights(7, 256), np.linspace(0, 1, 256, dtype=np.float32)
    expected = quantize.encode(x, "iq4_k", qw, device=DEVICE)
    given = limit_rows(monkeypatch, iqk, "encode", 2, error)
    assert np.array_equal(quantize.encode(x, "iq4_k", qw, device=DEVICE), expected)
    assert given == [7, 3, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "refinement", "given"),
    [("q4_K", DeviceScalarRefinement, [8, 4, 4]), ("iq1_s_r4", DeviceVectorRefinement, [8, 4, 4])],
)
def test_fewer_rows_are_refined_at_a_time(monkeypatch, name, refinement, given):
    x, h = weights(8, 256), covariance(256, 40)
    expected = quantize.encode(x, name, covariance=h, effort=0, device=DEVICE)
    seen = limit_rows(monkeypatch, refinement, "choose_codes", 7 if name == "q4_K" else 4)
    actual = quantize.encode(x, name, covariance=h, effort=0, device=DEVICE)
    assert np.mean(actual == expected) > 0.99  # sums of matrix products may depend on the number of rows
    assert seen == given


def test_matrices_are_sent_again_after_a_failure(monkeypatch):
    x, h = weights(4, 256), covariance(256, 40)
    freed = []
    monkeypatch.setattr(refine_on_device, "forget_matrices", lambda: freed.append(True))
    limit_rows(monkeypatch, DeviceScalarRefinement, "choose_codes", 2)
    quantize.encode(x, "q4_K", covariance=h, effort=0, device=DEVICE)
    assert freed


def test_one_row_is_too_much(monkeypatch):
    limit_rows(monkeypatch, iqk, "encode", 0)
    with pytest.raises(
        MillError, match=rf"^{DEVICE} has too little memory to encode iq4_k, even for one row: .*--device none"
    ) as info:
        quantize.encode(weights(4, 256), "iq4_k", device=DEVICE)
    assert "\n" not in str(info.value)


def test_other_errors_stay_what_they_are(monkeypatch):
    limit_rows(monkeypatch, iqk, "encode", 0, RuntimeError("device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        quantize.encode(weights(4, 256), "iq4_k", device=DEVICE)


def test_a_job_goes_on_after_the_device_was_full(tmp_path: Path, monkeypatch):
    made = {"type": "q8_0", "custom_q": "kv_a_mqa=iq4_k", "force": True, "device": DEVICE}
    ggufmill.quantize_model(FOLDER / "demo", tmp_path / "whole.gguf", **made)
    calls, encode = [], iqk.encode

    def full_after_a_while(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise FULL
        return encode(*arguments)

    monkeypatch.setattr(iqk, "encode", full_after_a_while)
    with pytest.raises(MillError, match=r"too little memory to encode iq4_k.*tensors are kept; --resume continues"):
        ggufmill.quantize_model(FOLDER / "demo", tmp_path / "out.gguf", **made)
    assert not (tmp_path / "out.gguf").exists()
    monkeypatch.setattr(iqk, "encode", encode)
    ggufmill.quantize_model(FOLDER / "demo", tmp_path / "out.gguf", **{**made, "force": False}, resume=True)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
