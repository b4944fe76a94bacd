"""Simulated topologies: which processors threads get; and what this system does with real ones."""

import ctypes
import errno
import os
import threading

import pytest

from ggufmill import convert_model
from ggufmill.errors import PlanError
from ggufmill.operating_system import numa
from ggufmill.operating_system.numa import Node, ThreadPlace, numa_nodes, parse_cpus
from ggufmill.recipes import FOLDER
from ggufmill.runtime.placement import thread_placement
from ggufmill.runtime.placement.thread_placement import place_threads
from ggufmill.simd.workers import Workers


def write_tree(root, nodes, other=("possible", "online", "has_cpu")):
    folder = root / "sys/devices/system/node"
    for name, cpus in nodes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "cpulist").write_text(f"{cpus}\n")
    for name in other:
        (folder / name).write_text("0-1\n")
    return root


TWO_SOCKETS = {"node0": "0-3,8-11", "node1": "4-7,12-15"}  # each with two threads per core
FOUR = {f"node{i}": f"{4 * i}-{4 * i + 3}" for i in (10, 2, 0, 1)}
WITH_MEMORY_ONLY = TWO_SOCKETS | {"node2": ""}  # such as memory on a CXL device


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(nodes, allowed): a root with these nodes, for a process that may use these processors. Calls are recorded."""
    calls = []

    def build(nodes, allowed):
        monkeypatch.setattr(thread_placement, "allowed_cpus", lambda: list(allowed))
        monkeypatch.setattr(numa, "allowed_cpus", lambda: list(allowed))
        monkeypatch.setattr(numa, "_set_affinity", lambda cpus: calls.append(sorted(cpus)))
        monkeypatch.setattr(numa, "_set_policy", lambda nodes: calls.append(tuple(nodes)))
        return write_tree(tmp_path, nodes)

    build.calls = calls
    return build


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("\n", []), ("x,1-y,2", [2]), ("7-6", [])]
)
def test_lists_of_processors(text, cpus):
    assert parse_cpus(text) == cpus


def test_nodes(tmp_path):
    assert numa_nodes(write_tree(tmp_path / "a", WITH_MEMORY_ONLY)) == [
        Node(0, (0, 1, 2, 3, 8, 9, 10, 11)),
        Node(1, (4, 5, 6, 7, 12, 13, 14, 15)),
    ]
    assert [node.number for node in numa_nodes(write_tree(tmp_path / "b", FOUR))] == [0, 1, 2, 10]
    everything = [Node(0, tuple(numa.allowed_cpus()))]
    assert numa_nodes(tmp_path / "nothing") == everything
    assert numa_nodes(write_tree(tmp_path / "c", {"node0": ""})) == everything


def test_threads_go_wherever_they_are_let(machine):
    root = machine(TWO_SOCKETS, range(16))
    for mode in (None, "numactl"):
        placement = place_threads(None, None, mode, root)
        assert (placement.threads, placement.places, placement.notes) == (16, (), ())
    assert machine.calls == []


def test_distributed_over_nodes(machine):
    root = machine(TWO_SOCKETS, range(16))
    placement = place_threads(6, None, "distribute", root)
    assert [sorted(place.cpus)[0] for place in placement.places] == [0, 4, 0, 4, 0, 4]
    assert all(place.interleave == (0, 1) for place in placement.places)
    assert placement.places[1].cpus == {4, 5, 6, 7, 12, 13, 14, 15}


def test_distributed_over_the_nodes_that_may_be_used(machine):
    root = machine(FOUR, [2, 3, 40, 41, 42])
    placement = place_threads(None, None, "distribute", root)
    assert [sorted(place.cpus) for place in placement.places] == [[2, 3], [40, 41, 42]] * 2 + [[2, 3]]
    assert placement.places[0].interleave == (0, 10)
    only = place_threads(None, [2, 3], "distribute", root)
    assert [sorted(place.cpus) for place in only.places] == [[2, 3]] * 2
    assert only.places[0].interleave == ()


@pytest.mark.parametrize(("here", "cpus"), [(9, [0, 1, 2, 3, 8, 9, 10, 11]), (12, [4, 5, 6, 7, 12, 13, 14, 15]), (None, [0])])
def test_isolated_on_the_node_of_the_caller(machine, monkeypatch, here, cpus):
    monkeypatch.setattr(thread_placement, "current_cpu", lambda: here)
    placement = place_threads(None, None, "isolate", machine(TWO_SOCKETS, range(16)))
    assert sorted(placement.places[0].cpus)[: len(cpus)] == cpus
    assert placement.threads == len(placement.places) == 8
    assert placement.places[0].interleave == ()


def test_processors_that_are_given(machine):
    root = machine(TWO_SOCKETS, range(8))
    placement = place_threads(None, [6, 2], None, root)
    assert [sorted(place.cpus) for place in placement.places] == [[2, 6], [2, 6]]
    with pytest.raises(PlanError, match=r"may not use processor 9; it may use 0-7"):
        place_threads(None, [2, 9], None, root)


def test_too_many_threads_are_said(machine):
    root = machine(TWO_SOCKETS, range(8))
    for options, n in (((9, None, None), 8), ((3, [1, 2], None), 2), ((5, None, "isolate"), 4)):
        (note,) = place_threads(*options, root).notes
        assert note == f"{options[0]} threads on {n} processors wait for each other: -t {n} is faster"


def test_too_many_threads_of_a_job_are_said(tmp_path, caplog):
    count = len(numa.allowed_cpus())
    for threads, expected in ((count, []), (count + 1, [f"{count + 1} threads on {count} processor"])):
        caplog.clear()
        with caplog.at_level("WARNING", "ggufmill"):
            convert_model(FOLDER / "demo", tmp_path / "a.gguf", threads=threads, force=True)
        assert [message.partition("s wait")[0].partition(" wait")[0] for message in caplog.messages] == expected


def test_what_is_not_permitted(machine, monkeypatch):
    """As in containers whose system calls are filtered."""
    root = machine(TWO_SOCKETS, range(16))

    def refused(nodes):
        if nodes:
            raise PermissionError(errno.EPERM, "set_mempolicy: Operation not permitted")

    monkeypatch.setattr(numa, "_set_policy", refused)
    placement = place_threads(2, None, "distribute", root)
    assert placement.places == ()
    assert placement.notes == ("--numa distribute is without effect: set_mempolicy: Operation not permitted",)
    monkeypatch.setattr(numa, "_set_affinity", lambda cpus: refused([0]))
    with pytest.raises(PlanError, match="threads cannot be bound to processors here"):
        place_threads(2, [0], None, root)


def test_a_refused_system_call(monkeypatch):
    def syscall(*_):
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(numa, "c_function", lambda name: syscall)
    monkeypatch.setattr(numa, "architecture", lambda: "x86_64")
    monkeypatch.setattr(numa.sys, "platform", "linux")
    with pytest.raises(OSError, match="set_mempolicy: Operation not permitted"):
        numa._set_policy((0,))


def test_other_systems_have_no_places(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(PlanError, match="binds no threads"):
        place_threads(1, [numa.allowed_cpus()[0]], None)
    (note,) = place_threads(1, None, "isolate").notes
    assert "--numa isolate is without effect" in note


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_the_threads_of_a_team_run_where_they_belong():
    allowed = numa.allowed_cpus()
    first, last = ThreadPlace(frozenset(allowed[:1])), ThreadPlace(frozenset(allowed[-1:]))
    workers = Workers(2, (first, last))

    both = threading.Barrier(2, timeout=60)  # so that each thread takes one

    def where(_):
        both.wait()
        return frozenset(os.sched_getaffinity(0))

    with workers.placed():
        assert set(workers.map(where, range(2))) == {first.cpus, last.cpus}
    assert numa.allowed_cpus() == allowed


def _policy():
    """The calling thread's memory policy: (mode, bits of nodes)."""
    mode, bits = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = {"x86_64": 239, "aarch64": 236}.get(numa.architecture())
    result = ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.byref(mode), bits, ctypes.c_ulong(1024), None, 0)
    return (mode.value, bits[0]) if number and result == 0 else None


@pytest.mark.skipif(numa.sys.platform != "linux", reason="memory policies of Linux")
def test_memory_policy_of_this_thread():
    if _policy() != (0, 0):
        pytest.skip("this kernel has no memory policies, or does not permit them")
    place = ThreadPlace(frozenset(numa.allowed_cpus()), (0,))
    with place.entered():
        assert _policy() == (3, 1)
    assert _policy() == (0, 0)
