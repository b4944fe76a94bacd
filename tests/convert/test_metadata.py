"""Sampling settings of a checkpoint, against what the `gguf` package takes from the same file."""

import json
import re

import gguf
import numpy as np
import pytest

from ggufmill.convert import open_source

SETTINGS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "penalty_last_n": 64, "penalty_repeat": 1.05}
SETTINGS |= {
    "mirostat": 2,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "sequence": "kpt",
}


@pytest.fixture
def sampling(tmp_path, write_checkpoint, tiny_llama):
    """generation_config.json -> (the general.sampling.* keys, notes)."""

    def read(text):
        folder = write_checkpoint(tmp_path / "model", *tiny_llama())
        (folder / "generation_config.json").write_text(text)
        source = open_source(folder)
        return {k: v for k, v in source.metadata.items() if k.startswith("general.sampling.")}, source.notes

    return read


def test_sampling_settings_are_those_of_the_gguf_package(sampling, tmp_path):
    keys, _ = sampling(json.dumps(SETTINGS | {"do_sample": True, "eos_token_id": [1, 2]}))
    metadata = gguf.Metadata.load(None, tmp_path / "model", None, 0)
    writer = gguf.GGUFWriter(None, "llama")
    metadata.set_gguf_meta_model(writer)
    types = {gguf.GGUFValueType.INT32: np.int32, gguf.GGUFValueType.FLOAT32: np.float32, gguf.GGUFValueType.STRING: str}
    theirs = {k: types[v.type](v.value) for k, v in writer.kv_data[0].items() if k.startswith("general.sampling.")}
    assert keys == theirs
    assert {k: type(v) for k, v in keys.items()} == {k: type(v) for k, v in theirs.items()}
    assert len(keys) == len(SETTINGS)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("{", "not JSON"),
        ('{"top_k": 2.5}', "top_k is 2.5, which general.sampling.top_k cannot hold"),
        ('{"top_k": true}', "top_k is True"),
        ('{"temperature": "warm"}', "temperature is 'warm'"),
        ('{"temperature": 1e300}', "temperature is 1e[+]300"),
        ('{"top_p": NaN}', "top_p is nan"),
        ('{"sequence": 3}', "sequence is 3"),
    ],
)
def test_sampling_settings_that_cannot_be_used_are_noted(sampling, text, note):
    keys, notes = sampling(text)
    assert keys == {}
    assert [n for n in notes if re.search(note, n)]


def test_a_change_of_the_settings_changes_the_identity(sampling, tmp_path):
    sampling('{"top_k": 20}')
    before = open_source(tmp_path / "model").identity
    sampling('{"top_k": 200}')
    assert open_source(tmp_path / "model").identity != before
