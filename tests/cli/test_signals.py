"""Signals that ask the program to end, whenever they come: one line, and 128 + signal."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from ggufmill.cli import signals
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"


ENDING = [getattr(signal, name) for name in signals.ENDING if hasattr(signal, name)]


@pytest.fixture(autouse=True)
def heard():
    """Signals that are ignored under nohup, or in the background of a shell, are heard here and by what is started here."""
    ignored = [each for each in ENDING if signal.getsignal(each) == signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, signal.SIG_DFL)
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)


def interrupted_by(number):
    def send(*_, **__):
        os.kill(os.getpid(), number)
        time.sleep(10)

    return send


@pytest.mark.parametrize("number", ENDING)
def test_an_interrupted_job_says_how_to_continue(mill, tmp_path, monkeypatch, python_handlers, number):
    handlers = [signal.getsignal(each) for each in ENDING]
    with monkeypatch.context() as patch:
        patch.setattr("ggufmill.pipeline.writing.carry_out.execute", interrupted_by(number))
        code, _, err = mill("quantize", DEMO, tmp_path / "a.gguf", "q8_0")
    assert code == 128 + number
    assert err.splitlines()[-1] == "ggufmill: interrupted; what was finished is kept, --resume continues it"
    with monkeypatch.context() as patch:
        patch.setattr("ggufmill.pipeline.common.models.load_model", interrupted_by(number))
        code, _, err = mill("generate", DEMO, "-p", "x")
    assert code == 128 + number
    assert err.splitlines()[-1] == "ggufmill: interrupted"
    assert [signal.getsignal(each) for each in ENDING] == handlers


def test_ctrl_c_within_a_function_that_c_calls_is_not_lost(mill, monkeypatch, python_handlers):
    @ctypes.CFUNCTYPE(None)
    def called():
        signal.raise_signal(signal.SIGINT)

    def load(*_, **__):
        called()
        for _ in range(1000):  # the interrupt comes again from a thread, which ends no sleep
            time.sleep(0.01)

    hook = sys.unraisablehook
    monkeypatch.setattr("ggufmill.pipeline.common.models.load_model", load)
    assert mill("generate", DEMO, "-p", "x") == (130, "", "\nggufmill: interrupted\n")
    assert sys.unraisablehook == hook


INTERRUPTED = """
import signal, sys
NUMBER, MODULE, SOURCE = int(sys.argv[1]), sys.argv[2], sys.argv[3]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            try:
                exec("signal.raise_signal(NUMBER)")  # as dataclasses do; `python -m` then ends by SIGINT by itself
            except KeyboardInterrupt:
                if name != "llvmlite.binding":
                    raise
                raise ImportError("as C code makes it of the interrupt")
sys.meta_path.insert(0, Finder())
from ggufmill.cli import main
sys.argv[1:] = ["quantize", SOURCE, "out.gguf", "q8_0"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["click", "numba", "llvmlite.binding"])
def test_a_signal_while_something_is_imported(number, module, tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted", str(int(number)), module, str(DEMO)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr.splitlines()[-1].startswith("ggufmill: interrupted")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.gguf").exists()


AT_THE_START = """
import signal, sys
import ggufmill.cli.program as program
NUMBER = int(sys.argv[1])
program.raise_open_file_limit = lambda: signal.raise_signal(NUMBER)
from ggufmill.cli import main
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_before_anything_is_done(number):
    done = subprocess.run([sys.executable, "-c", AT_THE_START, str(int(number))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "ggufmill: interrupted\n")


AT_THE_END = """
import atexit, os, signal, sys
import ggufmill.cli.program as program
NUMBER = int(sys.argv[1])
program.raise_open_file_limit = lambda: atexit.register(os.kill, os.getpid(), NUMBER)
from ggufmill.cli import main
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_when_everything_is_done(number):
    done = subprocess.run([sys.executable, "-c", AT_THE_END, str(int(number))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + number, "ggufmill: interrupted\n")
    assert done.stdout.startswith("ggufmill, version")


AFTER_THE_END = """
import os, sys
class Last:
    def __init__(self, number, kill=os.kill, pid=os.getpid()):
        self.number, self.kill, self.pid = number, kill, pid
    def __del__(self):  # when Python has given up its handlers
        self.kill(self.pid, self.number)
last = Last(int(sys.argv[1]))
from ggufmill.cli import main
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_python_does_not_end_without_handlers(number):
    done = subprocess.run([sys.executable, "-c", AFTER_THE_END, str(int(number))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ggufmill, version")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no terminal that is lost")
def test_what_is_ignored_stays_ignored():
    """As `nohup` has it: the job goes on when its terminal is closed."""
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{AT_THE_START}"
    done = subprocess.run([sys.executable, "-c", code, str(int(signal.SIGHUP))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ggufmill, version")


HANGING = """
import os, signal, sys, threading, time
import ggufmill.cli.program as program
def hang(*_, **__):
    word = "hanging"
    while True:
        try:
            if word:
                print(word, flush=True)
                word = ""
            time.sleep(60)
        except KeyboardInterrupt:
            print("again", flush=True)
program.group.main = hang
from ggufmill.cli import main
main()
"""


def test_a_second_signal_ends_what_does_not_end():
    """The first one may be waiting for a thread that hangs."""
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "again\n"
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, "ggufmill: interrupted\n")
