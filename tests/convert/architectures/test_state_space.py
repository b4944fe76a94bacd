"""Steps of Mamba-2 that a configuration limits, which no GGUF can say."""

from pathlib import Path

import pytest

from ggufmill.convert.architectures.recurrent.state_space import Mamba2
from ggufmill.convert.config import Config
from ggufmill.formats import FormatError

SIZES = {"width": 8, "heads": 4, "groups": 2, "size": 16, "kernel": 4}


def sizes(limit):
    config = Config(Path("config.json"), SIZES | {"time_step_limit": limit})
    return Mamba2.of(config, {name: name for name in SIZES}, 32)


@pytest.mark.parametrize("infinity", [float("inf"), 1e308, 10**40, "Infinity"])
def test_infinity_limits_nothing(infinity):
    """1e308, which Nemotron 3 Ultra has, is infinite as float32."""
    assert sizes([0.0, infinity]) == sizes(None)


@pytest.mark.parametrize("limit", [[0.0, 0.1], [0.001, 1e308], [0.0], [0.0, 3e38], 5])
def test_limited_steps_are_refused(limit):
    with pytest.raises(FormatError, match="limited steps cannot be converted"):
        sizes(limit)
