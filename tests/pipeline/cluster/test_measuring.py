"""A search whose measurements are made by worker processes: the recipe and all measurements of one machine."""

import json

import pytest

pytest.importorskip("distributed")

from ggufmill.errors import MillError
from ggufmill.pipeline.cluster.measuring import SearchInputs, _Measuring
from ggufmill.pipeline.cluster.models import address_of
from ggufmill.pipeline.imatrix import compute_imatrix
from ggufmill.pipeline.search import search_recipe
from ggufmill.quantize.gguf_source import gguf_source

pytestmark = pytest.mark.process


@pytest.fixture
def data(demo, tmp_path):
    paths = {"imatrix": tmp_path / "i.gguf", "covariance": tmp_path / "i.cov"}
    compute_imatrix(demo.model, demo.calibration, paths["imatrix"], covariance=paths["covariance"], n_ctx=64, chunks=2)
    return paths


def test_recipe(models, demo, data, cluster, tmp_path):
    options = {
        "target_bpw": 7,
        "types": "q4_0,q8_0",
        "rows": 8,
        "n_ctx": 32,
        "chunks": 2,
        "text": demo.calibration,
    }
    options |= {"measurements": 4, "refine": 1, **data}
    one = search_recipe(models.bf16, tmp_path / "one.txt", **options)
    two = search_recipe(models.bf16, tmp_path / "two.txt", cluster=cluster, **options)
    assert (tmp_path / "one.txt").read_text("utf-8") == (tmp_path / "two.txt").read_text("utf-8")
    assert one.measured == two.measured
    states = [json.loads((tmp_path / f"{name}.txt.state.json").read_text("utf-8")) for name in ("one", "two")]
    assert states[0] == states[1]
    assert len(next(iter(states[0]["divergences"].values()))) > 8


def test_without_a_text(models, cluster, tmp_path):
    for name, where in (("one", None), ("two", cluster)):
        search_recipe(models.bf16, tmp_path / name, target_bpw=5.5, types="q4_0,q8_0", rows=8, cluster=where)
    assert (tmp_path / "one").read_text("utf-8") == (tmp_path / "two").read_text("utf-8")


def test_another_importance_matrix_on_a_worker(models, data):
    where = address_of(models.bf16, gguf_source(models.bf16))
    with pytest.raises(MillError, match="another importance matrix here"):
        _Measuring(SearchInputs(where, str(data["imatrix"]), "0", None, 1, 8, 0))
