"""Options that would do nothing, and outputs in folders that are not there: refused in one line, before any work."""

import pytest

from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
QUANTIZE = ("quantize", DEMO, "q.gguf", "q8_0")
SEARCH = ("search", DEMO, "r.txt", "--target-bpw", 5)
IMATRIX = ("imatrix", DEMO, "-f", TEXT, "-o", "i.imatrix")
COMPARE = ("compare", DEMO, DEMO)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*QUANTIZE, "--types", "q4_0"), "--types does nothing without a target (--target-size, --target-bpw, --max-kld)"),
        ((*QUANTIZE, "--calibration", TEXT), "--calibration does nothing without a target"),
        ((*QUANTIZE, "--include-weights", "ffn"), "--include-weights does nothing without --imatrix"),
        ((*QUANTIZE, "--exclude-weights", "ffn"), "--exclude-weights does nothing without --imatrix"),
        ((*QUANTIZE, "--hide-imatrix"), "--hide-imatrix does nothing without --imatrix"),
        ((*QUANTIZE, "--no-timing"), "--no-timing does nothing without --dry-run"),
        ((*QUANTIZE, "--partial-requant"), "--partial-requant does nothing for a single file"),
        (("convert", DEMO, "c.gguf", "--partial-requant"), "--partial-requant does nothing for a single file"),
        ((*QUANTIZE, "--leave-output-tensor", "--output-tensor-type", "q6_k"), "give one of them"),
        ((*SEARCH, "--refine", 1), "--refine does nothing without a text (-f)"),
        ((*SEARCH, "--chunks", 8), "--chunks does nothing without a text (-f)"),  # its default, but given
        ((*SEARCH, "-c", 64), "--ctx-size does nothing without a text (-f)"),
        ((*SEARCH, "--gpu", "attn"), "--gpu does nothing without --gpu-size, or --repacked"),
        ((*IMATRIX, "--column", "text"), "--column does nothing without a .jsonl or .parquet file (-f)"),
        ((*IMATRIX, "--template", "chatml"), "--template does nothing without a .jsonl or .parquet file (-f)"),
        (("imatrix", "--in-file", TEXT, "-o", "i.imatrix", "--chunks", 3), "--chunks does nothing without a MODEL"),
        ((*COMPARE, "--tensors", "nothing"), "has 'nothing' in its name"),
        ((*COMPARE, "--chunks", 2), "--chunks does nothing without a text (-f)"),
        ((*COMPARE, "-f", TEXT, "--no-weights", "--tensors", "ffn"), "--tensors does nothing without weights"),
        (("generate", DEMO, "-p", "a", "-np", 2), "several sequences at once are for `serve`"),
        (("chat", DEMO, "--parallel", 2), "several sequences at once are for `serve`"),
    ],
)
def test_unused_options_are_refused(mill, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = mill(*arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["convert", "quantize", "search", "repack", "split", "merge"])
def test_an_empty_file_name(mill, tmp_path, monkeypatch, verb):
    """As of a variable that is not set."""
    (tmp_path / "m.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    code, out, err = mill(verb, DEMO if verb == "convert" else "m.gguf", "")
    assert (code, out) == (2, "")
    assert "'' is not the name of a file" in err


def test_quantize_without_any_type_is_refused(mill, tmp_path):
    (tmp_path / "empty.txt").write_text("# no rule yet\n")
    for more in ((), ("--recipe", tmp_path / "empty.txt")):
        code, out, err = mill("quantize", DEMO, tmp_path / "q.gguf", *more)
        assert (code, out) == (1, "")
        assert "nothing to quantise to: give a TYPE" in err
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", DEMO, "reslts/q.gguf", "q8_0"),
        ("convert", DEMO, "reslts/q.gguf", "--dry-run"),
        ("search", DEMO, "reslts/r.txt", "--target-bpw", 5),
        ("imatrix", DEMO, "-f", TEXT, "-o", "reslts/i.imatrix"),
    ],
)
def test_a_missing_folder_is_not_made(mill, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, err = mill(*arguments)
    assert code == 2
    assert "there is no folder reslts; make it first" in err
    assert not list(tmp_path.iterdir())


def test_a_text_that_is_a_folder(mill, tmp_path):
    code, _, err = mill("imatrix", DEMO, "-f", tmp_path, "-o", tmp_path / "i.imatrix")
    assert code == 1
    assert f"-f {tmp_path}: it is a folder; give a file" in err


def test_n_cpu_moe_is_shown_as_it_was_given(mill):
    code, out, err = mill("plan", DEMO, "--type", "q8_0", "--vram", "1G", "--n-cpu-moe", 100)
    assert code == 0, err
    assert "--n-cpu-moe 100" in out
    assert "|99)" not in out
