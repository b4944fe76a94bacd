import io
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from ggufmill.cli import main
from ggufmill.cli.chat import printable
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Sampler

DEMO = FOLDER / "demo"
GREEDY = ("--temp", "0", "-n", "8")


@pytest.fixture
def chat(capsys, monkeypatch):
    """Talks with the demo model: chat(lines, *options) -> (exit code, stdout, stderr)."""

    def run(text, *options, model=DEMO, terminal=False):
        stdin = io.StringIO(text)
        stdin.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as ended:
            main(["chat", str(model), *options])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_each_line_gets_an_answer(chat):
    first = 8 * "The list of all names that they had written before is "  # what a mixture reads as a short prompt is not kept
    code, out, err = chat(f"{first}\n\n   \nThe name is\n", *GREEDY, "--timings")
    assert code == 0
    assert len(out.strip().splitlines()) >= 2
    first, second = (line for line in err.splitlines() if "prompt tokens" in line)
    assert "cached" not in first
    assert "; 8 generated" in first
    assert " cached), " in second
    assert err.count("(-n tokens are reached)") == 2


def test_reset_starts_a_new_conversation(chat):
    once = chat("The list is\n", *GREEDY)[1]
    _, out, _ = chat("The list is\n/reset\nThe list is\n", *GREEDY)
    assert out == 2 * once
    _, out, _ = chat("The list is\nThe list is\n", *GREEDY)
    assert out != 2 * once


def test_commands(chat):
    code, out, err = chat("/help\n/nonsense now\n/exit\nnever asked\n", *GREEDY)
    assert (code, out) == (0, "")
    assert err.count("/reset   forget the conversation") == 2
    assert "there is no command /nonsense" in err


def test_a_backslash_continues_a_line(chat, monkeypatch):
    asked = []

    def answer(self, text):
        asked.append(text)
        yield "yes"

    monkeypatch.setattr("ggufmill.runtime.text.chat.Conversation.answer", answer)
    assert chat("one \\\ntwo\nthree\\", *GREEDY)[1] == "yes\nyes\n"
    assert asked == ["one \ntwo", "three"]


def test_the_system_message_reaches_the_model(chat):
    plain, instructed = (chat("The list is\n", *GREEDY, *more)[1] for more in ((), ("--system", "Return the name of the path")))
    assert plain != instructed


def test_templates(chat, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ raise_exception('not today') }}")
    code, out, err = chat("Hello\nAgain\n", "--template", str(path))
    assert (code, out) == (1, "")
    assert err == "ggufmill: the chat template cannot write these messages: not today\n"
    code, _, err = chat("Hello\n", "--template", "klingon")
    assert code == 1
    assert err == (
        "ggufmill: there is no chat template 'klingon' "
        "(known: alpaca, chatml, deepseek, gemma, glm4, llama3, mistral, phi3, vicuna, zephyr)\n"
    )


def test_a_context_beyond_the_trained_one_is_noted(chat):
    code, _, err = chat("The list is\n", *GREEDY, "-c", "5000")
    assert code == 0
    assert err.splitlines()[0] == "warning: n_ctx is 5000, but the model was trained with a context of 2048 tokens"
    assert err.count("warning") == 1


def test_ctrl_c_cancels_the_answer_only(chat, monkeypatch, python_handlers):
    sampled = []

    def sample(self, logits, past):
        sampled.append(1)
        if len(sampled) == 5:
            signal.raise_signal(signal.SIGINT)
        return 300

    monkeypatch.setattr(Sampler, "sample", sample)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    code, out, err = chat("Hello\nAgain\n", "-n", "7")
    assert code == 0
    assert len(sampled) == 5 + 7
    assert err.splitlines() == ["(interrupted)", "(-n tokens are reached)"]
    assert len(out.splitlines()) >= 2
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_message_that_does_not_fit_is_refused(chat):
    lines = "word " * 200 + "\nThe list is\n"
    code, out, err = chat(lines, "-c", "64", *GREEDY)
    assert (code, out) == (1, "")
    assert "the message does not fit" in err
    assert err.count("\n") == 1
    code, _, err = chat(lines, "-c", "64", *GREEDY, terminal=True)
    assert code == 0
    assert "the message does not fit" in err
    assert "(-n tokens are reached)" in err


def test_control_characters_are_removed():
    assert printable("a\x1b[31mb\x07\tc\nd\x9b\x7f é👨‍👩‍👧") == "a[31mb\tc\nd é👨‍👩‍👧"


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo terminals")
def test_in_a_terminal():
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ggufmill", "chat", str(DEMO), *GREEDY],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(theirs)
    seen = ""

    def wait_for(text):
        nonlocal seen
        until = time.monotonic() + 300
        while text not in seen:
            assert time.monotonic() < until, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096).decode("utf-8", "replace")
        seen = seen.split(text, 1)[1]

    try:
        wait_for("> ")
        os.write(ours, b"half a li")
        wait_for("half a li")
        time.sleep(2)  # a signal while readline still works on a key is not seen before the next one
        os.write(ours, b"\x03")
        wait_for("/exit or Ctrl-D ends the conversation")
        wait_for("> ")
        os.write(ours, b"The list is\n")
        wait_for("(-n tokens are reached)")
        wait_for("> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
