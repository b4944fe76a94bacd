import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ggufmill.cli import main
from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER

RECIPE = """
[source]
model = "{demo}"
[imatrix]
text = "{demo}/calibration.txt"
ctx = 128
chunks = 8
[quantize]
rules = '''
exps=iq4_k_r4
.*=q8_0
'''
[validate]
text = "{demo}/heldout.txt"
ctx = 128
chunks = 6
prompt = "The list"
n = 8
{limit}
"""


@pytest.fixture
def recipe(tmp_path):
    def write(limit="", **changes):
        path = tmp_path / "small.toml"
        text = RECIPE.format(demo=FOLDER / "demo", limit=limit)
        for old, new in changes.items():
            text = text.replace(old, new)
        path.write_text(text)
        return path

    return write


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["run", *map(str, arguments)])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_every_stage_and_then_none(recipe, tmp_path, capsys):
    code, out, err = run(capsys, recipe(), "-o", tmp_path / "out", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads((tmp_path / "out/report.json").read_text())
    assert found["validation"]["baseline"] == "bf16"
    assert 0 < found["validation"]["kld_mean"] < 0.1
    assert abs(found["validation"]["ratio"] - 1) < 0.05
    assert set(found["validation"]["texts"]) == {"bf16", "result"}
    assert set(os.listdir(tmp_path / "out")) == {"small.gguf", "small.imatrix", "report.md", "report.json", "state.json"}
    report = (tmp_path / "out/report.md").read_text()
    assert "| result |" in report
    assert "exps=iq4_k_r4" in report
    file = open_gguf(tmp_path / "out/small.gguf")
    assert file.tensors["blk.2.ffn_up_exps.weight"].type.name == "iq4_k_r4"
    assert file.metadata["quantize.imatrix.chunks_count"] == 8

    before = (tmp_path / "out/small.gguf").stat().st_mtime_ns
    code, out, err = run(capsys, recipe(), "-o", tmp_path / "out", "--json")
    assert code == 0
    assert err.count("done before, nothing has changed") == 3
    assert (tmp_path / "out/small.gguf").stat().st_mtime_ns == before

    code, out, err = run(capsys, recipe(**{"exps=iq4_k_r4": "exps=q6_k_r4"}), "-o", tmp_path / "out", "--json")
    assert code == 0, err
    assert err.count("done before") == 1  # the imatrix
    assert json.loads(out)["validation"]["kld_mean"] < found["validation"]["kld_mean"]
    assert run(capsys, recipe(), "-o", tmp_path / "out", "--force")[0] == 0


def test_limits_make_it_fail_and_keep_the_result(recipe, tmp_path, capsys):
    code, out, err = run(capsys, recipe("max_kld = 1e-9"), "-o", tmp_path / "out")
    assert code == 1
    assert "the recipe allows max_kld = 1e-09" in err
    assert (tmp_path / "out/small.gguf").exists()
    assert "KL divergence" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": "nothing"}, "nothing.txt does not exist"),
        ({"exps=iq4_k_r4": "exps=iq4_z"}, "there is no tensor type 'iq4_z'"),
        ({'model = "': 'model = "/nowhere'}, "does not exist"),
        ({"[imatrix]": "[imatrixx]"}, "is not a stage"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(recipe, tmp_path, capsys, changes, message):
    code, _, err = run(capsys, recipe(**changes), "-o", tmp_path / "out")
    assert code == 1
    assert message in err
    assert not (tmp_path / "out/small.imatrix").exists()


def test_dry_run(recipe, tmp_path, capsys):
    code, out, _ = run(capsys, recipe(), "-o", tmp_path / "out", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["total_bytes"] > 0
    assert not (tmp_path / "out").exists()


def test_a_killed_run_goes_on(recipe, tmp_path):
    command = [sys.executable, "-m", "ggufmill", "run", str(recipe()), "-o"]
    subprocess.run([*command, str(tmp_path / "calm")], check=True, capture_output=True)
    for delay in (0.8, 1.6, 2.4):
        process = subprocess.Popen([*command, str(tmp_path / "out")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, str(tmp_path / "out")], check=True, capture_output=True)
    for name in ("small.gguf", "small.imatrix"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
