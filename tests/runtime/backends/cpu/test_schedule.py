"""Stages from what tasks read and write: what may run side by side does, nothing runs too early, small tasks are chained."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.runtime.backends.cpu.kernels import row_kernels
from ggufmill.runtime.backends.cpu.memory import Partition, Pool, dense
from ggufmill.runtime.backends.cpu.schedule import Schedule, run
from ggufmill.simd.workers import Workers

ROWS, WIDTH = 24, 16


def add(schedule, partition, a, b, out):

    return schedule.task(row_kernels.add, partition, a=a, b=b, out=out, factor=0.5)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 3]))
def test_any_order_of_tasks_gives_the_same_as_one_after_the_other(data, threads):
    pool, schedule = Pool(), Schedule()
    views = [dense(pool.take(4 * ROWS * WIDTH), ROWS, 1, WIDTH) for _ in range(4)]
    for i, view in enumerate(views):
        view.matrix[:] = np.random.default_rng(i).standard_normal((ROWS, WIDTH))
    expected = [view.matrix.copy() for view in views]
    for _ in range(data.draw(st.integers(1, 25))):
        a, b, out = (data.draw(st.integers(0, 3)) for _ in range(3))
        first, width = data.draw(st.sampled_from([(0, WIDTH), (0, 8), (8, 8)]))
        step = data.draw(st.sampled_from([1, 5, ROWS]))
        columns = slice(first, first + width)
        parts = Partition("tokens", ROWS, step, width, width)
        add(schedule, parts, *(views[i].columns(first, width) for i in (a, b, out)))
        expected[out][:, columns] = expected[a][:, columns] + np.float32(0.5) * expected[b][:, columns]
        if data.draw(st.integers(0, 9)) == 0:
            schedule.call(lambda: None)
    run(schedule.finish(), Workers(threads))
    for view, values in zip(views, expected, strict=True):
        assert np.array_equal(view.matrix, values)


def test_stages():
    pool, schedule = Pool(), Schedule()
    a, b, c, d = (dense(pool.take(4 * ROWS * WIDTH), ROWS, 1, WIDTH) for _ in range(4))
    rows, others = Partition("tokens", ROWS, 8, WIDTH, WIDTH), Partition("tokens", ROWS, 4, WIDTH, WIDTH)
    first, beside = add(schedule, rows, a, a, b), add(schedule, others, a, a, c)
    chained = add(schedule, rows, b, b, b)
    joined = add(schedule, rows, b, c, d)
    (program,) = schedule.finish()
    assert chained is first  # the same rows on the same thread
    assert program[[first.row, beside.row, joined.row], 0].tolist() == [0, 0, 1]
    assert program[:, 3].tolist() == [3, 6, 3]


def test_memory_that_is_used_again_for_other_rows_waits():
    pool, schedule = Pool(), Schedule()
    a, b = (dense(pool.take(4 * ROWS * WIDTH), ROWS, 1, WIDTH) for _ in range(2))
    rows = Partition("tokens", ROWS, 8, WIDTH, WIDTH)
    first = add(schedule, rows, a, a, b)
    pool.give_back(a.block)
    again = dense(pool.take(4 * ROWS * WIDTH), ROWS, 1, WIDTH)
    assert again.block is a.block
    second = add(schedule, rows, b, b, again)  # another part may still read what lay there
    schedule.finish()
    assert second is not first
    assert second.level == first.level + 1


def test_a_program_after_a_function_wakes_the_threads(monkeypatch):
    """While a Python function runs, helpers fall asleep: each program has to wake them."""
    workers, woken = Workers(2), []
    monkeypatch.setattr(Workers, "ready", lambda self: woken.append(self) or 0)
    program = np.zeros((0, 4), np.int64)
    run([program, lambda: None, program], workers)
    assert len(woken) == 2
