"""The same files and figures whatever the number of threads and the size of micro-batches, of every kind of float source."""

from itertools import cycle

import pytest

from ggufmill import compute_imatrix, convert_model, perplexity
from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
# The first window runs alone, then three at a time; without -ub, they are one pass.
CUT = {"n_ctx": 40, "chunks": 4, "batch": 120}
UBATCHES = (None, 1, 37, 80)


@pytest.fixture(scope="module", params=["fp8", "bf16", "f16", "f32"])
def model(request, tmp_path_factory):
    """The demo (latent attention, experts): fp8 with a scale per block as it is, or a GGUF of it."""
    if request.param == "fp8":
        return DEMO
    path = tmp_path_factory.mktemp("same") / f"{request.param}.gguf"
    return convert_model(DEMO, path, outtype=request.param).files[0]


def settings(**more):
    """Settings of runs whose results have to be equal: any micro-batch, any number of threads."""
    for ubatch, threads in zip(UBATCHES, cycle((2, 1, 3)), strict=False):
        yield CUT | {"threads": threads} | more | ({} if ubatch is None else {"ubatch": ubatch})


def scores(model, **options):
    result = perplexity(model, TEXT, **options)
    figures = (result.kld_mean, result.kld_percentiles, result.top1_agreement)
    return repr((result.perplexity, result.error, result.window_losses, *figures))


@pytest.mark.slow(keep=["fp8"])
def test_importance_matrices_and_covariances(model, tmp_path):
    files = tmp_path / "a.imatrix", tmp_path / "a.cov"
    made = set()
    for each in settings():
        compute_imatrix(model, TEXT, files[0], covariance=files[1], covariance_experts=True, force=True, **each)
        made.add(tuple(path.read_bytes() for path in files))
    assert len(made) == 1
    assert min(map(len, made.pop())) > 10_000


@pytest.mark.slow(keep=["fp8"])
def test_importance_matrices_alone(model, tmp_path):
    """Latent attention has sums of squares then, not the inputs themselves."""
    file, made = tmp_path / "a.imatrix", set()
    for each in settings():
        compute_imatrix(model, TEXT, file, process_output=True, process_embedding=True, force=True, **each)
        made.add(file.read_bytes())
    assert len(made) == 1


@pytest.mark.slow
def test_perplexity(model):
    assert len({scores(model, **each) for each in settings()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mla", [0, 1, 2])
def test_forms_of_latent_attention(mla):
    assert len({scores(DEMO, **each) for each in settings(mla=mla)}) == 1


def test_divergence_of_quantised_weights_from_a_baseline(tmp_path):
    path = convert_model(DEMO, tmp_path / "q8_0.gguf", outtype="q8_0").files[0]
    assert len({scores(path, kl_divergence=DEMO, **each) for each in settings()}) == 1


@pytest.mark.slow
def test_windows_of_a_few_tokens(model):
    """As many as have kernels of their own."""
    assert len({scores(model, **each) for each in settings(n_ctx=6, batch=24, chunks=9)}) == 1
