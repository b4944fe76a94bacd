import threading
import time

import numpy as np
import pytest

from ggufmill.runtime import threads
from ggufmill.runtime.threads import Workers, cores, one_blas_thread


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_order(count):
    workers = Workers(count)
    assert workers.map(lambda i: i * i, range(50)) == [i * i for i in range(50)]
    assert workers.map(lambda i: i, []) == []


def test_several_threads_work():
    barrier = threading.Barrier(3, timeout=10)
    Workers(3).map(lambda _: barrier.wait(), range(3))  # passes only when three are in it at once


def test_little_work_stays_where_it_is():
    here = threading.get_ident()
    assert Workers(3).map(lambda _: threading.get_ident(), range(50), multiplications=1000) == [here] * 50


def test_an_exception_is_raised_again():
    def work(i):
        if i == 5:
            raise ValueError("five")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="five"):
        Workers(2).map(work, range(10))


def test_it_may_be_used_within_itself():
    workers = Workers(2)
    sums = workers.map(lambda i: sum(workers.map(lambda j: i * j, range(20))), range(20))
    assert sums == [i * 190 for i in range(20)]


def test_numpy_error_settings_reach_the_threads():
    barrier = threading.Barrier(2, timeout=10)

    def work(_):
        barrier.wait()
        return np.geterr()["over"]

    with np.errstate(over="raise"):
        assert Workers(2).map(work, range(2)) == ["raise", "raise"]


def test_blas_threads_are_put_back():
    control = threads._blas_control()
    if control is None:
        pytest.skip("numpy's BLAS is not an OpenBLAS that can be found")
    get, put = control
    before = get()
    try:
        put(cores())
        with one_blas_thread():
            assert get() == 1
            with one_blas_thread():
                assert get() == 1
            assert get() == 1
        assert get() == cores()
    finally:
        put(before)
