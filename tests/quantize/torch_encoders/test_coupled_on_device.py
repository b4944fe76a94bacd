"""Rows encoded under a curvature by torch, on its DEVICE: feedback and loss of the processor, never worse than before."""

import numpy as np
import pytest
from covariances import covariance, weights

torch = pytest.importorskip("torch")
from op_graphs import DEVICE  # noqa: E402

from ggufmill import compute_imatrix, quantize_model  # noqa: E402
from ggufmill.errors import MillError  # noqa: E402
from ggufmill.formats import TYPES  # noqa: E402
from ggufmill.quantize import decode, encode  # noqa: E402
from ggufmill.quantize.covariance.coupling import couple  # noqa: E402
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance  # noqa: E402
from ggufmill.quantize.covariance.matrix.prepared import prepare  # noqa: E402
from ggufmill.quantize.covariance.refine import takes_covariance  # noqa: E402
from ggufmill.quantize.covariance.scalar_refinement import ScalarRefinement  # noqa: E402
from ggufmill.quantize.covariance.values import ScalarRows  # noqa: E402
from ggufmill.quantize.torch_encoders.coupled_on_device import couples_on_device  # noqa: E402
from ggufmill.quantize.torch_encoders.device_coupled_refinement import DeviceCoupledRefinement  # noqa: E402
from ggufmill.recipes import FOLDER  # noqa: E402

pytestmark = pytest.mark.oracle
ROWS, COLUMNS = 40, 256
ALL = [name for name in TYPES if takes_covariance(TYPES[name]) and TYPES[name].codec is not None]
ON_DEVICE = [name for name in ALL if couples_on_device(name)]


def coupled_rows(rows: int = ROWS, rank: int = 12):
    coupled = couple(Covariance(covariance(rows, rank, 3).matrix, 5000))
    assert coupled is not None
    return coupled


def loss(x, q, name, h, a) -> float:
    """tr(A R H R^T) in float64, both damped."""
    r = x.astype(np.float64) - decode(q, name, x.shape[1])
    return float(np.einsum("ij,jk,kl,il->", a.astype(np.float64), r, h.damped().astype(np.float64), r, optimize=True))


@pytest.mark.parametrize("name", ["q4_0", "iq4_k", "q2_K"])
def test_feedback_has_the_terms_of_the_cpu(name):
    x, h, coupled = weights(40, COLUMNS), covariance(COLUMNS, 40), coupled_rows(40)
    damped, q = prepare(h).damped, encode(x, name, h.diagonal)
    assert damped is not None
    both = (
        ScalarRefinement(x, ScalarRows.of(q, name), damped, 1, coupled),
        DeviceCoupledRefinement(x, ScalarRows.of(q, name), damped, 1, DEVICE, coupled),
    )
    for refinement in both:
        refinement.round_in_order()
    assert np.mean(both[0].rows.codes == both[1].rows.codes) > 0.99  # but for ties


def encoded_twice(name: str, rows: int, effort: int):
    """The losses of what is not coupled, of the processor's rows and of the DEVICE's."""
    x, h, coupled = weights(rows, COLUMNS), covariance(COLUMNS, 40), coupled_rows(rows)
    options = {"covariance": h, "effort": effort, "coupled": coupled}
    files = [encode(x, name, h.diagonal, device=DEVICE), *(encode(x, name, **options, device=d) for d in (None, DEVICE))]
    return [loss(x, q, name, h, coupled.descent.shares) for q in files], files


@pytest.mark.parametrize("name", ON_DEVICE)
def test_every_type_of_single_codes_is_better_than_before(name):
    (start, expected, actual), _ = encoded_twice(name, 8, 0)
    assert actual <= start
    assert actual == pytest.approx(expected, rel=0.25)  # another local optimum of descent under few rows


@pytest.mark.parametrize(("name", "effort"), [("q4_K", 1), ("iq3_k", 1), ("iq2_k", 2)])
def test_the_loss_of_the_cpu(name, effort):
    (start, expected, actual), _ = encoded_twice(name, ROWS, effort)
    assert actual < start / 2
    assert actual == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["iq4_kss", "iq2_kl", "iq2_xxs", "iq2_kt"])
def test_other_types_are_the_processors(name):
    """All that a device does for them is to encode rows for the first time, where it is a GPU that knows the type."""
    _, (_, expected, actual) = encoded_twice(name, 8, 0)
    assert not couples_on_device(name)
    assert np.array_equal(expected, actual)


def test_too_little_memory(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(DeviceCoupledRefinement, "choose_codes", fail)
    x, h = weights(8, COLUMNS), covariance(COLUMNS, 40)
    with pytest.raises(MillError, match="even for 8 rows, which cannot be parted"):
        encode(x, "q4_K", covariance=h, effort=0, device=DEVICE, coupled=coupled_rows(8))


def test_a_model_on_a_device(tmp_path, caplog):
    """`quantize --curvature --device`: what it takes is said before; types without moves of their own are named, once."""
    caplog.set_level("INFO", "ggufmill")
    source, given = tmp_path / "a.curv", {"custom_q": r"^blk\.0\.ffn=q4_K,^blk\.0=iq4_kss", "curvature": tmp_path / "a.curv"}
    text = FOLDER / "demo/calibration.txt"
    compute_imatrix(FOLDER / "demo", text, tmp_path / "a.imatrix", curvature=source, n_ctx=128, chunks=8, progress=False)
    quantize_model(FOLDER / "demo", tmp_path / "a.gguf", **given, effort=0, device="cpu", dry_run=True)
    assert "rows that are encoded together take up to 1" in caplog.text
    assert caplog.text.count("encoded together as iq4_kss stay with the processor") == 1
    assert not (tmp_path / "a.gguf").exists()
