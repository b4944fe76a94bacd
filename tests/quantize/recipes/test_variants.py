"""Recipes of several files: names, tables of their own, errors."""

import tomllib

import pytest

from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.rules import RecipeError

HEAD = "[source]\nmodel = 'm'\n[imatrix]\ntext = 'a.txt'\n[repack]\npattern = 'ffn'\n"


@pytest.fixture
def load(tmp_path):
    def of(text, several=True):
        (tmp_path / "r.toml").write_text(text)
        return load_recipe(tmp_path / "r.toml", several=several)

    return of


def test_a_list_of_types(load):
    recipe = load(HEAD + "[quantize]\ntype = ['Q4_K_M', 'iq3_k']\nrules = 'attn=q8_0'\nsplit_max_size = '1G'\n")
    assert [one.label for one in recipe.several] == ["Q4_K_M", "IQ3_K"]
    assert [getattr(one.type, "name", one.type) for one in recipe.each] == ["Q4_K_M", "IQ3_K"]
    assert all(str(one.rules[0]) == "attn=q8_0" and one.split_max_size == 10**9 for one in recipe.each)
    assert "quantize" not in recipe.stages
    assert recipe.stages["source"] == {"model": "m"}


def test_tables_with_values_of_their_own(load, tmp_path):
    (tmp_path / "some.rules.txt").write_text("custom='ffn=q6_K'")
    recipe = load(
        HEAD + "[[quantize]]\ntype = 'q8_0'\nimatrix = false\nrepack = false\n"
        "[[quantize]]\ntarget_bpw = 3.5\nrepack = 'attn'\n"
        "[[quantize]]\nname = 'mine'\nrules = 'attn=q8_0'\nrecipe = 'some.rules.txt'\nrepack = true\n"
        "[search]\nrows = 8\n"
    )
    plain, searched, mine = recipe.several
    assert [one.label for one in recipe.several] == ["Q8_0", "3.5bpw", "mine"]
    assert plain.stages.keys() == {"source", "quantize"}
    assert searched.stages["repack"] == {"pattern": "attn"}
    assert searched.stages["search"] == {"rows": 8}
    assert "imatrix" in searched.stages
    assert mine.stages["repack"] == {"pattern": "ffn"}
    assert [str(rule) for rule in mine.rules] == ["attn=q8_0", "ffn=q6_K"]
    assert "search" not in mine.stages


def test_the_text_of_each_says_what_decides_its_own_file(load):
    both = "[[quantize]]\ntype = 'q8_0'\nrules = '''\na=q4_0\nb=q4_1\n'''\n[[quantize]]\ntype = 'q4_0'\n"
    one, other = load(HEAD + "[convert]\nmtp = false\n" + both).several
    assert tomllib.loads(one.text) == {"convert": {"mtp": False}, "quantize": {"type": "q8_0", "rules": "a=q4_0\nb=q4_1\n"}}
    assert load(HEAD + "[convert]\nmtp = false\n" + both + "[[quantize]]\ntype = 'q5_0'\n").several[1].text == other.text


def test_one_table_as_ever(load):
    recipe = load(HEAD + "[quantize]\ntype = 'q8_0'\n")
    assert recipe.several == []
    assert recipe.each == [recipe]
    assert recipe.label == ""
    assert "type = 'q8_0'" in recipe.text
    named = load(HEAD + "[quantize]\ntype = 'q8_0'\nname = 'small'\n")
    assert [one.label for one in named.each] == ["small"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("[quantize]\ntype = []", "names no type"),
        ("[quantize]\ntype = ['q4_0', 4]", "type = 4 has to be text"),
        ("[quantize]\ntype = ['q4_0', 'Q4_0']", "two files would be called q4_0"),
        ("[quantize]\ntype = ['q4_0', 'q5_0']\nname = 'x'", "has one name for 2 types"),
        ("[[quantize]]\nrules = 'a=q8_0'", "has nothing to call its file by"),
        ("[[quantize]]\ntype = 'q8_0'\nname = '../x'", "cannot be part of a file's name"),
        ("[[quantize]]\ntype = 'q8_0'\nnone = 1", "has no key 'none'"),
        ("[[quantize]]\ntype = 'nope'", "'nope'"),
        ("[[quantize]]\ntype = 'q8_0'\nrecipe = 'none.txt'", "none.txt"),
        ("[[quantize]]\ntype = 'q8_0'\nrecipe = 'r.toml'", "has to be a text of rules"),
        ("[[quantize]]\ntype = 'q8_0'\nimatrix = true", "needs a table [imatrix]"),
        ("quantize = []", "there is no table [[quantize]]"),
        ("quantize = [1]", "[quantize] is not a stage"),
    ],
)
def test_errors(load, tables, message):
    with pytest.raises(RecipeError) as error:
        load(tables)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_where_one_is_wanted(load):
    with pytest.raises(RecipeError, match=r"several files \(Q4_0, Q5_0\), which `ggufmill run` makes"):
        load("[quantize]\ntype = ['q4_0', 'q5_0']", several=False)
