"""`run`: stages, reports, limits, plans."""

import html
import json
import os
import re
from xml.etree import ElementTree

import pytest

from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER

RECIPE = """
[source]
model = "{demo}"
[imatrix]
text = "{demo}/calibration.txt"
ctx = 128
chunks = 4
[quantize]
rules = '''
exps=q4_0_r8
.*=q8_0
'''
[validate]
text = "{demo}/heldout.txt"
ctx = 128
chunks = 3
prompt = "The list"
n = 8
{limit}
"""


REPORTS = {"report.md", "report.json", "report.html", "README.md", "SHA256SUMS"}


@pytest.fixture
def recipe(tmp_path):
    def write(limit="", **changes):
        path = tmp_path / "small.toml"
        text = RECIPE
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text.replace("{demo}", str(FOLDER / "demo")).replace("{limit}", limit))
        return path

    return write


def test_a_second_run_repeats_no_stage(recipe, tmp_path, mill):
    code, out, err = mill("run", recipe(), "-o", tmp_path / "out", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result == json.loads((tmp_path / "out/report.json").read_text())
    assert result["validation"]["baseline"] == "bf16"
    assert 0 < result["validation"]["kld_mean"] < 0.1
    assert abs(result["validation"]["ratio"] - 1) < 0.05
    assert [one["prompt"] for one in result["validation"]["texts"]] == ["The list"]
    assert set(os.listdir(tmp_path / "out")) == REPORTS | {"small.gguf", "small.imatrix", "state.json"}
    report = (tmp_path / "out/report.md").read_text()
    assert "| result |" in report
    assert "exps=q4_0_r8" in report
    file = open_gguf(tmp_path / "out/small.gguf")
    assert file.tensors["blk.2.ffn_up_exps.weight"].type.name == "q4_0_r8"
    assert file.metadata["quantize.imatrix.chunks_count"] == 4

    before = (tmp_path / "out/small.gguf").stat().st_mtime_ns
    code, out, err = mill("run", recipe(), "-o", tmp_path / "out", "--json")
    assert code == 0
    assert err.count("done before, nothing has changed") == 5
    assert (tmp_path / "out/small.gguf").stat().st_mtime_ns == before

    code, out, err = mill("run", recipe(**{"exps=q4_0_r8": "exps=q6_k_r4"}), "-o", tmp_path / "out", "--json")
    assert code == 0, err
    assert err.count("done before") == 1  # the imatrix
    assert json.loads(out)["validation"]["kld_mean"] < result["validation"]["kld_mean"]
    assert mill("run", recipe(), "-o", tmp_path / "out", "--force")[0] == 0


def test_the_reports(recipe, tmp_path, mill):
    named = "[report]\nbase_model = 'someone/model'\nquantized_by = 'me: \"x\"'\n"
    code, out, err = mill(
        "run",
        recipe(named + "\n[repack]\npattern = 'attn'", **{"exps=q4_0_r8": "exps=q4_0"}),
        "-o",
        tmp_path / "out",
        "--json",
    )
    assert code == 0, err
    result = json.loads(out)
    page = (tmp_path / "out/report.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    for drawing in re.findall(r"<svg.*?</svg>", page):
        ElementTree.fromstring(drawing)
    assert page.count("<svg") == 10
    for heading in ("Size", "Quality", "Error by layer", "Imatrix coverage", "Time", "Recipe", "Tensors"):
        assert f"<h2>{heading}</h2>" in page
    assert "prefers-color-scheme:dark" in page
    assert "<h1>demo</h1>" in page
    assert "tokens/s, prompts of 128 with scoring" in page
    assert f"± {result['validation']['kld_error']:.5f}; KL divergence, nats" in page
    assert str(tmp_path) not in page
    assert "exps=q4_0" in page

    repacked, plain = open_gguf(tmp_path / "out/small-repacked.gguf"), open_gguf(tmp_path / "out/small.gguf")
    assert result["files"] == [str(tmp_path / "out/small-repacked.gguf")]
    assert repacked.tensors["blk.2.attn_output.weight"].type.name == "q8_0_r8"
    assert repacked.tensors["blk.2.ffn_up_exps.weight"].type.name == "q4_0"
    assert plain.tensors["blk.2.attn_output.weight"].type.name == "q8_0"

    running = result["validation"]["running"]
    assert running["perplexity"][-1] == pytest.approx(result["validation"]["perplexity"])
    assert running["kld_mean"][-1] == pytest.approx(result["validation"]["kld_mean"])
    assert len(running["kld_mean"]) == result["validation"]["chunks"] == 3
    assert [e["layer"] for e in result["validation"]["layers"]] == [0, 1, 2, 3]
    assert sum(sum(types.values()) for types in result["roles"].values()) == result["total_bytes"]
    assert sum(t["nbytes"] for t in result["table"]) == result["total_bytes"]
    errors = {t["name"]: t["error"] for t in result["table"]}
    assert 0.05 < errors["blk.2.ffn_up_exps.weight"] < 0.15
    assert errors["output_norm.weight"] == 0

    card = (tmp_path / "out/README.md").read_text()
    front = card.split("---\n")[1]
    assert 'base_model: "someone/model"' in front
    assert r'quantized_by: "me: \"x\""' in front
    assert "# license:" in front
    assert "huggingface.co/someone/model" in card
    assert "library_name: gguf\n" in front
    assert 'pipeline_tag: "text-generation"' in front
    assert re.search(r"^llama.cpp does not load it: .*it does not know the tensor types q8_0_r8", card, re.MULTILINE)
    assert "llama-server -m small-repacked.gguf" in card
    assert "ollama run" not in card
    assert "exps=q4_0" in card
    for written in (card, page, (tmp_path / "out/report.md").read_text()):
        assert str(FOLDER) not in written
        assert 'text = "heldout.txt"' in html.unescape(written)


def test_exceeded_limits_fail_and_keep_the_result(recipe, tmp_path, mill):
    code, out, err = mill("run", recipe("max_kld = 1e-9"), "-o", tmp_path / "out")
    assert code == 1
    assert "the recipe allows max_kld = 1e-09" in err
    assert (tmp_path / "out/small.gguf").exists()
    assert "KL divergence" in out
    failure = re.search(r"kld_mean is .*", err)[0]
    markdown, page, card = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html", "README.md"))
    assert markdown.index(failure) < markdown.index("Made 2")
    assert page.index(f"<li>{failure}</li>") < page.index("Made 2")
    assert "> **Not fit to be published.**" in card
    assert card.index(failure) < card.index("A GGUF quantisation of")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": "nothing"}, "nothing.txt does not exist"),
        ({"exps=q4_0_r8": "exps=iq4_z"}, "there is no tensor type 'iq4_z'"),
        ({'model = "': 'model = "/nowhere'}, "does not exist"),
        ({"[imatrix]": "[imatrixx]"}, "is not a stage"),
        ({"chunks = 4": "chunks = -1"}, "[imatrix] chunks = -1 has to be a whole number, at least 1"),
        ({"n = 8": "n = 8\nbaseline = 'nope'"}, "[validate] baseline: there is no tensor type 'nope'"),
        ({"n = 8": "n = 8\nbaseline = 'iq2_xxs'"}, "[validate] baseline: "),
        ({'prompt = "The list"': f'prompt = "{"word " * 3000}"'}, "[validate] prompt: "),
        ({"ctx = 128\nchunks = 4": "ctx = 1000000"}, "[imatrix] text: "),
        ({"ctx = 128\nchunks = 3": "ctx = 1000000"}, "[validate] text: "),
        ({"[validate]": "[repack]\npattern = '('\n[validate]"}, "[repack] pattern: '(' is not a regular expression"),
        ({"[validate]": "[repack]\npattern = 'nowhere'\n[validate]"}, "[repack]: no tensor of a type"),
        ({"{demo}/heldout.txt": "latin.txt"}, "latin.txt is not UTF-8 text"),
        ({"{demo}/calibration.txt": "latin.txt"}, "latin.txt is not UTF-8 text"),
        ({"{demo}/calibration.txt": "."}, "is a folder"),
    ],
)
def test_problems_are_reported_before_any_work(recipe, tmp_path, mill, changes, message):
    (tmp_path / "latin.txt").write_bytes("Grüße ".encode("latin-1") * 1000)
    code, _, err = mill("run", recipe(**changes), "-o", tmp_path / "out")
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_dry_run(recipe, tmp_path, mill):
    code, out, _ = mill("run", recipe(), "-o", tmp_path / "out", "--dry-run", "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["disk"]["needed"] == plan["file_bytes"] > plan["total_bytes"] > 0
    both = json.loads(mill("run", recipe("[repack]\npattern = 'attn'"), "-o", tmp_path / "out", "--dry-run", "--json")[1])
    assert both["disk"]["needed"] == 2 * both["file_bytes"]
    assert not (tmp_path / "out").exists()


def test_a_bundled_recipe_is_found_beside_a_folder_of_its_name(tmp_path, mill, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = mill("run", "demo", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["file_bytes"] > 0


def test_a_conversion_alone(tiny_llama, write_checkpoint, tmp_path, mill):
    """[convert] outtype is what `convert --outtype` writes, without [quantize] and for what its rules leave."""
    folder = write_checkpoint(tmp_path / "model", *tiny_llama(num_hidden_layers=1))
    path = tmp_path / "only.toml"
    path.write_text("[source]\nmodel = 'model'\n[convert]\nouttype = 'f16'\n")
    assert mill("run", path, "-o", tmp_path / "out")[0] == 0
    made = open_gguf(tmp_path / "out" / "only.gguf")
    assert {t.type.name for t in made.tensors.values() if len(t.shape) > 1} == {"f16"}
    path.write_text(path.read_text() + "[quantize]\nrules = 'ffn_up=q8_0'\n")
    assert mill("run", path, "-o", tmp_path / "mixed")[0] == 0
    mixed = open_gguf(tmp_path / "mixed" / "only.gguf")
    assert mixed.tensors["blk.0.ffn_up.weight"].type.name == "q8_0"
    assert mixed.tensors["blk.0.ffn_down.weight"].type.name == "f16"
    path.write_text(f"[source]\nmodel = '{made.path}'\n[convert]\nmla_layout = 'mainline'\n")
    code, _, err = mill("run", path, "-o", tmp_path / "again")
    assert code == 1
    assert "has the MLA layout it has: another (mainline) is made from the checkpoint" in err
    assert folder.exists()
