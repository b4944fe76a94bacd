"""One way to write each kind of figure: pipeline/common/figures.py, which every table, line, report and card takes it from."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

import ggufmill
from ggufmill.pipeline.common import figures
from ggufmill.recipes import FOLDER

ROOT = Path(ggufmill.__file__).parent
MODULES = [path for room in ("cli", "pipeline") for path in sorted((ROOT / room).rglob("*.py")) if path.name != "figures.py"]
# What only figures.py may write: sizes, bits per weight, standard errors, shares in per cent.
OWN = {
    "a size with its unit": re.compile(r"\} ?[KMGT]i?B\b(?!/s)"),
    "a standard error": re.compile(r"\+/-|\+-"),
    "bits per weight": re.compile(r"\d*f\} (bits per weight|bpw)"),
    "a share": re.compile(r":\.\d%\}"),
}


def test_figures():
    assert figures.size_text(6_102_656) == "5.820 MiB"
    assert figures.file_text(386 << 30, 9) == "386.000 GiB (414,464,344,064 bytes in 9 files)"
    assert figures.windows_text(1, 512) == "1 window of 512 tokens"
    assert figures.windows_text(104, 512, 26520) == "104 windows of 512 tokens, 26,520 predictions"
    assert figures.error_text(22.0917, 0.38021, 4) == "22.0917 ± 0.3802"
    assert figures.error_text(22.0917, None, 4, " %") == "22.0917 %"
    assert figures.error_text(None, None, 4) == ""
    assert (figures.share_text(0.12345), figures.per_cent_text(93.891)) == ("12.3 %", "93.89 %")


@cache
def formatted():
    """Place and text of every formatted string."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.JoinedStr)
    ]


@pytest.mark.parametrize("what", OWN)
def test_only_that_module_writes(what):
    assert [place for place, text in formatted() if OWN[what].search(text)] == [], (
        f"{what} is written by pipeline/common/figures.py"
    )


def test_headings_are_those_of_the_module():
    """A heading that two tables share is a name of that module, not a text that may drift."""
    shared = {figures.BITS, figures.DIVERGENCE, figures.SAME_TOP}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Tuple) and {e.value for e in node.elts if isinstance(e, ast.Constant)} & shared
    ]
    assert found == []


def test_size_is_that_of_the_file(mill, tmp_path):
    """`quantize`, `inspect`, `perplexity`, `evaluate` and `recipes explain` say the same of one file."""
    demo, out = FOLDER / "demo", tmp_path / "m.gguf"
    code, text, err = mill("quantize", demo, out, "q4_0")
    assert code == 0, err
    size = figures.size_text(out.stat().st_size)
    assert f"{size} ({out.stat().st_size:,} bytes)" in text + err
    assert f"{size} ({out.stat().st_size:,} bytes)" in mill("inspect", out)[1]
    heldout = ("-f", FOLDER / "demo/heldout.txt", "-c", "64", "--chunks", "1")
    assert size in mill("perplexity", out, *heldout)[1]
    code, text, err = mill(
        "evaluate", out, "--against", demo, *heldout, "-o", tmp_path / "judged", "--stock", "q4_0", "--no-plot"
    )
    assert code == 0, err
    rows = [line.split() for line in text.splitlines() if line.startswith(("m ", "Q4_0 ")) and "MiB" in line]
    assert [" ".join(row[1:3]) for row in rows] == [size, size]  # a mix that is not written is as large as one that is
    about = json.loads(mill("perplexity", out, *heldout, "--json")[1])["about"]
    assert about["file_bytes"] == out.stat().st_size
