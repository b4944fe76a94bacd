"""`run` of a model with draft layers (multi-token prediction): kept or left out, importance data, their rating."""

import json

import pytest
from draft_cases import convert_draft_case

from ggufmill import explain_recipe, run_recipe
from ggufmill.formats import PlanError, open_gguf
from ggufmill.imatrix.entries import load

RECIPE = """
[source]
model = "checkpoint"
[convert]
{convert}
[imatrix]
text = "text.txt"
ctx = 32
chunks = 2
{imatrix}
[quantize]
type = "q8_0"
[validate]
text = "text.txt"
ctx = 32
chunks = 1
{validate}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe")
    convert_draft_case("glm4moe-three", path / "checkpoint")
    (path / "text.txt").write_text("hello " * 30)
    return path


def written(folder, convert="", imatrix="", validate=""):
    path = folder / f"{bool(convert)}-{bool(imatrix)}-{bool(validate)}.toml"
    path.write_text(RECIPE.format(convert=convert, imatrix=imatrix, validate=validate))
    return path


@pytest.mark.slow
def test_draft_layers_have_importance_data_and_are_rated(folder, tmp_path):
    result = run_recipe(written(folder, "mtp = true", "nextn = true", "mtp = true"), tmp_path / "out")
    figures = result.report["validation"]["mtp"]
    assert len(figures) == 3
    assert all(0 < each["acceptance"] < 1 < each["perplexity"] for each in figures)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["validation"]["mtp"] == figures
    assert "Draft layer 3: perplexity" in (tmp_path / "out" / "report.md").read_text()
    [imatrix] = (tmp_path / "out").glob("*.imatrix")
    assert all(f"blk.{layer}.nextn.eh_proj.weight" in load(imatrix).entries for layer in (3, 4, 5))


@pytest.mark.slow
def test_without_these_keys_they_are_kept_and_not_run(folder, tmp_path):
    result = run_recipe(written(folder), tmp_path / "out")
    assert "mtp" not in result.report["validation"]
    [imatrix] = (tmp_path / "out").glob("*.imatrix")
    assert not any("nextn" in name for name in load(imatrix).entries)
    assert open_gguf(result.report["files"][0]).metadata["glm4moe.nextn_predict_layers"] == 3


def test_they_are_left_out_of_runs_and_plans(folder, tmp_path):
    recipe = written(folder, "mtp = false")
    [forecast] = run_recipe(recipe, tmp_path / "out", dry_run=True).quants
    plan = forecast.plan
    assert not any("nextn" in output.name for output in plan.outputs)
    explained = explain_recipe(folder / "checkpoint", recipe=recipe).plan
    assert [output.name for output in explained.outputs] == [output.name for output in plan.outputs]
    with pytest.raises(PlanError, match=r"\[validate\] mtp is for draft layers, of which .* has none"):
        run_recipe(written_for(folder, tmp_path), tmp_path / "out")


def written_for(folder, tmp_path):
    """A recipe for a model without draft layers that wants them rated."""
    convert_draft_case("glm4moe", tmp_path / "checkpoint", mtp=False)
    without = tmp_path / "without.toml"
    text = RECIPE.format(convert="", imatrix="", validate="mtp = true").replace("checkpoint", "checkpoint/model.gguf")
    without.write_text(text)
    (tmp_path / "text.txt").write_text("hello " * 30)
    return without
