"""The same files and figures whatever the number of threads, of every kind of float source, with two sizes of micro-batches."""

import pytest

from ggufmill import compute_imatrix, convert_model, perplexity
from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
CUT = {"n_ctx": 64, "chunks": 2, "batch": 128}


@pytest.fixture(scope="module", params=["fp8", "bf16", "f16", "f32"])
def model(request, tmp_path_factory):
    """The demo: fp8 with a scale per block as it is, or a GGUF of it."""
    if request.param == "fp8":
        return DEMO
    path = tmp_path_factory.mktemp("same") / f"{request.param}.gguf"
    return convert_model(DEMO, path, outtype=request.param).files[0]


@pytest.mark.parametrize("ubatch", [128, 37])
def test_importance_matrices_and_covariances(model, tmp_path, ubatch):
    files = tmp_path / "a.imatrix", tmp_path / "a.cov"
    made = []
    for threads in (1, 2, 3):
        compute_imatrix(model, TEXT, files[0], covariance=files[1], force=True, threads=threads, ubatch=ubatch, **CUT)
        made.append([path.read_bytes() for path in files])
    assert made[0] == made[1] == made[2]
    assert min(map(len, made[0])) > 10_000


@pytest.mark.parametrize("ubatch", [128, 37])
def test_perplexity(model, ubatch):
    results = [perplexity(model, TEXT, threads=threads, ubatch=ubatch, **CUT) for threads in (1, 2, 3)]
    assert len({(result.perplexity, result.error, tuple(result.window_losses)) for result in results}) == 1
    assert len(results[0].window_losses) == 2
