"""Shell completion, and --quiet."""

import os
import subprocess
import sys

import pytest

from ggufmill.recipes import FOLDER


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(mill, shell):
    code, out, _ = mill("completion", shell)
    assert code == 0
    assert "_GGUFMILL_COMPLETE" in out
    assert f"{shell}_complete" in out


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("ggufmill qu", 1, "quantize"),
        ("ggufmill quantize --dry", 2, "--dry-run"),
        ("ggufmill completion z", 2, "zsh"),
    ],
)
def test_words_are_completed(words, position, expected):
    variables = {"_GGUFMILL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    command = [sys.executable, "-c", "from ggufmill.cli import main; main()"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_quiet(mill, tmp_path):
    """No bars and no notes; warnings and results stay."""
    job = ["quantize", FOLDER / "demo", tmp_path / "a.gguf", "q8_0", "--custom-q", "nothing=q4_0", "--force"]
    loud, quiet = mill(*job), mill(*job, "--quiet")
    assert loud[0] == quiet[0] == 0
    assert quiet[1] == loud[1]
    assert "quantize:" in loud[2]
    assert "quantize:" not in quiet[2]
    warnings = [line for line in loud[2].splitlines() if line.startswith("warning: ")]
    assert warnings
    assert [line for line in quiet[2].splitlines() if line.startswith("warning: ")] == warnings
