"""map_ordered against real worker processes."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import cluster_tasks as tasks
import pytest

pytest.importorskip("distributed")

from ggufmill.errors import MillError, PlanError
from ggufmill.pipeline.cluster.connection import difference, open_cluster, program_identity
from ggufmill.pipeline.cluster.ordered_map import PER_THREAD, _Map, _Task, map_ordered


@pytest.fixture(scope="module")
def cluster():
    helpers = os.path.dirname(tasks.__file__)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [helpers, before]))
    try:
        with open_cluster("local:2") as opened:
            yield opened
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def test_results_come_in_order(cluster):
    done = list(map_ordered(cluster, tasks.slow_first, range(12)))
    assert [d.value for d in done] == [d.piece for d in done] == list(range(12))
    assert {d.worker for d in done} <= set(cluster.look())


def test_results_as_completed(cluster):
    values = [d.value for d in map_ordered(cluster, tasks.slow_first, range(12), ordered=False)]
    assert sorted(values) == list(range(12))
    assert values[0] != 0


def test_pieces_are_drawn_as_results_are_consumed(cluster):
    drawn = []
    results = map_ordered(cluster, tasks.square, (drawn.append(n) or n for n in range(100)))
    for consumed in range(1, 6):
        next(results)
        assert len(drawn) <= consumed - 1 + PER_THREAD * 2
    results.close()
    assert len(drawn) < 100


def test_error_names_the_worker_and_the_piece(cluster):
    with pytest.raises(MillError, match=r"^worker \S+ at 127\.0\.0\.1: piece 3: this piece is bad$"):
        list(map_ordered(cluster, tasks.fail_at_three, range(9), name="piece {}".format))


def test_other_errors_are_tried_again(cluster):
    with pytest.raises(MillError, match=r"out\.gguf: No space left on device \(2 attempts\)"):
        list(map_ordered(cluster, tasks.full_disk, [1], attempts=2))


@pytest.mark.process
def test_piece_of_a_lost_worker_is_made_by_another(cluster, tmp_path):
    done = list(map_ordered(cluster, tasks.kill_once, [str(tmp_path / str(n)) for n in range(2)]))
    assert len(done) == 2


@pytest.mark.process
def test_piece_that_kills_workers(cluster):
    with pytest.raises(MillError, match=r"^bad: \d workers died of it, last tls://"):
        list(map_ordered(cluster, tasks.kill_always, ["bad"]))


def test_identity_names_what_differs():
    own = program_identity()
    assert difference(own, own) == ""
    assert difference(own, own | {"numba": "0.1"}) == f"numba 0.1 instead of {own['numba']}"
    assert set(own) >= {"ggufmill", "code", "numba", "numpy"}


def listening_ports():
    """Those of this process and of the workers that it has started."""
    psutil = pytest.importorskip("psutil")
    own = psutil.Process()
    connections = [each for process in (own, *own.children(recursive=True)) for each in process.net_connections("inet")]
    return sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})


async def who_are_you(address, security):
    """What dask answers everybody who reaches it; it would also run their code."""
    from distributed.core import rpc

    async with rpc(address, timeout=3, connection_args=security.get_connection_args("client")) as peer:
        return await peer.identity()


async def answers(asked):
    """Of each address with its security, what it answers within three seconds, or what is raised."""
    return await asyncio.gather(*(asyncio.wait_for(who_are_you(*each), 3) for each in asked), return_exceptions=True)


@pytest.mark.process
def test_a_local_cluster_answers_its_own_client_only(cluster):
    from distributed.security import Security

    own = asyncio.run(who_are_you(cluster.client.scheduler.address, cluster.client.security))
    assert own["type"] == "Scheduler"
    ports = listening_ports()
    assert len(ports) >= 3
    others = [("tcp", Security()), ("tls", Security.temporary())]
    asked = [(f"{scheme}://127.0.0.1:{port}", security) for port in ports for scheme, security in others]
    for answer in asyncio.run(answers(asked)):
        assert isinstance(answer, (OSError, MemoryError))  # the second where bytes of TLS are read as a length
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as visitor, suppress(OSError):
            visitor.sendall(b"GET /info/main/workers.html HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 200 " not in visitor.recv(100)


@pytest.mark.parametrize("address", ["local:0", "local:x", "here", "tcp://host", "udp://host:1"])
def test_address_of_another_form(address):
    with pytest.raises(PlanError, match=r"is no cluster: give tcp://HOST:PORT"), open_cluster(address):
        pass


def test_pieces_that_read_the_same_go_to_one_machine():
    """Machines are hosts, of which a test has one: the choice is looked at, not the workers."""
    hosts = {f"tcp://10.0.0.{i}:1": f"10.0.0.{i}" for i in range(4)}
    chosen = _Map(SimpleNamespace(refused={}, host=hosts.get), str, iter(()), True, 2, 3, str, str.upper)
    chosen._workers = dict.fromkeys(hosts, 4)
    homes = {f"file {i}": chosen._home(f"file {i}") for i in range(40)}
    assert set(homes.values()) == set(hosts)
    assert homes["file 7"] == chosen._home("FILE 7")
    busy = homes["file 7"]
    chosen._tasks.extend(_Task("x", None, busy) for _ in range(8))
    assert chosen._home("file 7") not in (busy, None)
    del chosen._workers[busy]
    kept = {file: home for file, home in homes.items() if home != busy}
    assert {file: chosen._home(file) for file in kept} == kept


@pytest.mark.process
def test_script_that_is_run_again_by_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ggufmill.pipeline.cluster.connection import open_cluster\nwith open_cluster('local:1'):\n    print('open')\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "PlanError: workers cannot be started here" in ended.stderr
    assert "__main__" in ended.stderr.splitlines()[-1]
