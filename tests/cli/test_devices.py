"""Verbs with --device and the rules of placement, on torch's own processor device."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
from op_graphs import DEVICE

from ggufmill.cli.options.devices import FIELDS
from ggufmill.cli.program import group
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Settings
from ggufmill.runtime.settings import PLACEMENT

MODEL, TEXT = str(FOLDER / "demo"), "word " * 200


def run(*arguments):
    result = CliRunner().invoke(group, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def test_options_are_the_settings_of_placement():
    assert set(FIELDS.values()) == set(PLACEMENT) <= set(Settings.__dataclass_fields__)


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
    assert "--vram and --device: give one of both" in both.output


def test_what_is_wrong_is_one_line(text):
    for options, words in (
        (("--device", "tpu"), "--device tpu is none of"),
        (("--device", DEVICE, "-mg", "9"), "-mg 9: there are"),
        (("--device", DEVICE, "-ts", "1,2"), "one share for each of"),
        (("--device", DEVICE, "--device-memory", "10"), "the largest layer on"),
    ):
        result = CliRunner().invoke(group, ["perplexity", MODEL, "-f", str(text), "-c", "64", *options])
        assert result.exit_code
        assert words in str(result.exception)
