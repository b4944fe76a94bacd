"""How sequences are divided into passes."""

import pytest

from ggufmill.runtime.backends import last_rows
from ggufmill.runtime.micro_batches import divide_passes, wanted_rows


def passes(lengths, ubatch, piece):
    return list(divide_passes(lengths, ubatch, piece))


def test_as_many_tokens_as_there_is_room_for():
    assert passes([5, 3], 4, 1) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]
    assert passes([5, 3], 100, 1) == [[(0, 0, 5), (1, 0, 3)]]


def test_whole_sequences():
    assert passes([5, 3, 1], 4, None) == [[(0, 0, 5)], [(1, 0, 3), (2, 0, 1)]]
    assert passes([3, 9, 1], 4, None) == [[(0, 0, 3), (2, 0, 1)], [(1, 0, 9)]]


@pytest.mark.parametrize("ubatch", [1, 3, 4, 7, 8, 9, 100])
def test_pieces_are_the_same_whatever_a_pass_takes(ubatch):
    made = passes([10, 10, 10], ubatch, 4)
    assert [part for parts in made for part in parts] == [
        (i, start, min(start + 4, 10)) for i in range(3) for start in (0, 4, 8)
    ]
    for parts in made:
        assert len({i for i, _, _ in parts}) == len(parts)  # none twice
        assert len(parts) == 1 or sum(stop - start for _, start, stop in parts) <= ubatch
    assert any(len(parts) > 1 for parts in made) == (ubatch >= 6)


def test_rows_that_are_wanted_of_each_pass():
    parts = [[(0, 4), (1, 2)], [(0, 3), (2, 5)]]
    assert wanted_rows(parts, [7, 2, 5], [None, None, None]) == [[4, 2], [3, 5]]
    assert wanted_rows(parts, [7, 2, 5], [1, 1, 9]) == [[0, 1], [1, 5]]
    assert wanted_rows(parts, [7, 2, 5], [5, None, 0]) == [[2, 2], [3, 0]]


def test_places_of_wanted_rows():
    assert last_rows([4, 2], None) is None
    assert last_rows([4, 2], [4, 3]) is None
    rows = last_rows([4, 2, 3], [1, 2, 0])
    assert rows is not None
    assert rows.tolist() == [3, 4, 5]
