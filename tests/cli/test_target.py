"""A recipe with a target: `run` finds the rules, and keeps, uses and reports them."""

import json
import os
import re

import pytest

from ggufmill.formats import open_gguf
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.rules import RecipeError

RECIPE = """
[source]
model = "m"
{imatrix}
[quantize]
target_bpw = 6.5
rules = "attn_v=q8_0"
[search]
types = "q4_0,q5_0,q8_0"
rows = 8
{search}
{more}
"""
TEXT = 'text = "words.txt"\nctx = 32\nchunks = 2\nmeasurements = 4'
IMATRIX = '[imatrix]\ntext = "words.txt"\nctx = 32\nchunks = 2'
VALIDATE = '[validate]\ntext = "words.txt"\nctx = 32\nchunks = 2'


@pytest.fixture
def recipe(write_recipe):
    def write(search="", imatrix="", more="", **changes):
        return write_recipe(RECIPE.format(search=search, imatrix=imatrix, more=more), changes)

    return write


def test_the_search_is_a_cached_stage(mill, recipe, tmp_path):
    arguments = ("run", recipe(TEXT, IMATRIX, VALIDATE), "-o", tmp_path / "out", "--json")
    code, text, err = mill(*arguments)
    assert code == 0, err
    result = json.loads(text)
    search, out = result["search"], tmp_path / "out"
    assert 6.2 < result["bits_per_weight"] <= 6.5
    assert search["bits_per_weight"] == result["bits_per_weight"]
    assert search["file_bytes"] == (out / "r.gguf").stat().st_size
    assert search["asked"] == {"size": None, "bits": 6.5, "divergence": None}
    assert search["kld_mean"] > 0
    assert search["predicted_damage"] > 0

    rules = load_recipe(out / "r.recipe.txt")
    assert rules.text == search["recipe"] == open_gguf(out / "r.gguf").metadata["ggufmill.recipe"]
    types = {name: t.type.name for name, t in open_gguf(out / "r.gguf").tensors.items()}
    assert types["blk.0.attn_v.weight"] == "q8_0"  # by the rule that was given
    assert set(types.values()) == {"f32", "q4_0", "q5_0", "q8_0"}
    plan = json.loads(mill("quantize", tmp_path / "m", out / "x.gguf", "--recipe", out / "r.recipe.txt", "--dry-run",
                           "--no-timing", "--json")[1])  # fmt: skip
    assert {t["name"]: t["type"] for t in plan["tensors"]} == types

    report, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    assert "## Search" in report
    assert f"| KL divergence, words.txt |  | {search['predicted_damage']:.5f} | {search['kld_mean']:.5f}" in report
    assert "<h2>Search</h2>" in page
    for written in (report, page, (out / "README.md").read_text()):
        assert "found by ggufmill" in written
        assert str(tmp_path) not in written

    before = (out / "r.gguf").stat().st_mtime_ns
    code, text, err = mill(*arguments)
    assert code == 0
    assert re.findall(r"(\w+): done before", err) == ["imatrix", "search", "quantize", "verify", "validate", "checksums"]
    assert (out / "r.gguf").stat().st_mtime_ns == before
    dry = mill(*arguments, "--dry-run")
    assert json.loads(dry[1])["file_bytes"] == search["file_bytes"]
    assert json.loads(dry[1])["search"] == {
        **{"target": "6.5 bits per weight", "found": True, "most_bytes": search["file_bytes"]},
    }


def test_a_changed_target_repeats_the_search_with_saved_measurements(mill, recipe, tmp_path, monkeypatch):
    out = ("-o", tmp_path / "out")

    def searched(*arguments, **changes):
        code, _, err = mill("run", recipe(*arguments, **changes), *out)
        assert code == 0, err
        return "search: done before" not in err

    assert searched()
    assert not searched()
    with monkeypatch.context() as patch:
        patch.setattr(
            "ggufmill.quantize.search.row_sample.RowSample.errors", lambda self, kinds: pytest.fail("errors were known")
        )
        assert searched(**{"target_bpw = 6.5": "target_size = '70K'"})
        assert (tmp_path / "out" / "r.gguf").stat().st_size <= 70_000
        assert searched(**{"attn_v=q8_0": "attn_v=q5_0"})
        assert searched(**{"q4_0,": ""}, **{"6.5": "7"})
    assert searched(**{"rows = 8": "rows = 16"})
    assert searched("seed = 1")
    assert not searched("seed = 1")
    (tmp_path / "out" / "r.recipe.txt").write_text("# by hand\n.*=q8_0\n")
    assert searched("seed = 1")
    assert "by hand" not in (tmp_path / "out" / "r.recipe.txt").read_text()


def test_an_interrupted_search_is_continued(mill, recipe, tmp_path, monkeypatch):
    from ggufmill.quantize.search import row_sample

    known, calls, stopped = row_sample.RowSample.errors, [], []

    def interrupted(self, kinds, *on_share):
        calls.extend(kind.name for kind in kinds)
        if len(calls) > 12 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return known(self, kinds, *on_share)

    arguments = ("run", recipe(), "-o", tmp_path / "out", "-t", 1)  # several threads would have measured more by then
    monkeypatch.setattr(row_sample.RowSample, "errors", interrupted)
    code, _, err = mill(*arguments)
    assert code == 130
    assert err.splitlines()[-1] == "ggufmill: interrupted; what was finished is kept, the same command continues it"
    kept = json.loads((tmp_path / "out/r.recipe.txt.state.json").read_text())["errors"]
    assert kept
    assert mill(*arguments)[0] == 0
    whole = json.loads((tmp_path / "out/r.recipe.txt.state.json").read_text())["errors"]
    tried = len(next(iter(whole.values())))  # types of the tensor at which it was interrupted
    assert len(calls) == tried + sum(map(len, whole.values()))


def test_warnings_name_the_searched_recipe(mill, recipe, tmp_path):
    path = recipe(**{"attn_v=q8_0": "attn_v=q8_0\\nnothing=q4_0"})
    code, _, err = mill("run", path, "-o", tmp_path / "out")
    assert code == 0, err
    result = (tmp_path / "out/r.recipe.txt").read_text().splitlines()
    line = result.index("nothing=q4_0") + 1
    assert line > 2
    assert f"the recipe found, line {line}: nothing=q4_0 matches no tensor" in err
    code, _, err = mill("quantize", tmp_path / "m", tmp_path / "q.gguf", "--recipe", path, "--dry-run", "--no-timing")
    assert code == 0, err
    assert "the recipe found, line " in err


def test_a_dry_run_writes_nothing_and_notes_that_types_are_open(mill, recipe, tmp_path):
    code, text, err = mill("run", recipe(TEXT, IMATRIX), "-o", tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(text)
    assert code == 0
    most = plan["search"].pop("most_bytes")
    assert plan["search"] == {"target": "6.5 bits per weight", "found": False}
    assert plan["bits_per_weight"] < 6.5
    assert most == plan["disk"]["needed"] > plan["file_bytes"]
    shown = mill("run", recipe(TEXT, IMATRIX), "-o", tmp_path / "out", "--dry-run")[1]
    assert re.search(rf"r.gguf +at most {most:,} +to be searched for: 6.5 bits per weight\n\ndisk: ", shown)
    assert f"{plan['file_bytes']:,}" not in shown  # the size of a file that nobody asked for
    assert "types for 6.5 bits per weight have to be searched for" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("search", "more", "changes", "message"),
    [
        ("", "", {"6.5": "1.5"}, "1.5 bits per weight cannot be reached"),
        ("", "", {"q4_0,": "q4_z,"}, "[search] types: there is no tensor type 'q4_z'"),
        ('text = "none.txt"', "", {}, "none.txt does not exist"),
        ('text = "m"', "", {}, "is a folder; give a file"),
        ('text = "few.txt"', "", {}, "few.txt has 3 tokens, a window takes 512"),
        ("", "[repack]\npattern = 'nowhere'", {}, "[repack]: no tensor of a type"),
        ("gpu = 'nowhere'\ngpu_size = '5K'", "", {}, "'nowhere' finds no tensor"),
        ("gpu = 'attn'\ngpu_size = '1K'", "", {}, "a --gpu-size of 1,000 bytes cannot be reached: with the smallest types"),
    ],
)
def test_problems_are_reported_before_any_work(mill, recipe, tmp_path, search, more, changes, message):
    (tmp_path / "few.txt").write_text("few")
    code, _, err = mill("run", recipe(search, "", more, **changes), "-o", tmp_path / "out")
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_files_of_others_in_the_folder_are_not_replaced(mill, recipe, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "r.recipe.txt").write_text("somebody's")
    arguments = ("run", recipe(), "-o", out)
    code, _, err = mill(*arguments)
    assert code == 1
    assert "r.recipe.txt exists; use --force" in err
    assert (out / "r.recipe.txt").read_text() == "somebody's"
    assert mill(*arguments, "--force")[0] == 0
    assert mill(*arguments)[0] == 0
    os.rename(out / "r.recipe.txt", tmp_path / "found.toml")
    assert "is gone; it is made again" in mill(*arguments)[2]


def test_a_divergence_and_interleaved_rows(mill, recipe, tmp_path):
    target = {"target_bpw = 6.5": "max_kld = 0.001"}
    code, text, err = mill("run", recipe(f"repacked = true\n{TEXT}", more=VALIDATE, **target), "-o", tmp_path / "out", "--json")
    assert code == 0, err
    result = json.loads(text)
    assert result["search"]["kld_mean"] <= 0.001
    assert any(name.endswith(("_r4", "_r8")) for name in result["types"])
    code, text, err = mill("run", recipe(TEXT, **target, more="[repack]"), "-o", tmp_path / "repacked", "--json")
    assert code == 0, err
    result = json.loads(text)
    assert any(name.endswith(("_r4", "_r8")) for name in result["types"])
    assert not re.search(r"_r\d", result["search"]["recipe"])


REFUSED = [
    ("[quantize]\ntarget_bpw = 4\nmax_kld = 0.1\n", "both target_bpw and max_kld"),
    ("[quantize]\ntarget_bpw = 4\ntype = 'q8_0'\n", "leaves no room for type"),
    ("[quantize]\ntype = 'q8_0'\n[search]\nseed = 1\n", "[search] needs a target"),
    ("[quantize]\nmax_kld = 0.1\n", "max_kld needs [search] text"),
    ("[quantize]\nmax_kld = 0\n", "max_kld = 0 has to be a number above 0"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nchunks = 8\n", "[search] chunks needs text"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nrefine = 1\n", "[search] refine needs text"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nseed = -1\n", "seed = -1 has to be a whole number, at least 0"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nrows = 4\n", "rows = 4 has to be a whole number, at least 8"),
    ("[quantize]\ntarget_bpw = 4\n[search]\ngpu = '('\n", "gpu = '(' has to be a regular expression"),
    ("[quantize]\ntarget_bpw = 4\n[search]\ngpu_size = '5G'\n", "gpu_size needs gpu beside it"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nrepacked = 1\n", "repacked = 1 has to be true or false"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nrepacked = true\n[repack]\n", "have the same purpose"),
    ("[quantize]\ntarget_bpw = 4\n[search]\nquiet = true\n", "[search] has no key 'quiet'"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_recipes_that_contradict_themselves(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "r.toml")
    assert message in str(error.value)
