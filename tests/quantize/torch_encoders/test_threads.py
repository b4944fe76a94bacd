"""Threads that do pieces of rows for a GPU; none of what they call needs one."""

from threading import Lock
from time import sleep

import pytest

from ggufmill.errors import MillError
from ggufmill.jobs.steps import begin_step, hearing

torch = pytest.importorskip("torch")
from ggufmill.quantize.torch_encoders.threads import share_rows  # noqa: E402

pytestmark = pytest.mark.oracle


def test_all_rows_are_done_once():
    done = []
    share_rows(lambda first, stop, most: done.append((first, stop)), 103, 10, "try", "cpu", group=4)
    assert [row for first, stop in sorted(done) for row in range(first, stop)] == list(range(103))
    assert all(first % 4 == 0 for first, _ in done)


def test_what_lacks_memory_beside_others_is_done_alone():
    done, busy, most, lock = [], 0, [], Lock()

    def work(first, stop, capacity):
        nonlocal busy
        with lock:
            busy += 1
            most.append(busy)
            alone = busy == 1
        sleep(0.01)
        with lock:
            busy -= 1
            if alone:
                done.append((first, stop))
        if not alone:
            raise torch.OutOfMemoryError("out of memory")

    freed = []
    share_rows(work, 40, 4, "try", "cpu", free=lambda: freed.append(1))
    assert [row for first, stop in sorted(done) for row in range(first, stop)] == list(range(40))
    assert len(freed) == sum(n > 1 for n in most)


def test_a_row_that_is_too_much_ends_with_one_line():
    def work(first, stop, capacity):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(MillError, match="^cpu has too little memory to try, even for one row"):
        share_rows(work, 8, 2, "try", "cpu")


def test_errors_and_steps_reach_whoever_waits(monkeypatch):
    monkeypatch.setattr("ggufmill.jobs.steps._EVERY", 0.0)
    heard = []
    with hearing(heard.append):
        share_rows(lambda first, stop, most: begin_step(f"sweep of {first}"), 4, 2, "try", "cpu")
    assert sorted(heard) == ["sweep of 0", "sweep of 2"]

    def fail(first, stop, capacity):
        raise ValueError("no memory is lacking")

    with pytest.raises(ValueError, match="no memory is lacking"):
        share_rows(fail, 4, 2, "try", "cpu")
