"""Verbs whose jobs take long say before what these take, in the same words, and write nothing."""

import json
import shutil

import pytest

import ggufmill
from ggufmill import VERBS
from ggufmill.recipes import FOLDER
from ggufmill.request_fields import fields_of

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
READ = ("-f", TEXT, "-c", 64, "--chunks", 2)
# Verb -> arguments of a job
JOBS = {
    "convert": ("m", "out.gguf"),
    "quantize": ("m", "out.gguf", "q4_0"),
    "repack": ("q.gguf", "out.gguf"),
    "split": ("q.gguf", "out.gguf", "--split-max-tensors", 40),
    "merge": ("s-00001-of-00002.gguf", "out.gguf"),
    "tune": ("m", "q.gguf", "out.gguf", "-f", TEXT, "--chunks", 8),
    "imatrix": ("m", *READ, "-o", "out.imatrix"),
    "search": ("m", "out.txt", "--target-bpw", 5, "--types", "q4_0,q8_0"),
    "perplexity": ("m", *READ),
    "compare": ("m", "q.gguf", *READ),
    "evaluate": ("q.gguf", "--against", "m", *READ, "-o", "out"),
    "make": ("m", "-o", "out", "--ram", "1G", "-f", TEXT, "--effort", 0),
    "run": ("r.toml", "-o", "out"),
    "export": ("q.gguf", "out"),
    "metadata": ("q.gguf", "--set", "general.name=new"),
    "convert-endian": ("q.gguf", "out.gguf"),
}
WITHOUT_FIGURES = {"export", "metadata", "convert-endian"}  # they copy, as long as the disk takes
UNTIMED = {"make", "run"}  # whose parts say it
# Why the others have none
WITHOUT = {
    "plan": "it is one",
    **dict.fromkeys(("bench", "sweep-bench", "embed", "generate", "chat", "serve"), "plan says what running a model takes"),
    **dict.fromkeys(("inspect", "recipes", "completion"), "they read headers"),
    **dict.fromkeys(("hash", "upload", "warm-up"), "they take what reading, sending or compiling takes, with progress"),
}
# Verbs that say what memory they take, and take no --memory
WITHOUT_MEMORY = {
    **dict.fromkeys(
        ("convert", "repack", "split", "merge"), "few rows of a tensor are in memory, as many for each thread (-t)"
    ),
    "tune": "a layer's gradients take what they take",
    **dict.fromkeys(("make", "run"), "each of their stages keeps to half of what is free"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files for the jobs."""
    from ggufmill import quantize_model, split_model

    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(DEMO, folder / "m")
    quantize_model(folder / "m", folder / "q.gguf", "q4_0")
    split_model(folder / "q.gguf", folder / "s.gguf", split_max_tensors=40)
    (folder / "r.toml").write_text('[source]\nmodel = "m"\n[quantize]\ntype = "q4_0"\n')
    return folder


def test_every_verb_has_a_dry_run_or_a_reason():
    assert set(VERBS) == set(JOBS) | set(WITHOUT)


def test_every_verb_that_says_its_memory_takes_a_bound_or_has_a_reason():
    for verb in JOBS.keys() - WITHOUT_FIGURES:
        request = getattr(ggufmill, VERBS[verb].functions[0]).request
        assert ("memory" in {field.name for field in fields_of(request)}) != (verb in WITHOUT_MEMORY), verb


@pytest.mark.slow(keep=["[!m]*", "merge", "metadata"])  # but make, of which test_make.py has one
@pytest.mark.parametrize("verb", JOBS)
def test_a_dry_run_says_what_the_job_takes_and_writes_nothing(verb, made, mill, monkeypatch):
    if verb == "tune":
        pytest.importorskip("torch")
    monkeypatch.chdir(made)
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    code, out, err = mill(verb, *JOBS[verb], "--dry-run", "--json")
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
    figures = json.loads(out)
    if verb in WITHOUT_FIGURES:
        return
    figures = figures.get("run", figures)
    assert figures["disk"]["needed"] >= 0
    assert figures["memory"]["peak"] > 40 << 20
    if verb not in UNTIMED:
        assert 0 < figures["predicted"]["seconds"] <= figures["predicted"]["processor_seconds"]
        assert sum(figures["predicted"]["seconds_by_part"].values()) == pytest.approx(figures["predicted"]["seconds"])
    assert mill(verb, *JOBS[verb], "--dry-run")[0] == 0
