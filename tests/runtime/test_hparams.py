import numpy as np
import pytest

from ggufmill.formats import FormatError
from ggufmill.runtime.hparams import HParams, n_layers


def hparams(**keys):
    return HParams({"general.architecture": "x"} | {f"x.{key}": value for key, value in keys.items()}, "tiny.gguf")


def test_flags_per_layer():
    assert hparams().flags("pattern", 3) is None
    assert hparams(pattern=2).flags("pattern", 5) == [True, False, True, False, True]
    assert hparams(pattern=0).flags("pattern", 2) == [True, True]
    assert hparams(pattern=np.array([1, 0, 1], bool)).flags("pattern", 2) == [True, False]
    with pytest.raises(FormatError, match=r"x\.pattern has 2 values, not 3"):
        hparams(pattern=[True, False]).flags("pattern", 3)


def test_keys_that_a_file_may_lack():
    assert hparams(a=1).with_defaults({"a": 2, "b": 3}).int("a") == 1
    assert hparams(a=1).with_defaults({"a": 2, "b": 3}).int("b") == 3


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda h: h.int("absent"), "metadata key x.absent is missing"),
        (lambda h: h.int("list"), "metadata key x.list is no single number"),
        (lambda h: h.size("zero"), "metadata key x.zero is 0, not 1 to 2147483648"),
        (lambda h: h.size("two", maximum=1), "metadata key x.two is 2, not 1 to 1"),
        (lambda h: h.float("nan"), "metadata key x.nan is nan"),
        (lambda h: h.flag("list"), "metadata key x.list is [1, 2], not true or false"),
        (lambda h: h.positive("zero"), "metadata key x.zero is 0.0; it has to be above 0"),
    ],
)
def test_values_that_cannot_be_are_named(read, message):
    with pytest.raises(FormatError) as error:
        read(hparams(list=[1, 2], zero=0, two=2, nan=float("nan")))
    assert str(error.value) == f"tiny.gguf: {message}"


def test_layers_that_predict_several_tokens_are_not_counted():
    assert n_layers(hparams(block_count=5)) == 5
    assert n_layers(hparams(block_count=5, nextn_predict_layers=1)) == 4
    with pytest.raises(FormatError, match="nextn_predict_layers is 5, not 0 to 4"):
        n_layers(hparams(block_count=5, nextn_predict_layers=5))
