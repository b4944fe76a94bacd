"""Verbs with --device and the rules of placement, on torch's own processor device."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
from op_graphs import DEVICE

from ggufmill.cli.program import group
from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER
from ggufmill.runtime.placement import torch_devices

pytestmark = pytest.mark.oracle

MODEL, TEXT = str(FOLDER / "demo"), "word " * 200


def run(*arguments):
    result = CliRunner().invoke(group, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def test_perplexity_is_that_of_the_processor(text):
    def value(*options):
        return json.loads(run("perplexity", MODEL, "-f", text, "-c", 64, "--json", "-t", 1, *options))

    expected, found = value(), value("--device", DEVICE, "-ot", "exps=CPU", "-ngl", 3, "--device-memory", "8M")
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=0.02)
    assert found["settings"]["override_tensor"] == ["exps=CPU"]
    assert "device" not in expected["settings"]


def test_importance_matrix_bench_and_comparison(text, tmp_path):
    from ggufmill.imatrix.files import read_imatrix_file

    for name, options in (("plain", ()), ("device", ("--device", DEVICE, "--n-cpu-moe", 1))):
        run("imatrix", MODEL, "-f", text, "-o", tmp_path / f"{name}.gguf", "-c", 64, "-t", 1, *options)
    a, b = (read_imatrix_file(tmp_path / f"{name}.gguf").entries for name in ("plain", "device"))
    assert a.keys() == b.keys()
    for name in a:
        assert np.allclose(a[name][0], b[name][0], rtol=0.05, atol=1e-3 * np.abs(a[name][0]).max()), name
    rows = json.loads(run("bench", MODEL, "-p", 8, "-n", 2, "-r", 1, "-t", 1, "--device", DEVICE, "--json"))["rows"]
    assert {row["backend"] for row in rows} == {"TORCH0" if DEVICE == "cpu" else DEVICE.upper().replace(":", "")}
    run("compare", MODEL, MODEL, "-f", text, "-c", 64, "-t", 1, "--chunks", 1, "--device", DEVICE)


def test_covariances_of_a_model_that_is_larger_than_the_device(text, tmp_path):
    """Those of the processor, but for roundings; and the same bits whether layers stay on the device or are copied there."""
    placements = {"plain": (), "whole": ("--device", DEVICE), "copied": ("--device", DEVICE, "--device-memory", "8M")}
    for name, options in placements.items():
        paths = "-o", tmp_path / f"{name}.imatrix", "--covariance", tmp_path / f"{name}.gguf"
        run("imatrix", MODEL, "-f", text, *paths, "-c", 64, "--chunks", 3, "-t", 1, *options)
    plain, whole, copied = (open_gguf(tmp_path / f"{name}.gguf").tensors for name in placements)
    assert plain.keys() == whole.keys() == copied.keys()
    for name, tensor in whole.items():
        assert np.array_equal(tensor.data, copied[name].data), name
        if tensor.type.name == "f32":
            found, expected = (np.ascontiguousarray(each.data).view(np.float32) for each in (tensor, plain[name]))
            assert np.allclose(found, expected, rtol=0.05, atol=1e-3 * np.abs(expected).max()), name


# Verbs that run a model, with little to do; TEXT, OUT: paths.
SHORT = ("-t", 1, "-c", 64)
VERBS = {
    "perplexity": ("perplexity", MODEL, "-f", "TEXT", *SHORT),
    "imatrix": ("imatrix", MODEL, "-f", "TEXT", "-o", "OUT", *SHORT),
    "compare": ("compare", MODEL, MODEL, "-f", "TEXT", "--tensors", "output.weight", *SHORT),
    "generate": ("generate", MODEL, "-p", "The list", "-n", 6, "--temp", 0, *SHORT),
    "bench": ("bench", MODEL, "-p", 8, "-n", 2, "-r", 1, "-t", 1),
    "sweep-bench": ("sweep-bench", MODEL, "-c", 32, "-ub", 16, "-t", 1),
    "embed": ("embed", MODEL, "-p", "The list", "-t", 1),
    "search": (
        *("search", MODEL, "OUT", "--target-bpw", 6, "--types", "q4_0,q8_0", "-f", "TEXT", "-c", 32, "-t", 1),
        *("--chunks", 1, "--measurements", 2, "--rows", 8),
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_rules_for_accelerators_are_harmless_without_one(mill, verb, text, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_devices, "may_have_accelerators", lambda: False)
    arguments = [{"TEXT": text, "OUT": tmp_path / "out"}.get(word, word) for word in VERBS[verb]]
    code, _, errors = mill(*arguments, "-ngl", 99, "-ot", "exps=CPU")
    assert code == 0
    assert errors.count("warning: -ngl, -ot without effect: there is no accelerator here, the model runs on the processor") == 1


@pytest.mark.parametrize("verb", ["generate", "sweep-bench", "embed", "search"])
def test_verbs_on_a_device(verb, text, tmp_path):
    """The others are compared with the processor's results above."""
    arguments = [{"TEXT": text, "OUT": tmp_path / "out"}.get(word, word) for word in VERBS[verb]]
    options = ["--force"] if verb == "search" else []
    expected, found = (json.loads(run(*arguments, "--json", *options, *device)) for device in ((), ("--device", DEVICE)))
    assert expected.keys() == found.keys()
    if verb == "generate":
        assert found["text"] == expected["text"]
    if verb == "search":
        assert found["kld_mean"] == pytest.approx(expected["kld_mean"], rel=0.2)
    if verb == "embed":
        a, b = (np.array(result["embeddings"][0]["embedding"]) for result in (expected, found))
        assert np.allclose(a, b, atol=0.02)


def test_a_device_that_is_not_there(monkeypatch, mill):
    monkeypatch.setattr(torch_devices, "may_have_accelerators", lambda: False)
    code, _, errors = mill(*VERBS["generate"], "-ot", "exps=CUDA0")
    assert code == 1
    assert errors.strip().splitlines()[-1].endswith("-ot exps=CUDA0: there is no CUDA0; there is no accelerator here")


def test_cpu_and_none_mean_the_same_for_every_verb(mill, tmp_path, monkeypatch, tiny_llama, write_checkpoint):
    """`none` is this program on the processor, `cpu` is torch on it."""
    model = write_checkpoint(tmp_path / "m", *tiny_llama(hidden_size=256, intermediate_size=256, vocab_size=64))
    monkeypatch.setattr(torch_devices, "may_have_accelerators", lambda: False)
    for name, backend, said in (
        ("none", "CPU", ""),
        ("auto", "CPU", "--device auto without effect: there is no accelerator here"),
        ("cpu", "TORCH0", "--device cpu encodes nothing"),
    ):
        rows = json.loads(run(*VERBS["bench"], "--device", name, "--json"))["rows"]
        assert {row["backend"] for row in rows} == {backend}
        code, _, errors = mill(
            "quantize", model, tmp_path / f"{name}.gguf", "q8_0", "--custom-q", "0.attn_k=q4_K", "--device", name
        )
        assert code == 0
        assert said in errors
    assert "--device 'tpu' is none of" in mill("quantize", MODEL, tmp_path / "no.gguf", "iq4_k", "--device", "tpu")[2]


def test_plan_is_for_the_devices_that_are_there():
    plan = json.loads(
        run("plan", MODEL, "-c", 512, "--device", "cpu,cpu", "-ts", "1,3", "-ot", "exps=CPU", "--type", "Q8_0", "--json")
    )
    names = [device["name"] for device in plan["devices"]]
    assert names == ["CPU", "TORCH0", "TORCH1"]
    assert plan["fits"]
    assert all(device["capacity"] > 0 for device in plan["devices"])
    assert plan["devices"][2]["cache"] > plan["devices"][1]["cache"] > 0
    both = CliRunner().invoke(group, ["plan", MODEL, "--vram", "8G", "--device", "cpu"])
    assert "give one of the two" in both.output


def test_what_is_wrong_is_one_line(text):
    for options, words in (
        (("--device", "tpu"), "--device 'tpu' is none of"),
        (("--device", DEVICE, "-mg", "9"), "-mg 9: there are"),
        (("--device", DEVICE, "-ts", "1,2"), "one share for each of"),
        (("--device", DEVICE, "--device-memory", "10B"), "the largest layer on"),
    ):
        result = CliRunner().invoke(group, ["perplexity", MODEL, "-f", str(text), "-c", "64", *options])
        assert result.exit_code
        assert words in str(result.exception)
