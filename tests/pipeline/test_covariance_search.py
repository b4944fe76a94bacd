"""Recipes for a size with errors that covariances weigh: `search`, `quantize` to a target, and `run`."""

from __future__ import annotations

import json

import pytest

from ggufmill import compute_imatrix, quantize_model, search_recipe
from ggufmill.errors import MillError, UsageError
from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
FEW = {"types": "q4_0,q5_0,q8_0", "rows": 8, "threads": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    imatrix, covariance = folder / "demo.imatrix", folder / "demo.cov"
    compute_imatrix(DEMO, TEXT, imatrix, chunks=2, covariance=covariance)
    return imatrix, covariance


def test_what_errors_are_weighted_by_is_said_and_not_mixed_up(files, tmp_path, caplog):
    imatrix, covariance = files
    common = {"target_bpw": 5.5, "imatrix": imatrix, "force": True, **FEW}
    plain = search_recipe(DEMO, tmp_path / "plain.txt", **common, state=tmp_path / "plain.json")
    assert plain.as_json()["errors_weighted_by"] == {
        "covariance": None, "curvature": False, "effort": None, "tensors": 0, "by_importance": {}
    }  # fmt: skip
    caplog.set_level("INFO", "ggufmill")
    weighted = search_recipe(DEMO, tmp_path / "w.txt", **common, covariance=covariance, effort=0, state=tmp_path / "w.json")
    said = caplog.text
    assert "note: errors of types are weighted by the covariances of demo.cov at effort 0 for 47 of 51 tensors" in said
    assert "by importance only for blk.1.ffn_down_exps.weight" in said
    assert "none was collected" in said
    assert "weighted by the covariances of demo.cov at effort 0" in weighted.text
    figures = weighted.as_json()["errors_weighted_by"]
    assert (figures["covariance"], figures["effort"], figures["tensors"]) == ("demo.cov", 0, 47)
    assert set(figures["by_importance"]) == {
        "token_embd.weight", *(f"blk.{layer}.ffn_down_exps.weight" for layer in (1, 2, 3))
    }  # fmt: skip
    errors = [json.loads((tmp_path / name).read_text())["errors"] for name in ("plain.json", "w.json")]
    for name in figures["by_importance"]:
        assert errors[0][name] == errors[1][name]
    assert all(errors[1][f"blk.{layer}.attn_q_a.weight"]["q4_0"] < errors[0][f"blk.{layer}.attn_q_a.weight"]["q4_0"]
               for layer in range(3))  # fmt: skip
    for other in ({}, {"covariance": covariance, "effort": 1}):
        with pytest.raises(MillError, match=r"w.json is of another model, .*covariance, --effort, .*; give another --state"):
            search_recipe(DEMO, tmp_path / "x.txt", **common, state=tmp_path / "w.json", **other)


def test_a_file_of_the_size_with_the_metadata_of_covariances(files, tmp_path):
    imatrix, covariance = files
    out = tmp_path / "out.gguf"
    size = 5_900_000
    quantize_model(DEMO, out, target_size=size, imatrix=imatrix, covariance=covariance, effort=0, types=FEW["types"])
    assert 0.99 * size < out.stat().st_size <= size
    assert open_gguf(out).metadata["quantize.covariance.file"] == "demo.cov"
    assert "weighted by the covariances of demo.cov at effort 0" in (tmp_path / "out.gguf.recipe.txt").read_text()


def test_measured_divergence_is_that_of_rows_encoded_with_the_covariance(files, tmp_path):
    imatrix, covariance = files
    rules = tmp_path / "rules.txt"
    rules.write_text("^(token_embd|output)|ffn|attn_(k|v|kv)=q8_0\n")
    common = {"target_bpw": 8.5, "imatrix": imatrix, "rules": rules, "text": TEXT, "n_ctx": 64, "chunks": 2, "measurements": 2}
    small = {**common, **FEW, "types": "q4_0"}
    plain = search_recipe(DEMO, tmp_path / "a.txt", **small)
    weighted = search_recipe(DEMO, tmp_path / "b.txt", **small, covariance=covariance, effort=1)
    assert plain.types == weighted.types
    assert weighted.measured.mean < 0.9 * plain.measured.mean


def test_refused(files, tmp_path, monkeypatch):
    imatrix, covariance = files
    monkeypatch.setattr("ggufmill.quantize.search.row_sample.RowSample.errors", lambda self, kinds: pytest.fail("measured"))
    common = {"target_bpw": 5.5, "imatrix": imatrix, **FEW}
    for more in ({"effort": 1}, {"strict": True}):
        with pytest.raises(UsageError, match="--covariance"):
            search_recipe(DEMO, tmp_path / "x.txt", **common, **more)
    strict = "--strict: errors can be weighted by importance only for blk.1.ffn_down_exps.weight and 2 more: none was collected"
    with pytest.raises(MillError, match=strict):
        search_recipe(DEMO, tmp_path / "x.txt", **common, covariance=covariance, strict=True)
    target = {"target_bpw": 5.5, "types": "q4_0,q8_0", "imatrix": imatrix, "covariance": covariance, "strict": True}
    with pytest.raises(MillError, match=strict):
        quantize_model(DEMO, tmp_path / "x.gguf", **target)
    with pytest.raises(MillError, match="is an input of this job"):
        search_recipe(DEMO, covariance, **common, covariance=covariance, force=True)
    assert not list(tmp_path.iterdir())


RUN = f"""
[source]
model = "{DEMO}"
[imatrix]
text = "{TEXT}"
ctx = 128
chunks = 4
covariance = "kept/demo.cov"
[quantize]
target_bpw = 6
effort = 0
[search]
types = "q4_0,q5_0,q8_0"
rows = 8
"""


@pytest.mark.slow
def test_a_run_collects_into_a_file_that_is_named_and_searches_with_it(mill, tmp_path):
    """Not again when nothing changes; again with another effort; a file that is somebody else's is not replaced."""
    recipe, kept = tmp_path / "r.toml", tmp_path / "kept/demo.cov"
    recipe.write_text(RUN)
    job = ("run", recipe, "-o", tmp_path / "out", "-t", 1)
    assert "not a folder that can be written to" in mill(*job)[2]
    kept.parent.mkdir()
    kept.write_bytes(b"of the user")
    assert f"{kept} exists; use --force" in mill(*job)[2]
    assert kept.read_bytes() == b"of the user"
    kept.unlink()
    code, _, err = mill(*job)
    assert code == 0, err
    assert "weighted by the covariances of demo.cov at effort 0" in err
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["search"]["errors_weighted_by"]["covariance"] == "demo.cov"
    assert not (tmp_path / "out/r.cov").exists()
    metadata = open_gguf(tmp_path / "out/r.gguf").metadata
    assert metadata["quantize.covariance.file"] == "demo.cov"
    assert str(tmp_path) not in metadata["ggufmill.recipe"]
    made, again = kept.read_bytes(), mill(*job)[2]
    assert "imatrix: done before" in again
    assert "search: done before" in again
    recipe.write_text(RUN.replace("effort = 0", "effort = 1"))
    again = mill(*job)[2]
    assert "imatrix: done before" in again
    assert "search: done before" not in again
    assert kept.read_bytes() == made


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--covariance", "x.cov"), ("--process-output", "--process-embedding")])
def test_dry_run_of_collecting_says_the_sizes_that_the_files_have(mill, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    for out in ("x.imatrix", "x.dat"):
        job = ("imatrix", DEMO, "-f", TEXT, "-o", out, "-c", 128, "--chunks", 8, "-t", 1, *more)
        code, text, err = mill(*job, "--dry-run", "--json")
        assert code == 0, err
        assert not list(tmp_path.iterdir())
        said = json.loads(text)
        assert (said["windows"], said["tokens"]) == (8, 1024)
        assert mill(*job)[0] == 0
        assert said["file_bytes"] == (tmp_path / out).stat().st_size
        if "--covariance" in more:
            assert said["covariance"]["file_bytes"] == (tmp_path / "x.cov").stat().st_size
            assert "covariances of 33 inputs" in mill(*job, "--dry-run")[1]  # files that are there stay
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.slow
def test_curvature_predicts_divergences_without_a_text(tmp_path):
    pytest.importorskip("torch")
    imatrix, curvature = tmp_path / "demo.imatrix", tmp_path / "demo.curv"
    compute_imatrix(DEMO, TEXT, imatrix, chunks=2, n_ctx=256, curvature=curvature)
    common = {"imatrix": imatrix, "curvature": curvature, "effort": 0, "state": tmp_path / "state.json", "force": True, **FEW}
    small = search_recipe(DEMO, tmp_path / "small.txt", target_bpw=5.5, **common)
    weighted_by = small.as_json()["errors_weighted_by"]
    assert (weighted_by["curvature"], weighted_by["tensors"]) == (True, 50)
    assert weighted_by["by_importance"] == {"token_embd.weight": "no gradients were collected"}
    assert "KL divergence predicted from curvature" in small.text
    # Of the query matrices hardly anything is felt, of the last layer's experts most: relative errors do not know.
    errors = json.loads((tmp_path / "state.json").read_text())["errors"]
    assert errors["blk.1.attn_q_a.weight"]["q4_0"] < 0.1 * errors["blk.3.ffn_down_exps.weight"]["q4_0"]
    below = search_recipe(DEMO, tmp_path / "below.txt", max_kld=2 * small.assignment.predicted, **common)
    assert below.assignment.predicted < small.assignment.predicted
    assert below.plan.total_bytes > small.plan.total_bytes
    assert below.measured is None
