"""Faults of real processes while a model is written: nothing is lost, the bytes are those of one machine, one line says why."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("distributed")

from cluster_processes import SLOWLY, at_first_rows, processes

import ggufmill
from ggufmill.errors import MillError, PlanError
from ggufmill.pipeline.cluster import pieces
from ggufmill.recipes import FOLDER

# files cannot be longer than this for the worker: what a full disk looks like, without one
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
DEMO = FOLDER / "demo"

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "q.gguf"
    return ggufmill.quantize_model(DEMO, out, "q4_0").files[0].read_bytes()


@pytest.fixture
def running(tmp_path, request):
    folder = tmp_path / "dask"
    folder.mkdir()
    with processes(folder, ttl=getattr(request, "param", "120s")) as started:
        yield started


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "MIN_WEIGHTS", 1 << 16)
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "q.gguf"


def quantize(running, out, workers, **options):
    """With this many workers there before the job begins."""
    running.wait_for_workers(workers)
    return ggufmill.quantize_model(DEMO, out, "q4_0", cluster=str(running.file), **options)


def command_line(running, out, *options):
    command = [sys.executable, "-m", "ggufmill", "quantize", DEMO, out, "q4_0", "--cluster", running.file, *options]
    return subprocess.Popen([str(c) for c in command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for_tensors(out, process):
    """Until a few tensors are in the journal."""
    journal = out.with_name(out.name + ".journal")
    while not journal.exists() or journal.read_text().count("\n") < 4:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("output", ["shared", pytest.param("collect", marks=pytest.mark.torture)])
def test_worker_is_killed(running, out, expected, caplog, output):
    running.worker("good")
    running.worker("bad", at_first_rows(out.parent / "marker", "os.kill(os.getpid(), signal.SIGKILL)"))
    result = quantize(running, out, 2, cluster_output=output)
    assert (out.parent / "marker").exists()
    assert out.read_bytes() == expected
    assert [share.worker for share in result.shares] == ["good at 127.0.0.1"]
    assert "worker bad at 127.0.0.1 is lost; others make its pieces again" in caplog.text


@pytest.mark.torture
@pytest.mark.parametrize("running", ["3s"], indirect=True)
def test_worker_is_frozen(running, out, expected, caplog):
    running.worker("good")
    frozen = running.worker("frozen", at_first_rows(out.parent / "marker", "os.kill(os.getpid(), signal.SIGSTOP)"))
    quantize(running, out, 2)
    assert out.read_bytes() == expected
    assert "worker frozen at 127.0.0.1 is lost; others make its pieces again" in caplog.text
    os.kill(frozen.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert out.read_bytes() == expected


@pytest.mark.torture
def test_worker_runs_out_of_memory(running, out, expected, caplog):
    fill = "kept = [bytearray(b'x' * (50 << 20)) for _ in range(40) if not time.sleep(0.05)]"
    running.worker("good")
    running.worker("small", at_first_rows(out.parent / "marker", fill), "--memory-limit", "1GB", nanny=True)
    quantize(running, out, 2)
    assert (out.parent / "marker").exists()
    assert out.read_bytes() == expected
    assert "worker small at 127.0.0.1 is lost; others make its pieces again" in caplog.text


def test_disk_is_full_for_one_worker(running, out, expected):
    running.worker("good")
    running.worker("full", at_first_rows(out.parent / "marker", FULL), nanny=True)
    result = quantize(running, out, 2)
    assert out.read_bytes() == expected
    assert "full at 127.0.0.1" not in {share.worker for share in result.shares if share.nbytes > 4096}


def test_disk_is_full_for_all(running, out, expected):
    running.worker("full", at_first_rows(out.parent / "marker", FULL))
    line = r"^worker full at 127\.0\.0\.1: .*: \S+q\.gguf\.part: File too large \(3 attempts\) \(\d+ of 74 tensors are kept"
    with pytest.raises(MillError, match=line):
        quantize(running, out, 1)
    ggufmill.quantize_model(DEMO, out, "q4_0", resume=True)
    assert out.read_bytes() == expected


@pytest.mark.parametrize(
    ("preload", "line"),
    [
        ("import numba; numba.__version__ = '0.1'", r"numba 0\.1 instead of [\d.]+"),
        ("import ggufmill.version; ggufmill.version.__version__ = '0.0.1'", r"ggufmill 0\.0\.1 instead of [\d.]+"),
        ("import sys; sys.modules['ggufmill'] = None", r"this program cannot be imported there"),
    ],
)
def test_worker_with_another_version_is_refused(running, out, preload, line):
    running.worker("other", preload)
    with pytest.raises(PlanError, match=rf"^worker other at 127\.0\.0\.1: {line}"):
        quantize(running, out, 1)
    assert list(out.parent.iterdir()) == []


def test_scheduler_is_killed(running, out, expected):
    running.worker("slow", SLOWLY)
    running.wait_for_workers(1)
    client = command_line(running, out)
    wait_for_tensors(out, client)
    running.all["scheduler"].kill()
    _, errors = client.communicate(timeout=120)
    assert client.returncode == 1
    assert errors.splitlines()[-1].startswith(f"ggufmill: the scheduler at {running.file} is lost (")
    assert errors.rstrip().endswith("tensors are kept; --resume continues)")
    assert ggufmill.quantize_model(DEMO, out, "q4_0", resume=True).resumed >= 3
    assert out.read_bytes() == expected


def test_client_is_killed(running, out, expected):
    running.worker("slow", SLOWLY)
    running.wait_for_workers(1)
    client = command_line(running, out)
    wait_for_tensors(out, client)
    client.kill()
    client.communicate()
    running.all["slow"].kill()
    running.worker("good")
    assert quantize(running, out, 1, resume=True).resumed >= 3
    assert out.read_bytes() == expected
