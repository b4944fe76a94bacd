import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from ggufmill import quantize_model, serve_model
from ggufmill.cli import main
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"


def hear_hangups():
    """In a child: SIGHUP is heard even where these tests run under nohup, which what they start would respect."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start():
    """start(*options, **environment) -> (process, its URL)"""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    started = []

    def run(*options, **environment):
        command = [sys.executable, "-m", "ggufmill", "serve", str(DEMO), "--port", "0", *options]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
            preexec_fn=hear_hangups,
        )  # fmt: skip
        started.append(process)
        lines = []
        for line in process.stderr:  # perhaps after a line on kernels that are compiled
            lines.append(line)
            result = re.fullmatch(
                r"demo: listening on (http://127\.0\.0\.1:\d+) \(a page to chat; the API is at http\S+/v1; Ctrl-C ends it\)\n",
                line,
            )
            if result:
                return process, result[1]
        raise AssertionError("".join(lines))

    yield run
    for process in started:
        process.kill()
        process.communicate()


def post(url, body, key=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as response:
        return json.load(response)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)])
def test_it_serves_and_shuts_down(start, number):
    process, url = start("--temp", "0", "--alias", "mine", "-n", "5", GGUFMILL_API_KEY="open-sesame")
    ask = {"messages": [{"role": "user", "content": "The list"}]}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(f"{url}/v1/chat/completions", ask)
    assert refused.value.code == 401
    replies = [post(f"{url}/v1/chat/completions", ask, "open-sesame") for _ in range(2)]
    texts = {reply["choices"][0]["message"]["content"] for reply in replies}
    assert len(texts) == 1
    assert replies[0]["model"] == "mine"
    assert replies[0]["usage"]["completion_tokens"] <= 5
    # While an answer runs that would take long: it is ended, not waited for.
    long = {"prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": -1}
    headers = {"Authorization": "Bearer open-sesame"}
    stream = urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", json.dumps(long).encode(), headers), timeout=300
    )
    assert stream.readline().startswith(b"data: ")
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out == ""
    assert "5 generated" in err or "ended by eos" in err
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1 POST /v1/chat/completions: .*prompt tokens", err, re.M)
    assert err.endswith("ended\n")
    assert "Traceback" not in err
    assert "open-sesame" not in err
    assert b"shutting down" in stream.read()


@pytest.mark.oracle
def test_it_serves_from_a_device(start):
    """All on torch's processor device, and part of it: the answers of the program's own kernels, and nearly their logits."""
    pytest.importorskip("torch")
    ask = {"messages": [{"role": "user", "content": "The list"}], "logprobs": True, "max_tokens": 4}
    placements = (), ("--device", "cpu"), ("--device", "cpu", "-ngl", "2", "-ot", r"blk\.3\.attn=CPU,exps=CPU")
    answers = []
    for options in placements:
        _, url = start("--temp", "0", "-t", "1", *options)
        answers.append(post(f"{url}/v1/chat/completions", ask)["choices"][0])
    expected, *found = answers
    for answer in found:
        assert answer["message"] == expected["message"]
        assert answer["finish_reason"] == expected["finish_reason"]
        for token, other in zip(answer["logprobs"]["content"], expected["logprobs"]["content"], strict=True):
            assert token["token"] == other["token"]
            assert token["logprob"] == pytest.approx(other["logprob"], abs=0.05)


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        (["--host", "0.0.0.0"], None, "--api-key asks them for a key, --no-key does not"),
        (["--api-key", ""], None, "the API key is empty"),
        ([], " ", "the API key is empty"),
        ([], "", "the API key is empty"),
    ],
)
def test_a_key_is_needed_where_others_can_connect(options, key, message, capsys, monkeypatch):
    pytest.importorskip("uvicorn")
    if key is None:
        monkeypatch.delenv("GGUFMILL_API_KEY", raising=False)
    else:
        monkeypatch.setenv("GGUFMILL_API_KEY", key)
    with pytest.raises(SystemExit) as end:
        main(["serve", str(DEMO), "--port", "0", *options])
    assert end.value.code not in (0, None)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a MODEL or, with --models DIR, a folder"),
        ([DEMO, "--models", FOLDER], "either a MODEL or, with --models DIR, a folder"),
        ([DEMO, "--models-memory", "4G"], "--models-memory does nothing without --models"),
        ([DEMO, "--no-models-autoload"], "--no-models-autoload does nothing without --models"),
        (["--models", FOLDER, "--alias", "x"], "--alias does nothing without MODEL"),
        (["--models", FOLDER, "--architecture", "x"], "--architecture does nothing without a checkpoint's folder"),
        (["--models", FOLDER / "nowhere"], "nowhere"),
    ],
)
def test_a_model_or_a_folder_of_models(arguments, message, capsys):
    pytest.importorskip("uvicorn")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--port", "0", *map(str, arguments)])
    assert end.value.code not in (0, None)
    assert message in capsys.readouterr().err


def test_models_of_a_folder(tmp_path):
    """The library's function and all between it and a loaded model: settings, options, memory, what is reported."""
    pytest.importorskip("uvicorn")
    quantize_model(DEMO, tmp_path / "m.gguf", type="q8_0")
    stop, ready, url, events, ends = threading.Event(), threading.Event(), [], [], []
    thread = threading.Thread(
        target=serve_model,
        kwargs={
            "models": tmp_path, "port": 0, "n_ctx": 128, "temp": 0, "n_predict": 3, "stop": stop, "draft_max": 2,
            "on_ready": lambda address: (url.append(address), ready.set()), "on_model": events.append, "on_end": ends.append,
        },
    )  # fmt: skip
    thread.start()
    try:
        assert ready.wait(60)
        reply = post(f"{url[0]}/v1/completions", {"model": "m", "prompt": "The list"})
        assert (reply["model"], reply["usage"]["completion_tokens"]) == ("m", 3)
        with urllib.request.urlopen(f"{url[0]}/props?model=m") as shown:
            settings = json.load(shown)["default_generation_settings"]
        assert (settings["n_ctx"], settings["params"]["temperature"]) == (128, 0)
    finally:
        stop.set()
        thread.join(60)
    assert [(event.name, event.status) for event in events] == [("m", "loaded")]
    file = (tmp_path / "m.gguf").stat().st_size
    assert file < events[0].nbytes < file + (64 << 20)
    assert ends[0].origin == "127.0.0.1 POST /v1/completions [m]"


def test_a_taken_port(capsys):
    pytest.importorskip("uvicorn")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(DEMO), "--port", str(port)])
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith(f"ggufmill: cannot listen on 127.0.0.1, port {port}: Address already in use")
    assert message.count("\n") == 1


def test_a_bad_template_and_host(capsys):
    pytest.importorskip("uvicorn")
    for options, said in (
        (("--template", "klingon"), "no chat template 'klingon'"),
        (("--host", "no.such.host.invalid", "--no-key"), "cannot listen"),
        (
            ("--host", "no.such.host.invalid", "--no-key", "-c", "5000"),
            "warning: n_ctx is 5000, but the model was trained with",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(DEMO), "--port", "0", *options])
        assert ended.value.code == 1
        assert said in capsys.readouterr().err


def test_without_the_extra_it_names_the_packages(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ggufmill.runtime.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(DEMO)])
    assert ended.value.code == 2
    assert "pip install 'ggufmill[serve]'" in capsys.readouterr().err
