"""Draft layers of a checkpoint that the architecture does not know are left out with a note, and hide no relative."""

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import FormatError

PREFIXES = ["mtp.", "model.mtp.layers.0.", "model.mtp_layers.0.", "model.mtp_block.0.", "mtp_block.", "model.layers.7."]


def with_drafts(prefix, tensors):
    names = ("self_attn.q_proj", "eh_proj", "enorm", "input_proj")
    return tensors | {f"{prefix}{name}.weight": np.ones((4, 8), np.float32) for name in names}


@pytest.mark.parametrize("mtp", [None, False])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_unknown_draft_layers_are_left_out(write_checkpoint, tmp_path, tiny_llama, prefix, mtp):
    config, tensors = tiny_llama()
    plain = open_source(write_checkpoint(tmp_path / "model", config, tensors))
    source = open_source(write_checkpoint(tmp_path / "model", config, with_drafts(prefix, tensors)), mtp=mtp)
    assert list(source.tensors) == list(plain.tensors)
    assert repr(source.metadata) == repr(plain.metadata)
    (note,) = [note for note in source.notes if note not in plain.notes]
    assert note.startswith("multi-token prediction, which has no names in a GGUF of this architecture: 4 tensors left out (")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_relatives_are_found_behind_unknown_draft_layers(write_checkpoint, tmp_path, tiny_llama, prefix):
    config, tensors = tiny_llama(architectures=["NewForCausalLM"])
    folder = write_checkpoint(tmp_path / "new", config, with_drafts(prefix, tensors))
    with pytest.raises(FormatError, match=r"the nearest by its tensors: LlamaForCausalLM \(all its tensors\)"):
        open_source(folder)
    assert open_source(folder, architecture="LlamaForCausalLM").tensors


def test_parts_of_a_draft_in_a_layer_of_the_model_are_refused(write_checkpoint, tmp_path, tiny_llama):
    config, tensors = tiny_llama()
    with pytest.raises(FormatError, match="tensors are unknown to this architecture: model.layers.1.eh_proj.weight"):
        open_source(write_checkpoint(tmp_path / "odd", config, with_drafts("model.layers.1.", tensors)))
