import numpy as np
import pytest

from ggufmill.formats import FormatError
from ggufmill.formats.metadata_values import text_of, whole_number


@pytest.mark.parametrize("value", [7, np.uint32(7), np.int8(7), 7.0, np.float32(7)])
def test_whole_numbers_of_any_type(value):
    assert whole_number({"k": value}, "k") == 7
    assert whole_number({}, "k", 3) == 3


@pytest.mark.parametrize(
    "value", [np.arange(2), ["7"], "7", True, np.float32("nan"), np.float64("inf"), 7.5, -1, 2**64 - 1, np.uint64(11)]
)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(FormatError, match=r"m.gguf: metadata key a.k is .*; a whole number from 0 to 10 is needed"):
        whole_number({"a.k": value}, "a.k", maximum=10, path="m.gguf")


@pytest.mark.parametrize("value", [np.arange(2), ["a", "b"], np.float32("nan"), True, 5, b"x", None])
def test_what_is_no_text_is_none(value):
    assert text_of({"k": value}, "k") == ""
    assert text_of({}, "k") == ""
    assert text_of({"k": "a"}, "k") == "a"
