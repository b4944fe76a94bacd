"""The verbs that judge and measure: perplexity, compare, bench, sweep-bench; and how quickly the program answers."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import exit_code

from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
TEXT = FOLDER / "demo" / "heldout.txt"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The demo model as bf16 and as q4_0."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "bf16.gguf", folder / "q4.gguf"]
    for path, command in zip(paths, (["convert", DEMO], ["quantize", DEMO]), strict=True):
        assert exit_code(*command, path, *(["q4_0", "--pure"] if command[0] == "quantize" else [])) == 0
    return paths


def test_perplexity_prints_running_values_and_the_estimate(mill, files):
    arguments = ("perplexity", files[1], "-f", TEXT, "-c", 64, "--chunks", 3, "-t", 1)
    code, out, err = mill(*arguments)
    assert code == 0
    running = re.match(r"\[1\](\d+\.\d{4}),\[2\](\d+\.\d{4}),\[3\](\d+\.\d{4}),\n", out)
    final = re.search(r"^Final estimate: PPL = (\d+\.\d{4}) ± (\d+\.\d{4})$", out, re.M)
    assert running
    assert final
    assert final[1] == running[3]
    assert re.search(r"seconds per pass of 3 windows, [\d.]+ (s|min) for all 3", err)
    assert "digest xxh3:" in out
    result = json.loads(mill(*arguments, "--json")[1])
    assert f"{result['perplexity']:.4f}" == final[1]
    assert result["settings"]["threads"] == 1
    assert result["text_digest"]["nbytes"] == TEXT.stat().st_size
    assert result["about"]["files"][0]["name"] == "q4.gguf"
    assert result["program"]["ggufmill"]
    assert len(result["window_losses"]) == 3


def test_perplexity_against_a_baseline_and_an_earlier_result(mill, files, tmp_path):
    arguments = ("perplexity", files[1], "-f", TEXT, "-c", 64, "--chunks", 3, "--kl-divergence", files[0])
    code, out, _ = mill(*arguments)
    assert code == 0
    assert len(re.findall(r"^ +\d  +\d+\.\d+ ± ", out, re.M)) == 3
    for label in ("ratio", "KL divergence, mean", "Δp, root mean square", "same top token", "99.9 %", "baseline "):
        assert label in out, label
    earlier = tmp_path / "earlier.json"
    base = json.loads(mill("perplexity", files[0], "-f", TEXT, "-c", 64, "--chunks", 3, "--json")[1])
    earlier.write_text(json.dumps(base))
    result = json.loads(mill(*arguments, "--compare-with", earlier, "--json")[1])
    assert result["compared_with"]["comparable"]
    assert result["compared_with"]["ratio"] == pytest.approx(result["ratio"], rel=1e-6)
    assert result["baseline_about"]["files"][0]["name"] == "bf16.gguf"
    code, out, _ = mill("perplexity", files[1], "-f", TEXT, "-c", 64, "--chunks", 2, "--compare-with", earlier)
    assert code == 0
    assert "not comparable with the earlier result: windows: 2 here, 3 there" in out
    earlier.write_text("[]")
    code, _, err = mill(*arguments, "--compare-with", earlier)
    assert code == 1
    assert "is not a result of `ggufmill perplexity --json`" in err


@pytest.mark.slow
def test_several_models_and_files_of_predictions(mill, files, tmp_path):
    base, small = tmp_path / "base.kld", tmp_path / "small.kld"
    cut = ("-f", TEXT, "-c", 64, "--chunks", 3)
    assert mill("perplexity", files[0], *cut, "--save-all-logits", base)[0] == 0
    saved = base.read_bytes()
    code, _, err = mill("perplexity", files[0], *cut, "--kl-divergence-base", base)
    assert code == 1
    assert f"{base} exists; --kl-divergence compares with it, --force replaces it" in err
    code, out, _ = mill(
        "perplexity", *files, *cut, "--kl-divergence", files[0], "--kl-divergence-base", small, "--top-logits", 16
    )
    assert code == 0
    # in a row, or with figures below each other where the terminal is narrow
    assert re.search(rf"{re.escape(str(files[1]))}\b.* MiB\b.*\d\.\d{{5}} ± \d\.\d{{5}}\b", out, re.DOTALL)
    live = json.loads(mill("perplexity", *files, *cut, "--kl-divergence", files[0], "--json")[1])["results"]
    assert [Path(result["model"]).name for result in live] == ["bf16.gguf", "q4.gguf"]
    assert live[0]["kld_mean"] == pytest.approx(0, abs=1e-9)
    for chosen in (("--kl-divergence", base), ("--kl-divergence", "--kl-divergence-base", base), ("--kl-divergence", small)):
        [_, result] = json.loads(mill("perplexity", *files, *chosen, "--json")[1])["results"]
        error = 1e-5 if small not in chosen else 2 * result["kld_missing"]
        assert result["kld_mean"] == pytest.approx(live[1]["kld_mean"], abs=error)
        assert result["tokens_xxh3"] == live[1]["tokens_xxh3"]
    assert result["baseline_about"]["model"]["files"][0]["name"] == "bf16.gguf"
    rows = json.loads(mill("perplexity", *files, "--kl-divergence", small, "--json")[1])["results"]
    code, out, _ = mill("perplexity", *files, "--kl-divergence", small)
    assert code == 0
    for row, path in zip(rows, files, strict=True):  # what the kept tokens lack is another figure for each model
        assert re.search(rf"^{re.escape(str(path))} .* ± \d\.\d+  +{row['kld_missing']:.6f} ", out, re.M)
    code, out, _ = mill("perplexity", files[1], "-f", TEXT, "--kl-divergence", base)
    assert code == 0
    assert "llama-perplexity's log probabilities, 16 bits per token, 3 windows" in out
    assert base.read_bytes() == saved
    other = tmp_path / "other.txt"
    other.write_text(TEXT.read_text()[100:])
    base.with_name("cut.kld").write_bytes(saved[:-1])
    for arguments, ends, words in (
        (("-f", other, "--kl-divergence", base), 1, "is of another text than the one given"),
        (("-c", 32, "--kl-divergence", base), 1, "is of windows of 64 tokens: give -c 64, or none"),
        (("--chunks", 4, "--kl-divergence", base), 1, "has 3 windows, fewer than --chunks 4"),
        (("--kl-divergence", tmp_path / "cut.kld"), 1, "cut.kld: the file is cut short: 2 of 3 windows are whole"),
        (("--kl-divergence", "--kl-divergence-base", other), 1, "is no file of predictions"),
        (("--kl-divergence", "--kl-divergence-base", tmp_path / "none.kld"), 1, "none.kld does not exist"),
        (("--kl-divergence",), 2, "--kl-divergence without a value compares with --kl-divergence-base FILE"),
        (("--kl-divergence", base, "--top-logits", 4), 2, "--top-logits does nothing without a file to write"),
        ((), 2, "a text is missing (-f)"),
        (("-f", TEXT, "--kl-divergence-base", tmp_path / "x.kld"), 2, "which model's predictions are for"),
        (("-f", TEXT, "--kl-divergence", base, "--cluster", "local:1"), 2, "--cluster has no files of predictions"),
    ):
        code, out, err = mill("perplexity", *files, *arguments)
        assert (code, out) == (ends, ""), arguments
        assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.kld", "cut.kld", "other.txt", "small.kld"]


def spoiled(path, name, folder):
    """A copy of a GGUF whose tensor begins with a block scale or number that is NaN."""
    tensor, copy = open_gguf(path).tensors[name], folder / "nan.gguf"
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = np.float16("nan").tobytes()
    copy.write_bytes(data)
    return copy


@pytest.mark.slow(keep=["False"])
@pytest.mark.parametrize("exact", [True, False])
def test_nan_in_a_quantised_file_ends_with_the_tensor_named(mill, files, tmp_path, exact, monkeypatch):
    """Also where activations are rounded to eight bits before they are multiplied: NaN must not become a number there."""
    from ggufmill.runtime import load_model

    broken = spoiled(files[1], "blk.1.attn_output.weight", tmp_path)
    if exact:
        monkeypatch.setattr(
            "ggufmill.pipeline.common.models.load_model", lambda source, **s: load_model(source, **s, exact=True)
        )
    for arguments in (
        ("perplexity", broken),
        ("perplexity", files[1], "--kl-divergence", broken),
        ("compare", files[0], broken),
    ):
        code, out, err = mill(*arguments, "-f", TEXT, "-c", 64)
        assert code == 1
        assert "first output that is not finite (NaN or infinity) is that of blk.1.attn_output.weight" in err
        assert "Final estimate" not in out


def test_compare(mill, files, tmp_path):
    plot = tmp_path / "errors.png"
    drawn = []
    try:
        import matplotlib  # noqa: F401

        drawn = ["--plot", plot]
    except ImportError:
        pass
    code, out, _ = mill("compare", *files, "-f", TEXT, "-c", 64, "--chunks", 4, "--products", *drawn)
    assert code == 0
    assert "blk.0.ffn_up.weight" in out
    assert "KL divergence" in out
    if drawn:
        assert plot.read_bytes().startswith(b"\x89PNG")
    result = json.loads(mill("compare", *files, "--tensors", "ffn_down", "--json")[1])
    assert {t["name"].split(".")[2] for t in result["tensors"]} == {"ffn_down", "ffn_down_exps", "ffn_down_shexp"}
    assert all(t["type_b"] == "q4_0" and 0.05 < t["relative"] < 0.15 for t in result["tensors"])
    assert result["layers"] == []
    assert result["a"]["files"][0]["digest"] != result["b"]["files"][0]["digest"]
    assert mill("compare", *files, "--no-weights")[0] == 1


def test_bench_in_all_formats(mill, files):
    arguments = ("bench", files[1], "-p", "8,16", "-n", 2, "-pg", "8,2", "-r", 2, "-t", 1)
    names = ["pp8", "pp16", "tg2", "pp8+tg2"]
    code, out, _ = mill(*arguments, "-ctk", "f16,q8_0")
    lines = out.splitlines()
    assert code == 0
    assert [c.strip() for c in lines[0].split("|")[1:-1]] == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "type_k",
        "test",
        "t/s",
    ]
    assert [line.split("|")[7].strip() for line in lines[2:]] == names * 2
    assert all(re.search(r"\d+\.\d\d ± +\d+\.\d\d \|$", line) for line in lines[2:])
    assert len({len(line) for line in lines}) == 1
    result = json.loads(mill(*arguments, "--json")[1])
    assert [row["test"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert {"tokens_per_second", "stddev", "n_threads", "model_digest"} <= row.keys()
        assert np.mean(row["samples"]) == pytest.approx(row["tokens_per_second"])
    rows = list(csv.DictReader(io.StringIO(mill(*arguments, "-o", "csv")[1])))
    assert [row["test"] for row in rows] == names
    assert [json.loads(line)["test"] for line in mill(*arguments, "-o", "jsonl")[1].splitlines()] == names
    assert mill("bench", files[1], "-p", 0, "-n", 0)[0] == 2
    assert mill("bench", files[1], "-ctk", "q9")[0] == 2


def test_results_of_benchmarks_go_into_a_file_or_are_printed(mill, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("-p", 4, "-n", 0, "-r", 1, "-t", 1)
    code, out, err = mill("bench", files[1], *arguments, "-o", "speeds.csv")
    assert (code, out) == (0, ""), err
    head, row = (tmp_path / "speeds.csv").read_text().splitlines()
    assert (head.split(",")[0], "pp4" in row) == ("model", True)
    code, out, _ = mill("bench", files[1], *arguments, "-o", "csv")
    assert (code, out.splitlines()[0]) == (0, head)
    code, _, err = mill("bench", files[1], *arguments, "-o", "speeds.csv")
    assert (code, "speeds.csv exists" in err) == (2, True)
    code, _, err = mill("bench", files[1], *arguments, "-o", "speeds.txt")
    assert (code, "neither a format (md, json, csv, jsonl) nor a file" in err) == (2, True)
    code, _, err = mill("bench", files[1], *arguments, "-o", "s.json", "--json")
    assert (code, "give one of the two" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["speeds.csv"]


def test_bench_checks_every_combination_before_measuring(mill, files):
    for form in ("md", "json", "csv", "jsonl"):
        code, out, err = mill("bench", *files, "-p", 8, "-n", 2, "-t", 1, "-ctv", "f16,q8_0", "-fa", "1,0", "-o", form)
        assert (code, out) == (1, "")
        assert "only latents are cached" in err
        assert err.endswith(f" (that is {files[0]} with -t 1 -ctv q8_0 -fa 1; nothing was measured)\n")
        assert err.count("\n") == 1


def test_sweep_bench(mill, files):
    arguments = ("sweep-bench", files[1], "-c", 48, "-ub", 16, "-t", 1)
    code, out, _ = mill(*arguments)
    assert code == 0
    table = [[c.strip() for c in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert table[0] == ["PP", "TG", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s"]
    assert [row[:3] for row in table[2:]] == [["16", "4", depth] for depth in ("0", "16", "32")]
    result = json.loads(mill(*arguments, "--json")[1])
    assert [row["n_kv"] for row in result["rows"]] == [0, 16, 32]
    assert len(mill(*arguments, "-o", "jsonl")[1].splitlines()) == 3


def test_a_plot_without_matplotlib_is_refused_before_the_work(mill, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for arguments in (("sweep-bench", files[1]), ("compare", *files)):
        code, out, err = mill(*arguments, "--plot", tmp_path / "x.png")
        assert code == 1
        assert "pip install 'ggufmill[plot]'" in err
        assert out == ""


HEAVY = ("numpy", "numba", "llvmlite", "tokenizers", "tqdm", "huggingface_hub", "gguf", "jinja2", "matplotlib")


def test_help_imports_nothing_heavy():
    """`ggufmill --help` is to answer at once: importing numba alone takes longer than it may."""
    code = f"""
import sys
from ggufmill.cli import main
try:
    main(["--help"])
except SystemExit as ended:
    assert not ended.code
print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sweep-bench" in done.stdout
    assert done.stderr.split() == []


def test_loading_a_model_builds_no_tokenizer(files):
    code = f"""
import sys
from ggufmill.runtime import load_model
model = load_model({str(files[0])!r}, cache_bytes=1 << 20)
assert "tokenizer" not in vars(model)
assert model.executable.store.free == 1 << 20
"""
    subprocess.run([sys.executable, "-c", code], check=True)
