"""`make`: from a model to the best file that fits, and the recipe that does it again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import COMMIT, REPO, serving

from ggufmill.formats import open_gguf
from ggufmill.quantize.recipes.recipe import load_recipe

SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 288, "max_position_embeddings": 4096}
CURVED = {"tokens": 10_000, "num_hidden_layers": 1}  # a text that is long enough for curvatures, and fewer types to measure
TYPES = "--types", "q4_0,q5_0,q8_0"


@pytest.fixture
def write_model(tiny_llama, write_checkpoint):
    """write_model(folder, tokens, changes of its config): a model that holds longer texts, and long.txt, a text of so many
    tokens."""

    def write(folder, tokens, **changes):
        config, tensors = tiny_llama(**SMALL | changes)
        write_checkpoint(folder / "m", config, {name: 0.2 * x for name, x in tensors.items()}, vocab=False)
        letters = np.random.default_rng(1).integers(0, 26, 2000)
        (folder / "long.txt").write_text(tokens // 2000 * "".join(chr(97 + i) for i in letters))

    return write


@pytest.fixture
def folder(recipe_folder, write_model):
    """recipe_folder with a model of two layers, and a text of 2,000 tokens."""
    write_model(recipe_folder, 2000)
    return recipe_folder


def made(mill, folder, *more, code=0):
    got, out, err = mill("make", folder / "m", "-o", folder / "out", "--json", *TYPES, *more)
    assert got == code, err
    return json.loads(out) if code == 0 else err


@pytest.mark.slow(keep=["1"])
@pytest.mark.parametrize(
    "effort", [0, 1, 2, pytest.param(3, marks=pytest.mark.oracle), pytest.param(4, marks=pytest.mark.oracle)]
)
def test_the_recipe_makes_the_same_file(mill, folder, write_model, effort):
    """Effort has one meaning in `make`, `run` and `quantize`: the recipe has it where there is something to spend it on."""
    if effort > 2:
        pytest.importorskip("torch")
        write_model(folder, **CURVED)
    more = ["--tune"] if effort == 4 else []
    result = made(mill, folder, "--fit", "60k" if effort > 2 else "80k", "-f", folder / "long.txt", "--effort", effort, *more)
    path, recipe = result["run"]["files"][0], result["recipe"]
    assert Path(path).stat().st_size <= (60_000 if effort > 2 else 80_000)
    assert result["data"] == ("", "imatrix", "covariance", "curvature", "curvature")[effort]
    assert result["run"]["validation"]["kld_mean"] > 0
    stages, metadata = load_recipe(recipe).stages, open_gguf(path).metadata
    assert stages["quantize"].get("effort") == (effort if effort > 1 else None)
    for key in ("quantize.covariance.sequential", "quantize.tuning.dataset"):
        assert metadata.get(key) == ("long.txt" if effort == 4 else None)
    judged = stages["validate"]
    assert judged["from_chunk"] >= stages.get("imatrix", judged).get("chunks", 0)  # nothing is judged with what was learned
    assert {"README.md", "SHA256SUMS", "report.html"} <= set(os.listdir(folder / "out"))
    assert mill("run", recipe, "-o", folder / "again", "--quiet")[0] == 0
    assert (folder / "again" / Path(path).name).read_bytes() == Path(path).read_bytes()


def test_it_resumes_and_keeps_what_is_done(mill, folder):
    arguments = "--fit", "80k", "-f", folder / "long.txt", "--effort", "1"
    made(mill, folder, *arguments)
    code, _, err = mill("make", folder / "m", "-o", folder / "out", *TYPES, *arguments)
    assert code == 0
    assert err.count("done before, nothing has changed") == 6


def test_a_dry_run_says_what_to_expect_and_writes_nothing(mill, folder):
    before = set(os.listdir(folder))
    result = made(mill, folder, "--fit", "80k", "-f", folder / "long.txt", "--dry-run")
    assert set(os.listdir(folder)) == before
    low, high = result["forecast"]["divergence"]
    assert 0 < low < high
    assert list(result["forecast"]["seconds"]) == ["imatrix", "search", "quantize", "verify", "validate", "checksums"]
    assert set(result["forecast"]["memory"]) == set(result["forecast"]["seconds"])
    assert all(result["forecast"]["memory"][stage] > 40 << 20 for stage in ("imatrix", "search", "quantize", "validate"))
    assert result["predicted"]["seconds_by_part"].keys() == {"start"} | set(result["forecast"]["seconds"])
    assert result["memory"]["peak"] > max(nbytes or 0 for nbytes in result["forecast"]["memory"].values())
    assert result["run"]["search"]["most_bytes"] == 80_000


def test_a_dry_run_knows_of_covariances_before_they_are_collected(mill, folder, monkeypatch):
    """What `search` and `quantize` say once they are there: the encoders are timed with them."""
    from ggufmill.quantize.covariance import timing

    monkeypatch.setattr(timing, "_seconds_of_a_weight", lambda *_: 1.0)  # of a thread
    monkeypatch.setattr(timing, "_WIDTHS", (64, 128))
    plain, weighed = (
        made(mill, folder, "--fit", "80k", "-f", folder / "long.txt", "--dry-run", "-t", "1", "--effort", effort)["forecast"]
        for effort in (1, 2)
    )
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 96)  # of both layers' matrices
    assert weights / 2 < weighed["seconds"]["quantize"] < 2 * weights
    assert weighed["seconds"]["search"] > 2 * weights
    assert plain["seconds"]["quantize"] < weights / 100  # what it takes depends on the machine
    assert weighed["memory"]["search"] > plain["memory"]["search"]


def test_the_size_follows_from_the_memory(mill, folder):
    context = "-c", "64"
    planned = json.loads(mill("plan", folder / "m", "--type", "q8_0", "--ram", "1G", *context, "--json")[1])
    total, beside = planned["devices"][0]["total"], planned["devices"][0]["cache"] + planned["devices"][0]["compute"]
    small, large = (
        made(mill, folder, "--ram", ram, *context, "-f", folder / "long.txt", "--effort", "0", "--dry-run")
        for ram in (total - 20_000, total)
    )
    q8_0 = json.loads(mill("quantize", folder / "m", folder / "x.gguf", "q8_0", "--dry-run", "--no-timing", "--json")[1])
    assert large["file_bytes_at_most"] == q8_0["file_bytes"]  # more than that is not worth it
    assert small["file_bytes_at_most"] + beside == pytest.approx(total - 20_000, abs=50)


def test_no_more_is_taken_than_there_is(mill, folder):
    """A size is the most that a file takes: of a small model it may be more than the disk has."""
    q8_0 = json.loads(mill("quantize", folder / "m", folder / "x.gguf", "q8_0", "--dry-run", "--no-timing", "--json")[1])
    code, out, err = mill(
        "make", folder / "m", "--fit", "500T", "-f", folder / "long.txt", "--effort", "0", "--dry-run", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["file_bytes_at_most"] == q8_0["file_bytes"]
    large = "--target-size", "500T", *TYPES, "--quiet"
    assert mill("quantize", folder / "m", folder / "x.gguf", *large)[0] == 0
    recipe = folder / "large.toml"
    recipe.write_text("[source]\nmodel = 'm'\n[quantize]\ntarget_size = '500T'\n[search]\ntypes = 'q4_0,q8_0'\n")
    assert mill("run", recipe, "-o", folder / "run", "--quiet")[0] == 0


def test_what_a_gpu_cannot_hold_is_for_the_processor(mill, folder):
    result = made(mill, folder, "--vram", "1M", "--ram", "64M", "-c", "64", "-f", folder / "long.txt", "--effort", "0")
    assert result["options"][:2] == ["-c", "64"]
    assert 0 <= int(result["options"][result["options"].index("-ngl") + 1]) < 3


def test_a_folder_is_left_as_it_was_where_nothing_was_begun(mill, folder):
    err = made(mill, folder, "--fit", "1k", "-f", folder / "long.txt", "--effort", "0", code=1)
    assert "cannot be reached" in err
    assert not (folder / "out").exists()
    err = made(mill, folder, "--ram", "1k", "-f", folder / "long.txt", code=1)
    assert "ask for a shorter context" in err


def test_a_recipe_that_is_not_of_make_stays(mill, folder):
    arguments = "--fit", "80k", "-f", folder / "long.txt", "--effort", "0"
    recipe = made(mill, folder, *arguments)["recipe"]
    Path(recipe).write_text("mine", "utf-8")
    assert "is not of `ggufmill make`" in made(mill, folder, *arguments, code=1)
    assert Path(recipe).read_text("utf-8") == "mine"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--fit", "80k", "--ram", "1G"), "--ram and --vram are the memory that it has to fit: give one or the other"),
        (("--fit", "80k", "--tune"), "--tune does nothing without --effort 4"),
        (("--fit", "80k", "-f", "long.txt", "-f", "words.txt"), "--heldout"),
    ],
)
def test_wrong_usage(mill, folder, arguments, problem, monkeypatch):
    monkeypatch.chdir(folder)
    assert problem in made(mill, folder, *arguments, code=2)


def test_without_a_text_it_is_the_bundled_one(mill, folder):
    recipe = load_recipe(made(mill, folder, "--fit", "80k", "--effort", "0")["recipe"])
    assert recipe.stages["validate"]["text"] == "bundled"
    assert recipe.stages["validate"]["chunks"] == 16


def test_the_model_writes_the_text(mill, folder):
    arguments = "--fit", "80k", "-f", "self", "--heldout", folder / "words.txt", "--effort", "1"
    dry = made(mill, folder, *arguments, "--dry-run")
    assert not (folder / "out").exists()
    assert dry["data"] == "imatrix"
    result = made(mill, folder, *arguments)
    written = Path(result["recipe"]).with_suffix(".self.jsonl")
    assert load_recipe(result["recipe"]).stages["imatrix"]["text"] == str(written)
    assert mill("run", result["recipe"], "-o", folder / "again", "--quiet")[0] == 0
    path = Path(result["run"]["files"][0])
    assert (folder / "again" / path.name).read_bytes() == path.read_bytes()


def test_several_texts_with_weights(mill, folder):
    texts = "-f", f"{folder / 'long.txt'}:2", "-f", folder / "words.txt", "--heldout", folder / "words.txt"
    result = made(mill, folder, "--fit", "80k", *texts, "--effort", "1", "--dry-run")
    assert result["data"] == "imatrix"


@pytest.mark.slow
def test_a_mixture_of_experts(mill, folder, tiny_deepseek, write_checkpoint):
    config, tensors = tiny_deepseek(vocab_size=288)
    tokenizer = folder / "m" / "tokenizer.json"
    write_checkpoint(folder / "moe", config, {n: 0.2 * x for n, x in tensors.items()}, vocab=False)
    shutil.copy(tokenizer, folder / "moe")
    arguments = "-o", folder / "out", "--fit", "300k", *TYPES, "-f", folder / "long.txt", "--json"
    code, out, err = mill("make", folder / "moe", *arguments)
    assert code == 0, err
    result = json.loads(out)
    assert Path(result["run"]["files"][0]).stat().st_size <= 300_000
    assert "quantize.covariance.file" in open_gguf(result["run"]["files"][0]).metadata


def test_a_model_that_the_memory_does_not_hold_runs_as_a_copy(mill, folder, monkeypatch):
    from ggufmill.pipeline.making import fit

    plain = made(mill, folder, "--fit", "80k", "-f", folder / "long.txt", "--effort", "1")
    shutil.rmtree(folder / "out")
    monkeypatch.setattr(fit, "total_bytes", lambda: 100_000)
    result = made(mill, folder, "--fit", "80k", "-f", folder / "long.txt", "--effort", "1")
    stages = load_recipe(result["recipe"]).stages
    assert (stages["source"]["working"], stages["validate"]["baseline"]) == ("q8_0", "q8_0")
    copy = Path(result["recipe"]).with_suffix(".working.gguf")
    assert open_gguf(copy).tensors["blk.0.attn_q.weight"].type.name == "q8_0"
    perplexities = [one["run"]["validation"]["baseline_perplexity"] for one in (plain, result)]
    assert perplexities[0] != perplexities[1]  # another model ran
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.05)
    code, _, err = mill("run", result["recipe"], "-o", folder / "out")
    assert code == 0
    assert err.count("done before, nothing has changed") == 6
    file = Path(result["run"]["files"][0])
    before = file.read_bytes()
    copy.unlink()
    assert mill("run", result["recipe"], "-o", folder / "again", "--quiet")[0] == 0
    assert (folder / "again" / file.name).read_bytes() == before


def test_a_dry_run_says_the_time_of_what_runs(mill, folder, monkeypatch):
    """Products of a copy in q8_0 take less time than those of floats."""
    from ggufmill.pipeline.common import forecast
    from ggufmill.pipeline.making import fit
    from ggufmill.runtime import timing

    def speed(type_name, *_, **__):
        return timing.ProductSpeed(0.0, 1e-8 if type_name == "q8_0" else 2e-8)

    monkeypatch.setattr(timing, "product_speed", speed)
    monkeypatch.setattr(timing, "attention_seconds", lambda *_: 0.0)
    monkeypatch.setattr(forecast, "_compiling_seconds", lambda: 0.0)  # what a start takes depends on the machine
    arguments = "--fit", "80k", "-f", folder / "long.txt", "--effort", "1", "--dry-run"
    floats = made(mill, folder, *arguments)["forecast"]["seconds"]
    monkeypatch.setattr(fit, "total_bytes", lambda: 100_000)
    copied = made(mill, folder, *arguments)["forecast"]["seconds"]
    assert set(copied) - set(floats) == {"working copy"}
    assert copied["validate"] < 0.8 * floats["validate"]
    assert 0.5 * floats["imatrix"] < copied["imatrix"] < 0.8 * floats["imatrix"]


# Each call is a process of its own; what it imports is there when it starts.
KILLED_ONCE = """
import importlib, json, os, signal, sys
from pathlib import Path
from ggufmill import make_model
from ggufmill.pipeline import run
from ggufmill.pipeline.making import fit

list_of_kills = Path(sys.argv[1])
for name in sys.argv[3:]:
    importlib.import_module(name)

def kill_once(where):
    if where not in list_of_kills.read_text().splitlines():
        with list_of_kills.open("a") as file:
            print(where, file=file)
        os.kill(os.getpid(), signal.SIGKILL)

def progress(report):
    if report.done:
        kill_once(report.stage)

def write_text(path, text, write=run.write_text):
    kill_once(path.name)
    write(path, text)

run.write_text, fit.total_bytes, code = write_text, lambda: 100_000, -signal.SIGKILL
while code == -signal.SIGKILL:
    call = os.fork()
    if not call:
        make_model(**json.loads(sys.argv[2]), progress=progress)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(call, 0)[1])
sys.exit(code)
"""
WRITTEN = {"SHA256SUMS", "report.json", "report.md", "report.html", "README.md"}
STAGES = {"working copy", "imatrix", "errors of types", "sensitivity", "quantize", "verify", "validate", "checksum"}
STAGES |= {"noise floor", "layers"}
STAGES_OF_4 = {"imatrix", "refining", "original", "tune"}  # what others than it have, or do with curvatures


@pytest.mark.process
@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ({"effort": 1, "fit": "80k", "text": "self"}, STAGES | WRITTEN | {"writing a text", "divergence"}),
        pytest.param({"effort": 4, "fit": "60k", "tune": True}, STAGES_OF_4, marks=pytest.mark.oracle),
    ],
)
def test_a_call_killed_in_every_stage_is_continued(mill, folder, write_model, monkeypatch, more, stages):
    """SIGKILL in each stage, and as each report is written, one after the other; the same call ends in the same bytes. What
    does the same with every effort is killed with one."""
    from ggufmill import make_model
    from ggufmill.pipeline.making import fit

    if more["effort"] > 2:
        pytest.importorskip("torch")
        write_model(folder, **CURVED)
    asked = {"model": folder / "m", "out": folder / "out", "text": folder / "long.txt", "types": TYPES[1]} | more
    asked |= {"heldout": folder / "words.txt"}
    monkeypatch.setattr(fit, "total_bytes", lambda: 100_000)
    whole = make_model(**asked)
    expected = {path.name: path.read_bytes() for path in (folder / "out").glob("*.gguf")}
    shutil.rmtree(folder / "out")
    kills = folder / "kills.txt"
    kills.write_text("\n".join([*(STAGES | WRITTEN) - stages, ""]))
    arguments = json.dumps({name: value if isinstance(value, bool | int) else str(value) for name, value in asked.items()})
    imported = [name for name in sys.modules if name.startswith("ggufmill.") and ("torch" not in name or more["effort"] > 2)]
    ended = subprocess.run([sys.executable, "-c", KILLED_ONCE, kills, arguments, *imported], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert set(kills.read_text().split("\n")) == {*STAGES, *WRITTEN, *stages, ""}
    assert {path.name: path.read_bytes() for path in (folder / "out").glob("*.gguf")} == expected
    again = json.loads((folder / "out" / "report.json").read_text())
    assert again["validation"]["kld_mean"] == whole.run.report["validation"]["kld_mean"]


def test_a_repository_is_named_with_the_commit_that_was_read(mill, folder, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with serving(folder / "m") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        arguments = (
            f"hf:{REPO}",
            "-o",
            folder / "out",
            "--fit",
            "80k",
            *TYPES,
            "-f",
            folder / "long.txt",
            "--effort",
            "0",
            "--json",
        )
        code, out, err = mill("make", *arguments)
    assert code == 0, err
    recipe = json.loads(out)["recipe"]
    assert Path(recipe).name.startswith("tiny-")
    assert load_recipe(recipe).stages["source"] == {"model": f"hf:{REPO}", "revision": COMMIT}
