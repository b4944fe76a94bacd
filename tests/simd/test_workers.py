import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ggufmill.simd import team
from ggufmill.simd.memory import view
from ggufmill.simd.workers import Workers


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_order(count):
    workers = Workers(count)
    assert workers.map(lambda i: i * i, range(50)) == [i * i for i in range(50)]
    assert workers.map(lambda i: i, []) == []


def test_several_threads_take_items():
    barrier = threading.Barrier(3, timeout=120)
    Workers(3).map(lambda _: barrier.wait(), range(3))  # passes only when three are in it at once


def test_little_work_stays_on_the_calling_thread():
    caller = threading.get_ident()
    assert Workers(3).map(lambda _: threading.get_ident(), range(50), multiplications=1000) == [caller] * 50


def test_an_exception_is_raised_again():
    def work(i):
        if i == 5:
            raise ValueError("five")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="five"):
        Workers(2).map(work, range(10))


def test_calls_may_be_nested():
    workers = Workers(2)
    sums = workers.map(lambda i: sum(workers.map(lambda j: i * j, range(20))), range(20))
    assert sums == [i * 190 for i in range(20)]


def test_numpy_error_settings_reach_the_threads():
    barrier = threading.Barrier(2, timeout=120)

    def work(_):
        barrier.wait()
        return np.geterr()["over"]

    with np.errstate(over="raise"):
        assert Workers(2).map(work, range(2)) == ["raise", "raise"]


@team.TaskKernel
def count_up(argument, number):
    """Adds one to word `number` of an array of int64, and checks that all of the stage before was done.

    Words: parts of the stage before, address of its words, then one per part.
    """
    head = view(argument, 2, np.int64)
    before = view(head[1], head[0] + 2, np.int64)
    mine = view(argument, number + 3, np.int64)
    for i in range(head[0]):
        if before[i + 2] != mine[number + 2] + 1:
            mine[number + 2] -= 1000
    mine[number + 2] += 1


def counting_program(sizes):
    """A program of stages with so many parts each, and the arrays that it counts in."""
    counts = [np.zeros(size + 2, np.int64) for size in sizes]
    for now, before in zip(counts[1:], counts, strict=False):
        now[:2] = len(before) - 2, before.ctypes.data
    counts[0][1] = counts[0].ctypes.data
    rows = [[stage, count_up.address, c.ctypes.data, len(c) - 2] for stage, c in enumerate(counts)]
    return np.array(rows, np.int64), counts


@pytest.mark.parametrize("threads_used", [1, 2, 4])
def test_programs_do_every_part_once_and_stages_in_order(threads_used):
    workers = Workers(threads_used)
    program, counts = counting_program([7, 1, 300, 2])
    for _ in range(2000):
        team.run(workers.ready(), program)
    assert all((c[2:] == 2000).all() for c in counts)


def test_a_stage_may_have_several_tasks_or_nothing_to_do():
    workers = Workers(2)
    program, counts = counting_program([3, 4, 5])
    program[:, team.STAGE] = 0, 0, 1
    counts[1][0] = counts[2][0] = 0  # nothing to look back at
    nothing = program[:1].copy()
    nothing[0, [team.STAGE, team.PARTS]] = -1, 0
    last = nothing.copy()
    last[0, team.STAGE] = 9
    for p in (np.concatenate([nothing, program, last]), nothing, np.zeros((0, 4), np.int64)):
        team.run(workers.ready(), p)
    assert [c[2:].tolist() for c in counts] == [[1] * 3, [1] * 4, [1] * 5]


def test_programs_from_several_threads_at_once():
    workers = Workers(3)
    failures = []

    def work():
        program, counts = counting_program([5, 9, 2])
        for _ in range(1000):
            team.run(workers.ready(), program)
        if not all((c[2:] == 1000).all() for c in counts):
            failures.append(counts)

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(300)
    assert not failures
    assert not any(caller.is_alive() for caller in callers)


def test_programs_and_python_functions_take_turns():
    workers = Workers(3)
    program, counts = counting_program([6, 6])

    def work(i):
        team.run(workers.ready(), program if i == 0 else np.zeros((0, 4), np.int64))
        if i == 3:
            raise KeyError(i)
        return i

    for _ in range(200):
        team.run(workers.ready(), program)
        with pytest.raises(KeyError):
            workers.map(work, range(4))
    assert all((c[2:] == 400).all() for c in counts)


def test_idle_threads_sleep_and_wake_up():
    workers = Workers(2)
    program, counts = counting_program([50])
    for _ in range(3):
        team.run(workers.ready(), program)
        deadline = time.monotonic() + 120
        assert workers._helpers is not None
        while not workers._helpers.asleep and time.monotonic() < deadline:
            time.sleep(0.001)
        assert workers._helpers.asleep == 1
    assert workers.map(lambda i: i + 1, range(3)) == [1, 2, 3]
    assert (counts[0][2:] == 3).all()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the system says it of processes only")
@pytest.mark.parametrize("count", [1, 3])
def test_what_threads_took_is_read_from_the_clock_of_each(count, monkeypatch):
    """The process's does not know what other threads have taken since the last tick."""
    workers = Workers(count)
    workers.ready()
    monkeypatch.setattr(time, "clock_gettime", lambda clock: 100.0)
    monkeypatch.setattr(time, "thread_time", lambda: 5.0)
    assert workers.processor_seconds() == 5 + 100 * (count - 1)


def test_threads_end_with_their_workers():
    workers = Workers(3)
    workers.ready()
    assert workers._helpers is not None
    helpers = workers._helpers._threads
    assert len(helpers) == 2
    del workers
    gc.collect()
    for helper in helpers:
        helper.join(20)
        assert not helper.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_child_of_a_fork_works_too():
    workers = Workers(2)
    program, counts = counting_program([20])
    team.run(workers.ready(), program)
    pid = os.fork()
    if pid == 0:  # no pytest in here: leave at once, with the result as the exit status
        status = 3
        try:
            team.run(workers.ready(), program)
            good = workers.map(lambda i: i * 2, range(5)) == [0, 2, 4, 6, 8] and bool((counts[0][2:] == 2).all())
            status = 0 if good else 4
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    team.run(workers.ready(), program)
    assert (counts[0][2:] == 2).all()


def test_the_interpreter_ends_while_threads_wait():
    code = (
        "from ggufmill.simd.workers import Workers\n"
        "busy, idle = Workers(3), Workers(2)\n"
        "idle.ready(); busy.ready()\n"
        "busy.map(lambda i: i, range(9))\n"
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
