"""Keys of a GGUF's header that hold values of another kind: verbs work without them, or end in one line."""

import numpy as np
import pytest

from ggufmill.formats import open_gguf
from ggufmill.formats.gguf_header import header_bytes

ODD = (np.arange(2, dtype=np.int32), ["a", "b"], np.float32("nan"), np.int32(-7), np.uint64(2**64 - 1), [])
VERBS = (
    ("quantize", "{}", "out.gguf", "Q4_K_M", "--dry-run", "--no-timing"),
    ("quantize", "{}", "out.gguf", "q8_0", "--dry-run", "--no-timing", "--no-mtp"),
    ("quantize", "{}", "out.gguf", "q8_0", "--dry-run", "--no-timing", "--prune-layers", "0"),
    ("plan", "{}"),
    ("inspect", "{}", "--for", "llama.cpp"),
    ("imatrix", "show", "{}"),
)


@pytest.fixture
def model(recipe_folder, mill, monkeypatch):
    """write(changes of the metadata) -> a GGUF of a small Llama, in the working directory."""
    monkeypatch.chdir(recipe_folder)
    assert mill("convert", "m", "whole.gguf")[0] == 0
    whole = open_gguf(recipe_folder / "whole.gguf")
    entries = [(name, tensor.shape, tensor.type) for name, tensor in whole.tensors.items()]
    content = b"".join(tensor.read(0, tensor.n_rows).tobytes() for tensor in whole.tensors.values())

    def write(changes):
        header, _, size = header_bytes(whole.metadata | changes, entries, 32)
        (recipe_folder / "odd.gguf").write_bytes(header + content.ljust(size - len(header), b"\0"))
        return "odd.gguf"

    return write, [*whole.metadata, "llama.expert_count", "llama.nextn_predict_layers", "llama.attention.sliding_window"]


@pytest.mark.slow(keep=["2-quantize {} out.gguf Q4_K_M --dry-run --no-timing"])
@pytest.mark.parametrize("words", VERBS, ids=lambda words: " ".join(words))
@pytest.mark.parametrize("value", range(len(ODD)))
def test_values_of_another_kind(model, mill, words, value):
    write, keys = model
    for key in keys:
        code, _, err = mill(*(word.format(write({key: ODD[value]})) for word in words))
        assert code in (0, 1), (key, err)
        assert "internal error" not in err, (key, err)
        assert "Traceback" not in err, (key, err)
