"""How selection.py takes the marks of tests, in a repository whose folder has a name that no package could have."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.slow(keep=["a*"])
@pytest.mark.parametrize("name", ["a", "ab", "b"])
def test_some(name):
    pass

@pytest.mark.slow
def test_all():
    pass
"""


def test_marks_that_keep_parameters(tmp_path):
    folder = tmp_path / "a-b"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .missing import anything")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (folder / "tests" / "test_them.py").write_text(TESTS)
    path = os.pathsep.join([str(Path(__file__).parent / "helpers"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "selection", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "-m", "not slow", "tests"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stdout
    passed = [line.partition("::")[2].partition(" ")[0] for line in run.stdout.splitlines() if " PASSED" in line]
    assert passed == ["test_some[a]", "test_some[ab]"]
