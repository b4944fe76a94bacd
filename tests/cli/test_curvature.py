"""`imatrix --curvature` from the command line, and in recipes."""

import sys

import pytest

from ggufmill.formats import open_gguf
from ggufmill.imatrix.covariance import open_covariance
from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
SHORT = ("-c", 64, "-t", 1)


def test_one_line_without_torch(mill, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    job = ("imatrix", DEMO, "-f", TEXT, "-o", tmp_path / "a.imatrix", "--curvature", tmp_path / "a.curv", "--chunks", 1, *SHORT)
    code, _, err = mill(*job)
    assert code == 1
    assert "--curvature needs torch" in err
    assert "pip install 'ggufmill[gpu]'" in err
    assert len(err.strip().splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.oracle
def test_collected_shown_and_merged(mill, tmp_path):
    parts = []
    for start in (0, 2):
        parts.append(tmp_path / f"{start}.curv")
        job = ("imatrix", DEMO, "-f", TEXT, "-o", tmp_path / f"{start}.imatrix", "--curvature", parts[-1], "--chunks", 2)
        dry = mill(*job, "--from-chunk", start, *SHORT, "--dry-run")
        assert "covariances of 36 inputs and of gradients at 53 outputs" in dry[1]
        assert "for values between layers" in dry[1]
        code, _, err = mill(*job, "--from-chunk", start, *SHORT)
        assert code == 0, err
        assert "covariance of 36 inputs of 64 to 768 columns, second moments of gradients at 53 outputs" in err
    code, out, err = mill("imatrix", "merge", *parts, "-o", tmp_path / "both.curv")
    assert (code, out.strip()) == (
        0,
        f"{tmp_path}/both.curv: covariances of 36 inputs and of gradients at 53 outputs, 4 chunks",
    )
    code, out, _ = mill("imatrix", "show", tmp_path / "both.curv")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith("blk.1.ffn_down_exps.weight")]
    assert [(row[1], row[3], row[4]) for row in rows] == [("input", "256", "8"), ("output", "256", "8")]
    assert "36 inputs, 53 outputs" in out


RUN = """
[source]
model = "{demo}"
[imatrix]
text = "{demo}/calibration.txt"
ctx = 64
chunks = 2
curvature = true
[quantize]
type = "q3_K"
effort = 0
"""


@pytest.mark.oracle
def test_a_run_with_a_largest_divergence_is_planned_by_the_curvature_to_come(mill, tmp_path):
    """It predicts divergences, so that the search needs no text."""
    recipe = tmp_path / "small.toml"
    recipe.write_text(RUN.format(demo=DEMO).replace('type = "q3_K"', "max_kld = 0.05"))
    code, _, err = mill("run", recipe, "-o", tmp_path / "out", "--dry-run")
    assert code == 0, err
    recipe.write_text(recipe.read_text().replace("curvature", "covariance"))
    code, _, err = mill("run", recipe, "-o", tmp_path / "out", "--dry-run")
    assert code == 1
    assert "max_kld needs [search] text, a file to measure on, or curvature" in err


@pytest.mark.oracle
@pytest.mark.slow
def test_a_run_collects_both_sides(mill, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text(RUN.format(demo=DEMO))
    code, _, err = mill("run", recipe, "-o", tmp_path / "out", "-t", 1)
    assert code == 0, err
    assert len(open_covariance(tmp_path / "out/small.curv").outputs) == 53
    assert open_gguf(tmp_path / "out/small.gguf").metadata["quantize.covariance.file"] == "small.curv"
    before = (tmp_path / "out/small.curv").stat().st_mtime_ns
    assert mill("run", recipe, "-o", tmp_path / "out", "-t", 1)[0] == 0
    assert (tmp_path / "out/small.curv").stat().st_mtime_ns == before
