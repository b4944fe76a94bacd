"""A run of the tests ends by a signal, wherever it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LONG = """
import time
from ggufmill.cli import main, program

def test_a_verb_that_takes_long(monkeypatch):
    def hang(*_, **__):
        print("running", flush=True)
        time.sleep(60)
    monkeypatch.setattr(program.group, "main", hang)
    try:
        main(["--version"])
    except SystemExit:
        pass

def test_the_next():
    print("the run goes on")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_within_a_verb(tmp_path, number):
    (tmp_path / "test_long.py").write_text(LONG)
    path = os.pathsep.join([str(Path(__file__).parent / "helpers"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-s", "-p", "end_of_run", "-p", "no:cacheprovider", "test_long.py"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert any("running" in line for line in run.stdout)
    run.send_signal(number)
    out, _ = run.communicate(timeout=60)
    assert "the run goes on" not in out
    assert run.returncode == (-number if number == signal.SIGTERM else 2)
