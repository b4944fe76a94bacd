"""general.sampling.* of a file stands for what was not asked for, as in llama.cpp."""

import dataclasses

import numpy as np
import pytest

from ggufmill.convert.metadata import SAMPLING
from ggufmill.runtime import Sampling
from ggufmill.runtime.generation.recommended import KEYS, recommended_sampling

VALUES = {
    "sequence": ("top_k;temperature", ("top_k", "temperature")),
    "top_k": (np.int32(20), 20),
    "top_p": (np.float32(0.8), 0.8),
    "min_p": (np.float32(0.01), 0.01),
    "xtc_probability": (np.float32(0.5), 0.5),
    "xtc_threshold": (np.float32(0.2), 0.2),
    "temp": (np.float32(0.6), 0.6),
    "penalty_last_n": (np.int32(-1), -1),
    "penalty_repeat": (np.float32(1.05), 1.05),
    "mirostat": (np.int32(2), 2),
    "mirostat_tau": (np.float32(4.0), 4.0),
    "mirostat_eta": (np.float32(0.2), 0.2),
}


def test_all_keys_that_are_written_are_read():
    assert KEYS.keys() == VALUES.keys() == {key for key, _ in SAMPLING.values()}
    for key, (stored, expected) in VALUES.items():
        assert recommended_sampling({f"general.sampling.{key}": stored}) == {KEYS[key]: expected}, key
    both = {f"general.sampling.{key}": stored for key, (stored, _) in VALUES.items()}
    assert recommended_sampling(both) == {KEYS[key]: expected for key, (_, expected) in VALUES.items()}
    assert recommended_sampling({"general.name": "x"}) == {}


def test_llama_cpp_takes_any_top_k_below_one_for_all():
    assert recommended_sampling({"general.sampling.top_k": np.int32(-1)}) == {"top_k": 0}


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        ("temp", "hot"),
        ("temp", np.float32("nan")),
        ("temp", np.float32(-1)),
        ("temp", True),
        ("temp", np.ones(3, np.float32)),
        ("temp", ["0.5"]),
        ("top_p", np.float32(0)),
        ("top_k", np.float32(2.5)),
        ("top_k", np.float32("inf")),
        ("mirostat", np.int32(7)),
        ("penalty_repeat", np.float32(0)),
        ("sequence", "nucleus;nonsense"),
        ("sequence", ""),
        ("sequence", np.int32(5)),
        ("sequence", ["top_k"]),
    ],
)
def test_values_that_sampling_cannot_work_with_are_passed_over(key, stored):
    assert recommended_sampling({f"general.sampling.{key}": stored}) == {}


def test_fields_have_defaults_of_their_own():
    """A field that the file does not set keeps the default that `Sampling` has."""
    made = Sampling(**recommended_sampling({"general.sampling.temp": np.float32(0.6)}))
    assert made == dataclasses.replace(Sampling(), temp=0.6)
