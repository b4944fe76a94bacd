"""What goes to stderr beside results: nothing but warnings with --quiet, in any verb; colour in a terminal; plain words."""

import ast
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ggufmill
from ggufmill import VERBS
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
TEXT = ("-f", DEMO / "heldout.txt", "-c", 32, "--chunks", 2)
PARTS = "parts-00001-of-00002.gguf"
# verb -> words after it
JOBS = {
    "convert": (DEMO, "m.gguf"),
    "convert-endian": ("m.gguf", "big.gguf"),
    "quantize": ("m.gguf", "q.gguf", "15", "--allow-requantize"),
    "repack": ("q.gguf", "r.gguf"),
    "split": ("q.gguf", "parts", "--split-max-tensors", 40),
    "merge": (PARTS, "whole.gguf"),
    "hash": ("q.gguf",),
    "inspect": ("q.gguf", "--check"),
    "metadata": ("q.gguf", "--set", "general.author=me"),
    "plan": ("q.gguf", "-v"),
    "recipes": ("lint", "demo", DEMO),
    "search": ("m.gguf", "r.txt", "--target-bpw", 6, "--types", "q4_0,q8_0", "--rows", 8),
    "imatrix": ("m.gguf", *TEXT, "-o", "i.gguf"),
    "perplexity": ("q.gguf", *TEXT, "--json"),
    "evaluate": ("q.gguf", "--against", "m.gguf", *TEXT, "-o", "judged", "--no-plot"),
    "compare": ("m.gguf", "q.gguf", *TEXT),
    "bench": ("q.gguf", "-p", 8, "-n", 2, "-r", 1),
    "sweep-bench": ("q.gguf", "-c", 32, "--pp", 16),
    "generate": ("q.gguf", "-p", "a", "-n", 2),
    "embed": ("q.gguf", "-p", "a"),
    "warm-up": ("q.gguf", "--types", "q8_0"),
    "completion": ("bash",),
    "export": ("m.gguf", "exported"),
    "make": (DEMO, "-o", "made", "--fit", "5M", "--effort", 0, "--dry-run"),
}
WRITTEN = {"m.gguf": "convert", "q.gguf": "quantize", PARTS: "split"}  # what others read, and which verb writes it
ELSEWHERE = {"run", "upload", "serve", "chat", "tune"}  # take too long, a Hub, a client, a conversation, torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quiet")


def test_all_verbs_are_tried():
    assert JOBS.keys() | ELSEWHERE == VERBS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("verb", JOBS)
def test_quiet_is_quiet(mill, folder, monkeypatch, verb):
    monkeypatch.chdir(folder)
    run_quietly(mill, verb)


def run_quietly(mill, verb):
    """After the verbs that write what it reads, and if it has not run: what this test runs first depends on the processes."""
    done = Path(f"{verb}.done")
    if done.exists():
        return
    for word in JOBS[verb]:
        if (writing := WRITTEN.get(word, verb)) != verb:
            run_quietly(mill, writing)
    code, _, err = mill(verb, *map(str, JOBS[verb]), "--quiet")
    assert code == 0, err
    assert [line for line in err.splitlines() if not line.startswith("warning: ")] == []
    done.touch()


def stderr_of(words, **variables):
    """What the program prints to a terminal as stderr."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    subprocess.run(
        [sys.executable, "-m", "ggufmill", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**environment, "TERM": "xterm", **variables},
        check=False,
    )
    os.close(theirs)
    said = b""
    try:
        while some := os.read(ours, 1 << 16):
            said += some
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return said.decode()


@pytest.mark.process
def test_warnings_and_errors_are_coloured_in_a_terminal(tmp_path):
    failing = ("inspect", tmp_path / "none.gguf")
    assert "\x1b[31m\x1b[1mggufmill:\x1b[0m" in stderr_of(failing)
    assert "\x1b" not in stderr_of(failing, NO_COLOR="1")
    assert "\x1b" not in stderr_of(failing, TERM="dumb")
    recipe = tmp_path / "r.txt"
    recipe.write_text("nothing=q4_0\n.*=q8_0\n")
    warned = ("quantize", DEMO, tmp_path / "o.gguf", "--recipe", recipe, "--dry-run", "--no-timing")
    assert "\x1b[33m\x1b[1mwarning:\x1b[0m" in stderr_of(warned)
    assert "\x1b[33m" not in stderr_of(warned, NO_COLOR="1")


# What a stranger stumbles over, and how it is said instead.
ODD = {
    r"\b(is|are) (not |always )?there\b(?! (no|any|a|is|are)\b)": "exists, does not exist",
    r"\b(exclude each other|do(es)? not go with|make[s]? no sense)\b": "cannot be given together",
    r"\bone of both\b|\btwo ways to the same\b": "one of the two",
    r"\bafresh\b|\bjust now\b|\bat work in\b|\bgo(es)? on\b": "again, at the moment, continues",
    r"\bstands in the way\b|\bcome[s]? along\b": "prevents, comes with the program",
    r"\bleave[s]? .{0,20}\baway\b|\b(be|is) told\b|\bheeded\b|\bcannot say\b|\bbear[s]?\b": "leave out, say, take effect",
    r"\bno (file's name|number of a)\b|\ba folder of peft\b|\bthe same again\b": "is not the name of a file",
}
_SAYING = re.compile(r"(Error|Failed|Parameter|Usage)$|^_?(note|warn|warning|info|fail|refused|refuse|invalid|remark)s?$")


def _messages():
    """(place, text) of each literal in a call that raises or says something, and in helps of options."""
    root = Path(ggufmill.__file__).parent
    rooms = (
        "cli",
        "convert",
        "formats",
        "imatrix",
        "jobs",
        "operating_system",
        "pipeline",
        "quantize",
        "repack",
        "runtime",
        "simd",
    )
    for path in (path for room in rooms for path in sorted((root / room).rglob("*.py"))):
        for call in (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            said = call.args if _SAYING.search(name) or name in ("option", "argument", "LlamaOption") else []
            said = [*said, *(word.value for word in call.keywords if word.arg in ("help", "reason"))]
            for node in (node for part in said for node in ast.walk(part)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(root)}:{node.lineno}", node.value


def test_messages_and_helps_use_plain_words():
    texts = list(_messages())
    assert len(texts) > 2000
    odd = [(place, text, ODD[pattern]) for place, text in texts for pattern in ODD if re.search(pattern, text)]
    assert odd == []
