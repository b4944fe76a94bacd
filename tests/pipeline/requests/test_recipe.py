"""Arguments, recipe and defaults become one request."""

import re
from pathlib import Path

import pytest

import ggufmill
from ggufmill.errors import PlanError
from ggufmill.pipeline.requests.convert import OUTTYPES, ConvertRequest
from ggufmill.pipeline.requests.groups import Measuring
from ggufmill.pipeline.requests.imatrix import ImatrixRequest
from ggufmill.pipeline.requests.quantize import QuantizeRequest
from ggufmill.pipeline.requests.recipe import given_recipe, merged
from ggufmill.pipeline.requests.rewriting import RepackRequest
from ggufmill.pipeline.requests.stages import GivenImatrixRequest, ReportRequest, SourceRequest, ValidateRequest
from ggufmill.quantize.recipes import recipe as recipes
from ggufmill.request_fields import fields_of

PIPELINE = Path(ggufmill.__file__).parent / "pipeline"
# Keys that say which files a run makes, or that `Recipe` reads by itself.
_OF_RUNS = {"quantize.rules", "quantize.name", "quantize.recipe", "quantize.imatrix", "quantize.repack"}


def test_tables_of_recipes_are_read_as_requests():
    """Which stages a recipe has is asked of its tables; what they say, of fields."""
    found = [(path, line) for path, line in _lines_with_tables() if not re.search(r'"\w+" (not )?in [\w.]+\.stages', line)]
    assert [path for path, _ in found] == ["requests/recipe.py", "reports/report_data.py"]  # `said`; which keys there are


def _lines_with_tables():
    for path in sorted(PIPELINE.rglob("*.py"), reverse=True):
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(r"\brecipe\.stages\b|\bloaded\.stages\b", line):
                yield path.relative_to(PIPELINE).as_posix(), line


def test_fields_name_the_keys_that_recipes_have():
    stages = (SourceRequest, GivenImatrixRequest, ImatrixRequest, Measuring, ValidateRequest, ReportRequest)
    kinds = (*stages, ConvertRequest, QuantizeRequest, RepackRequest)
    keys = {field.option.key for kind in kinds for field in fields_of(kind)} - {""}
    assert keys | _OF_RUNS == {f"{stage}.{key}" for stage, specs in recipes.STAGES.items() for key in specs}
    assert OUTTYPES == recipes.OUTTYPES


@pytest.fixture
def merge(tmp_path):
    def merge(text, **asked):
        path = tmp_path / "r.toml"
        path.write_text(text)
        request = QuantizeRequest("m", "o.gguf", recipe=path, **asked)
        return merged(request, given_recipe(request.recipe))

    return merge


def test_an_argument_beats_the_recipe_which_beats_the_default(merge, tmp_path):
    convert = '[convert]\nmtp = false\nmla_layout = "legacy"\nlora = ["a.gguf", "b=0.5"]\n'
    text = convert + '[quantize]\ntype = "Q4_K_M"\nfor = "ollama"\n'
    found = merge(text, mla_layout="ik")
    assert (found.mtp, found.mla_layout, found.type, found.program) == (False, "ik", "Q4_K_M", "ollama")
    assert found.lora == (str(tmp_path / "a.gguf"), str(tmp_path / "b=0.5"))
    assert (found.vocab, found.architecture) == (True, None)
    assert merge(text, mtp=True, program="llama.cpp", lora="c.gguf").lora == "c.gguf"
    assert merge(text, mtp=True).mtp is True


def test_one_target_and_one_way_to_split(merge):
    text = '[quantize]\nmax_kld = 0.1\nsplit_max_size = "1G"\n[search]\ntext = "r.toml"\n'
    found = merge(text)
    assert (found.max_kld, found.target_size, found.split_max_size) == (0.1, None, "1G")
    other = merge(text, target_size="3G", keep_split=True)
    assert (other.max_kld, other.target_size, other.split_max_size) == (None, "3G", None)


def test_files_lie_beside_the_recipe(merge, tmp_path):
    (tmp_path / "a.cov").write_text("")
    assert merge('[quantize]\ncovariance = "a.cov"\n').covariance == tmp_path / "a.cov"
    with pytest.raises(PlanError, match=r"r\.toml, \[quantize\] covariance: .*b\.cov does not exist"):
        merge('[quantize]\ncovariance = "b.cov"\n')
