"""A little of what `make torture` does, and that it finds what is wrong."""

import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import flood
import idle
import inputs
import kills
import power
import server

from jobs import Trial, make_sources, undisturbed

pytestmark = pytest.mark.process

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def merged(sources, tmp_path_factory):
    return undisturbed("merge", sources, tmp_path_factory.mktemp("merged") / "out")


def test_damaged_inputs_are_counted(capsys):
    pytest.importorskip("resource")
    (row,) = inputs.torture(3, ["manifest"])
    assert (row[:2], row[-1]) == (("manifest", "3"), "")


def test_what_fails_before_the_program_begins_is_no_finding():
    python = 'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run_module_as_main\nOSError: [Errno 5]'
    assert kills.failed_before(python)
    assert not kills.failed_before(python.replace("<frozen runpy>", "/ggufmill/cli/program.py"))
    assert not kills.failed_before("ggufmill: out.gguf: Input/output error\n")


def test_a_job_that_is_killed(sources, merged, tmp_path):
    trial = Trial("merge", sources, tmp_path / "trial", merged)
    assert kills.kill_at_random(trial, random.Random(2), 2.0) == ""


@needs_strace
@pytest.mark.parametrize(
    "deleted", ["split-00001-of-00002.gguf", "split-00002-of-00002.gguf", "split-00001-of-00002.gguf.released"]
)
def test_a_job_that_is_killed_as_it_deletes_its_source(sources, merged, tmp_path, deleted):
    trial = Trial("merge-and-delete", sources, tmp_path / "trial", merged)
    options = ("-P", str(trial.folder / deleted), "-e", "trace=unlink", "-e", "inject=unlink:signal=KILL")
    killed = trial.run(("strace", "-f", "-qq", "-o", "/dev/null", *options))
    assert killed.returncode in (-9, 137)
    assert (trial.folder / deleted).exists()
    assert trial.problem_now() == ""
    assert trial.problem_after_resuming() == ""


@needs_strace
@pytest.mark.parametrize(("call", "effect"), [("rename", "signal=KILL"), ("fsync", "error=EIO")])
def test_a_job_that_is_disturbed_at_a_system_call(sources, merged, tmp_path, call, effect):
    assert kills.disturb_call(Trial("merge", sources, tmp_path / "trial", merged), call, 1, effect) == ""


def test_what_a_power_cut_may_leave(tmp_path):
    """Renamed before the bytes are on disk: they may be lost. After both are synced they are not."""
    calls = [
        ("openat", f'AT_FDCWD</>, "{_hex(tmp_path / "a.part")}", O_RDWR|O_CREAT', 3),
        ("pwrite64", f'3<x>, "{_hex("word")}", 4, 0', 4),
        ("rename", f'"{_hex(tmp_path / "a.part")}", "{_hex(tmp_path / "a")}"', 0),
        ("fsync", "3<x>", 0),
        ("openat", f'AT_FDCWD</>, "{_hex(tmp_path)}", O_RDONLY', 4),
        ("fsync", "4<x>", 0),
    ]
    replay, left = power.Replay(tmp_path), []
    for call in calls:
        replay.apply(*call)
        states = set()
        for seed in range(40):
            state = replay.disk.state(random.Random(seed))
            states |= {(name, data.decode()) for name, data in state.items()} or {("", "")}
        left.append(states)
    absent, empty, part = ("", ""), ("a.part", ""), ("a.part", "word")
    assert left[0] == {absent, empty}
    assert left[1] == {absent, empty, part}
    assert left[2] == {absent, empty, part, ("a", ""), ("a", "word")}
    assert left[3] == {absent, part, ("a", "word")}
    assert left[5] == {("a", "word")}


def _hex(text):
    return "".join(f"\\x{b:02x}" for b in str(text).encode())


@needs_strace
def test_a_power_cut_during_a_job(sources, merged, tmp_path):
    trial = Trial("merge", sources, tmp_path / "trial", merged)
    records = power.record(trial, tmp_path / "log")
    moments = power.changing(records, trial)
    for stop in (moments[len(moments) // 2], len(records) - 1):
        assert power.cut(records, stop, Trial("merge", sources, tmp_path / "trial", merged), random.Random(1)) == ""


def test_a_small_flood():
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    seen = flood.flood_server(60, 20, clients=8, idle=40, hold=False)
    assert seen.finding == ""
    assert sum(seen.sent.values()) == 60 or seen.seconds >= 20
    assert seen.statuses[400] > 0
    assert seen.healthy > 0
    assert seen.answered > 0
    assert seen.idle.opened.total() >= 40


BROKEN = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"slots_processing": 0, "waiting": 0}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(500)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("listening on http://127.0.0.1:%d" % server.server_port, file=__import__("sys").stderr, flush=True)
server.serve_forever()
"""


def test_a_flood_finds_what_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setattr(idle, "KINDS", {"no byte": (b"", None, 0.5)})
    monkeypatch.setattr(idle, "SLACK", 0.5)
    monkeypatch.setattr(server, "MILL", [sys.executable, str(tmp_path / "broken.py")])
    problems = " ".join(flood.flood_server(40, 20, clients=4, idle=2).problems)
    assert "status 500" in problems  # of a request
    assert "tokens were generated" in problems  # no figure of them
    assert "the server ends with -15" in problems
    assert "no byte: the connection is still open after 1 s" in problems
