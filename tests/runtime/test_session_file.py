import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ggufmill.formats import MillError
from ggufmill.runtime import load_model
from ggufmill.runtime.session_file import is_saved_session, restore_session, save_session

PROMPT = list(range(10, 60))


@pytest.fixture
def saved(tiny, tmp_path):
    session = load_model(tiny, n_ctx=128).session()
    session.feed(PROMPT)
    assert save_session(session, tmp_path / "a.bin") == (tmp_path / "a.bin").stat().st_size
    return tmp_path / "a.bin", session.feed([7])


def test_a_restored_session_goes_on_with_the_same_logits(tiny, saved):
    path, expected = saved
    session = load_model(tiny, n_ctx=128).session()
    restore_session(session, path)
    assert session.tokens == PROMPT
    np.testing.assert_array_equal(session.feed([7]), expected)


def test_what_a_session_held_before_is_gone(tiny, saved):
    path, expected = saved
    session = load_model(tiny, n_ctx=128).session()
    session.feed(list(range(100, 200)))
    restore_session(session, path)
    np.testing.assert_array_equal(session.feed([7]), expected)


def test_wrong_files_change_nothing(tiny, saved, tmp_path):
    path, _ = saved
    model = load_model(tiny, n_ctx=128)
    session = model.session()
    session.feed([3, 4])
    damaged, cut, other = tmp_path / "b.bin", tmp_path / "c.bin", tmp_path / "d.bin"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    cut.write_bytes(data[:-100])
    other.write_bytes(b"anything")
    for wrong, message in (
        (damaged, "damaged"),
        (cut, "cannot be read"),
        (other, "cannot be read"),
        (tmp_path / "e", "No such"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(MillError, match=message):
            restore_session(session, wrong)
        assert session.tokens == [3, 4]
    tensors = {name: tensor for name, tensor in tiny.tensors.items() if name != "output.weight"}
    with pytest.raises(MillError, match="another model"):
        restore_session(load_model(dataclasses.replace(tiny, tensors=tensors), n_ctx=128).session(), path)
    with pytest.raises(MillError, match="other types"):
        restore_session(load_model(tiny, n_ctx=128, cache_k="f32").session(), path)
    with pytest.raises(MillError, match="other types or another rotation"):
        restore_session(load_model(tiny, n_ctx=128, cache_k="bf16").session(), path)  # rows of the same size
    with pytest.raises(MillError, match="50 tokens"):
        restore_session(load_model(tiny, n_ctx=32).session(), path)


def test_a_session_with_another_rotation_is_refused(tiny, saved, tmp_path):
    plain, _ = saved
    rotating = load_model(tiny, n_ctx=128, k_cache_hadamard=True)
    session = rotating.session()
    with pytest.raises(MillError, match="another rotation"):
        restore_session(session, plain)
    session.feed(PROMPT)
    save_session(session, tmp_path / "rotated.bin")
    with pytest.raises(MillError, match="another rotation"):
        restore_session(load_model(tiny, n_ctx=128).session(), tmp_path / "rotated.bin")
    expected, again = session.feed([7]), rotating.session()
    restore_session(again, tmp_path / "rotated.bin")
    np.testing.assert_array_equal(again.feed([7]), expected)


def test_files_of_earlier_versions(tiny, saved, tmp_path):
    """They say nothing of the cache, and are not rotated."""
    path, expected = saved
    with safe_open(path, "np") as file:
        metadata = file.metadata() | {"format": "ggufmill session 1"}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    del metadata["cache"]
    save_file(arrays, tmp_path / "old.bin", metadata)
    assert is_saved_session(tmp_path / "old.bin")
    session = load_model(tiny, n_ctx=128).session()
    restore_session(session, tmp_path / "old.bin")
    np.testing.assert_array_equal(session.feed([7]), expected)
    with pytest.raises(MillError, match="another rotation"):
        restore_session(load_model(tiny, n_ctx=128, v_cache_hadamard=True).session(), tmp_path / "old.bin")
