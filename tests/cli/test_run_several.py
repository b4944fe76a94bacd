"""`run` of a recipe of several files: a repository of quants, continued after a kill in any stage."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from ggufmill.formats import open_gguf
from ggufmill.runtime.evaluate.baseline import ModelBaseline

RECIPE = """
[source]
model = "m"
[imatrix]
text = "words.txt"
ctx = 32
chunks = 2
[quantize]
type = ["Q8_0", "q4_0", "q6_0"]
[validate]
text = "words.txt"
ctx = 32
chunks = 2
prompt = ["abc", "<b>"]
n = 3
stock = ["q4_1", "Q5_1"]
[report]
base_model = "me/m"
license = "mit"
"""
TABLES = """
[[quantize]]
type = "q8_0"
[[quantize]]
name = "mixed"
rules = "attn=q8_0,ffn=q4_0,.*=q5_0"
imatrix = false
repack = "ffn_up"
split_max_size = "40K"
[[quantize]]
target_bpw = 7
[search]
types = "q4_0,q8_0"
rows = 8
"""


@pytest.fixture
def recipe(write_recipe):
    return lambda **changes: write_recipe(RECIPE, changes)


def sums(folder):
    return {line[66:]: line[:64] for line in (folder / "SHA256SUMS").read_text().splitlines()}


@pytest.mark.slow
def test_a_repository_of_quants(mill, recipe, tmp_path):
    arguments, out = ("run", recipe(), "-o", tmp_path / "out", "--json"), tmp_path / "out"
    planned = json.loads(mill(*arguments, "--dry-run")[1])
    assert not out.exists()
    code, text, err = mill(*arguments)
    assert code == 0, err
    data = json.loads(text)
    files = ["m-Q8_0.gguf", "m-Q4_0.gguf", "m-Q6_0.gguf"]
    assert [os.path.basename(f) for f in data["files"]] == files
    assert {f for f in os.listdir(out) if f.endswith(".gguf")} == set(files)
    assert [q["files"][0]["nbytes"] for q in planned["quants"]] == [(out / name).stat().st_size for name in files]
    assert planned["disk"]["needed"] == planned["disk"]["peak"] == sum((out / name).stat().st_size for name in files)
    assert sums(out) == {n: hashlib.sha256((out / n).read_bytes()).hexdigest() for n in [*files, "m.imatrix"]}
    divergences = [q["validation"]["kld_mean"] for q in data["quants"]]
    assert 0 < divergences[0] < divergences[2] < divergences[1]
    assert open_gguf(out / "m-Q4_0.gguf").metadata["ggufmill.recipe"] == '[quantize]\ntype = "q4_0"\n'

    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        **{"base_model": "me/m", "base_model_relation": "quantized", "license": "mit", "pipeline_tag": "text-generation"},
        **{"library_name": "gguf", "tags": ["gguf", "quantized", "imatrix"]},
    }
    for name, loads in zip(files, ["llama.cpp, ik_llama.cpp, ollama", "llama.cpp, ik_llama.cpp, ollama", "ik_llama.cpp"],
                           strict=True):  # fmt: skip
        assert re.search(rf"^\| {name} \| [\d.]+ \w+ \| [\d.]+ \| [\d.]+ ± [\d.]+ \| .* \| {loads} \|$", card, re.MULTILINE)
    assert "llama-server -hf OWNER/NAME:Q8_0" in card
    assert "ollama run hf.co/OWNER/NAME:Q8_0" in card
    assert str(tmp_path) not in card
    page, report = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert page.count("<details><summary><b>") == 3
    assert "Divergence and size" in page
    texts = data["quants"][0]["validation"]["texts"]
    assert [one["prompt"] for one in texts] == ["abc", "<b>"]
    assert all(one.keys() == {"prompt", "baseline", "result"} for one in texts)
    assert page.count("<q>&lt;b&gt;</q>") == 3
    assert [one["label"] for one in data["stock"]] == ["Q4_1", "Q5_1"]
    divergences = [one["validation"]["kld_mean"] for one in data["stock"]]
    assert 0 < divergences[1] < divergences[0]
    assert "| stock Q4_1 |" in report
    assert [one["is_stock"] for one in data["quants"]] == [True, True, True]
    assert report.count("### Types") == 3

    # another file later: the others stay
    more = recipe(**{'"q6_0"': '"q6_0", "q5_0"'})
    code, text, err = mill("run", more, "-o", out)
    assert code == 0, err
    assert set(re.findall(r"(\w+ \w+): done before", err)) == {
        f"{stage} {label}" for stage in ("quantize", "verify", "validate", "checksums") for label in ("Q8_0", "Q4_0", "Q6_0")
    }
    assert "m-Q5_0.gguf" in sums(out)


def test_tables_of_their_own(mill, recipe, tmp_path):
    path = recipe(**{'[quantize]\ntype = ["Q8_0", "q4_0", "q6_0"]\n': TABLES})
    arguments, out = ("run", path, "-o", tmp_path / "out"), tmp_path / "out"
    dry = mill(*arguments, "--dry-run")[1]
    planned = json.loads(mill(*arguments, "--dry-run", "--json")[1])
    code, text, err = mill(*arguments, "--json")
    assert code == 0, err
    plain, mixed, searched = json.loads(text)["quants"]
    assert [q["label"] for q in (plain, mixed, searched)] == ["Q8_0", "mixed", "7bpw"]
    assert 6 < searched["bits_per_weight"] <= 7
    assert searched["file_bytes"] <= planned["quants"][2]["search"]["most_bytes"]
    assert "at most" in dry
    split = sorted(name for name in os.listdir(out) if name.startswith("m-mixed-0"))
    assert len(split) == len(planned["quants"][1]["files"]) > 1
    assert all(f"{name} " in dry for name in split)
    repacked = open_gguf(out / "m-mixed-repacked.gguf")
    assert repacked.tensors["blk.0.ffn_up.weight"].type.name == "q4_0_r8"
    assert planned["quants"][1]["repacked"] == {"name": "m-mixed-repacked.gguf", "nbytes": repacked.path.stat().st_size}
    assert "quantize.imatrix.file" not in repacked.metadata
    assert "quantize.imatrix.file" in open_gguf(out / "m-Q8_0.gguf").metadata
    assert not any(name in sums(out) for name in split)  # only what the repacked file is made of
    card = (out / "README.md").read_text()
    assert "all but mixed" in card
    assert "The rules that it found for 7bpw:" in card


def test_the_baseline_reads_the_text_once_for_all_files(mill, recipe, tmp_path, monkeypatch):
    known, read = ModelBaseline.predictions, []

    def counted(self, windows, first):
        read.extend(range(first, first + len(windows)))
        return known(self, windows, first)

    monkeypatch.setattr(ModelBaseline, "predictions", counted)
    code, _, err = mill("run", recipe(**{'stock = ["q4_1", "Q5_1"]\n': ""}), "-o", tmp_path / "out")
    assert code == 0, err
    assert read == [0, 1, 0, 1]  # and the first windows for the noise floor


def test_limits_name_the_file(mill, recipe, tmp_path):
    code, _, err = mill("run", recipe(**{"[validate]\n": "[validate]\nmax_kld = 0.0002\n"}), "-o", tmp_path / "out")
    assert code == 1
    assert "Q4_0: kld_mean is" in err
    assert "Q8_0: kld_mean" not in err


KILLER = """
import os, signal, sys
from ggufmill.pipeline.stages import cache
known, at = cache.StageCache.stage, int(sys.argv[1])
calls = [0]

def stage(self, name, key, files, work):
    def killed():
        calls[0] += 1
        result = work() if calls[0] == at and sys.argv[2] == "end" else None
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result if result is not None else work()
    return known(self, name, key, files, killed)

cache.StageCache.stage = stage
from ggufmill.cli import main
main(["run", sys.argv[3], "-o", sys.argv[4]])
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.torture(keep=["begin-2", "end-5", "begin-9"])
@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_run_killed_in_any_stage_is_continued(mill, recipe, tmp_path, number, when):
    path, out = recipe(**{'"q4_0", "q6_0"': '"q4_0"'}), tmp_path / "out"
    assert mill("run", path, "-o", tmp_path / "calm")[0] == 0
    ended = subprocess.run([sys.executable, "-c", KILLER, str(number), when, str(path), str(out)], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    code, _, err = mill("run", path, "-o", out)
    assert code == 0, err
    assert err.count("done before") >= number - 1
    assert sums(out) == sums(tmp_path / "calm")
