"""Which files of a folder are models, and what they are called."""

import os

import numpy as np
import pytest

from ggufmill.errors import MillError
from ggufmill.quantize import gguf_source
from ggufmill.runtime.serve.model_folder import ModelFolder

pytest.importorskip("starlette")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "models"


def problems(models):
    return {name: bool(model.problem) for name, model in models.items()}


def test_files_shards_and_folders(folder, write_model):
    write_model(folder / "plain.gguf", {"llama.context_length": 4096})
    for i in range(2):
        keys = {"split.no": i, "split.count": 2}
        write_model(folder / f"split-{i + 1:05d}-of-00002.gguf", keys, tensors=0 if i else 1)
    write_model(folder / "alone" / "anything.gguf")
    write_model(folder / "alone" / "mmproj-F16.gguf")
    write_model(folder / "several" / "q4.gguf")
    write_model(folder / "several" / "q8.gguf")
    write_model(folder / "plain" / "q4.gguf")  # a folder of a file's name
    models = ModelFolder(folder).models()
    assert problems(models) == dict.fromkeys(["plain", "split", "alone", "plain/q4", "several/q4", "several/q8"], False)
    assert (models["plain"].n_ctx, models["plain"].architecture, models["split"].n_ctx) == (4096, "llama", 0)
    assert models["split"].path.name == "split-00001-of-00002.gguf"
    assert models["split"].nbytes == sum(path.stat().st_size for path in folder.glob("split*"))
    assert models["alone"].aliases == ("alone/anything.gguf", "alone/anything")
    assert models["plain"].aliases == ("plain.gguf",)
    gguf_source(models["split"].path)  # is whole


def test_one_model_in_one_file_and_in_shards_has_two_names(folder, write_model):
    write_model(folder / "m.gguf")
    write_model(folder / "m-00001-of-00001.gguf")
    assert list(ModelFolder(folder).models()) == ["m-of-00001", "m"]


def test_what_is_no_model(folder, write_model):
    write_model(folder / "model.gguf")
    write_model(folder / "mmproj-model.gguf")
    write_model(folder / "vision.gguf", {"general.type": "mmproj"}, architecture="clip")
    write_model(folder / "old-vision.gguf", architecture="clip")
    write_model(folder / "adapter.gguf", {"general.type": "adapter"})
    write_model(folder / "matrix.gguf", {"general.type": "imatrix"})
    write_model(folder / "vector.gguf", architecture="controlvector")
    write_model(folder / "vocabulary.gguf", tensors=0)
    write_model(folder / ".partial.gguf")
    (folder / "notes.txt").write_text("x")
    (folder / "folder.gguf").mkdir()
    assert list(ModelFolder(folder).models()) == ["model"]


def test_what_is_damaged_says_so_and_leaves_the_rest(folder, write_model):
    write_model(folder / "good.gguf")
    whole = (folder / "good.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[:100])
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "other.gguf").write_bytes(b"not a model" * 100)
    (folder / "half-00002-of-00003.gguf").write_bytes(whole)
    write_model(folder / "odd.gguf", {"llama.context_length": "long"})
    (folder / "dangling.gguf").symlink_to(folder / "nowhere")
    models = ModelFolder(folder).models()
    bad = dict.fromkeys(["cut", "empty", "other", "half", "odd"], True)
    assert problems(models) == {"good": False, **bad}
    assert "shards are missing" in models["half"].problem
    with pytest.raises(MillError, match="cannot be listed"):
        ModelFolder(folder / "nowhere").models()


def test_only_what_has_changed_is_read_again(folder, write_model, monkeypatch):
    write_model(folder / "a.gguf")
    write_model(folder / "b.gguf")
    known = ModelFolder(folder)
    before = known.models()
    opened = []
    original = __import__("ggufmill.runtime.serve.model_folder", fromlist=["x"]).open_gguf
    monkeypatch.setattr(
        "ggufmill.runtime.serve.model_folder.open_gguf", lambda path: (opened.append(path.name), original(path))[1]
    )
    assert known.models() == before
    assert opened == []
    write_model(folder / "b.gguf", {"llama.context_length": 8192})
    os.utime(folder / "b.gguf", ns=(1, 1))
    assert not known.is_current(before["b"])
    after = known.models()
    assert opened == ["b.gguf"]
    assert (after["a"], after["b"].n_ctx) == (before["a"], 8192)
    (folder / "a.gguf").unlink()
    assert not known.is_current(before["a"])
    assert list(known.models()) == ["b"]
    assert np.isfinite(after["b"].changed)
