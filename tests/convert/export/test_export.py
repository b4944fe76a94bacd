"""Exporting a GGUF gives a checkpoint: converting it again gives the same file, and transformers computes the same with it."""

import json
import shutil

import numpy as np
import pytest
from checkpoint_cases import file_differences, save_tokenizer
from draft_cases import DRAFT_CASES, convert_draft_case
from model_cases import CASES
from recorded_models import kept_or_oracle, layout_of, record_of

from ggufmill import FormatError, PlanError, convert_model, export_model
from ggufmill.convert import open_source
from ggufmill.convert.export.model_types import model_type
from ggufmill.quantize import gguf_source
from ggufmill.recipes import FOLDER

# The same keys in another order: the checkpoint is given back under a relative's name, or says the width of heads.
OTHER_ORDER = ("granitehybrid-plain", "falcon-h1-odd")


def round_trip(checkpoint, tmp_path, outtype="f32", layout=None, **exported):
    """(result of the export, the GGUF, the one of the exported checkpoint)."""
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    convert_model(checkpoint, first, outtype=outtype, mla_layout=layout)
    (tmp_path / "exported").mkdir()
    folder = tmp_path / "exported" / checkpoint.name  # general.name is the folder's
    result = export_model(first, folder, **exported)
    convert_model(folder, second, outtype=outtype if not exported else "f32", mla_layout=layout)
    return result, first, second


@pytest.mark.slow(
    keep=["llama", "v2-lite", "gpt-oss", "gemma3", "mamba", "gpt2", "falcon-h1", "dbrx", "cohere2moe", "laguna", "step35*"]
)
@pytest.mark.parametrize("case", kept_or_oracle(CASES))
def test_converting_an_exported_checkpoint_gives_the_same_file(tmp_path, case):
    record_of(case).write(tmp_path / "model")
    save_tokenizer(tmp_path / "model" / "tokenizer.json")
    result, first, second = round_trip(tmp_path / "model", tmp_path, layout=layout_of(case))
    assert result.lost == []
    assert file_differences(first, second) == []
    assert first.read_bytes() == second.read_bytes() or case in OTHER_ORDER
    values = json.loads((result.folder / "config.json").read_text())
    assert values["model_type"] == model_type(values["architectures"][0])


@pytest.mark.oracle
@pytest.mark.parametrize("case", DRAFT_CASES)
def test_draft_layers_come_back(tmp_path, case):
    made = convert_draft_case(case, tmp_path / "model")
    result = export_model(made.path, tmp_path / "exported")
    assert result.lost == []
    source = gguf_source(made.path)
    layout = "mainline" if f"{source.architecture}.attention.key_length_mla" in source.metadata else None
    again = open_source(result.folder, mla_layout=layout, mtp=True)
    assert {*again.tensors} == {*source.tensors}
    for name, tensor in source.tensors.items():
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        for start in range(0, tensor.n_rows, rows):
            assert np.array_equal(tensor.read(start, start + rows), again.tensors[name].read(start, start + rows)), name


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    convert_model(FOLDER / "demo", folder / "demo.gguf", outtype="bf16")
    return folder / "demo.gguf"


def test_sixteen_bits_stay_and_norms_are_narrowed_where_that_loses_nothing(demo, tmp_path):
    result = export_model(demo, tmp_path / "demo", max_shard_size="4M")
    assert result.dtype == "bfloat16"
    shards = sorted(path.name for path in result.folder.glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((result.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    convert_model(result.folder, tmp_path / "again.gguf", outtype="bf16")
    assert (tmp_path / "again.gguf").read_bytes() == demo.read_bytes()
    one = export_model(demo, tmp_path / "one", outtype="f32")
    assert one.nbytes == pytest.approx(2 * result.nbytes, rel=0.01)


def test_a_quantised_file_becomes_its_decoded_values(demo, tmp_path):
    from ggufmill import quantize_model

    quantize_model(demo, tmp_path / "q.gguf", "q6_K")
    result = export_model(tmp_path / "q.gguf", tmp_path / "out", outtype="f32")
    convert_model(result.folder, tmp_path / "f.gguf", outtype="f32")
    one, other = (gguf_source(tmp_path / name).tensors for name in ("q.gguf", "f.gguf"))
    assert {*one} == {*other}
    for name, tensor in one.items():
        if name.endswith(("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight")):
            continue  # one tensor of the checkpoint, which the file has twice, each rounded by itself
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        for start in range(0, tensor.n_rows, rows):
            assert np.array_equal(tensor.read(start, start + rows), other[name].read(start, start + rows)), name


def test_what_cannot_be_exported_is_one_line(demo, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(PlanError, match="taken exists; a checkpoint is written to a new folder, or an empty one"):
        export_model(demo, tmp_path / "taken")
    with pytest.raises(PlanError, match="is no GGUF file"):
        export_model(FOLDER / "demo", tmp_path / "out")
    from ggufmill import edit_metadata

    shutil.copy(demo, tmp_path / "strange.gguf")
    edit_metadata(tmp_path / "strange.gguf", set={"deepseek2.expert_feed_forward_length": 300})
    with pytest.raises(
        FormatError, match=r"strange\.gguf: .*tensors have another shape or other values than any config\.json gives"
    ):
        export_model(tmp_path / "strange.gguf", tmp_path / "out")
    shutil.copy(demo, tmp_path / "unknown.gguf")
    edit_metadata(tmp_path / "unknown.gguf", set={"general.architecture": "nobody"})
    with pytest.raises(FormatError, match="no checkpoint is known that becomes a GGUF of nobody"):
        export_model(tmp_path / "unknown.gguf", tmp_path / "out")
    data = bytearray(demo.read_bytes())
    at = data.index(b"blk.1.attn_q_a.weight") + len(b"blk.1.attn_q_a.weight") + 4 + 2 * 8
    data[at : at + 4] = (142).to_bytes(4, "little")
    (tmp_path / "type.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=r"type\.gguf: blk\.1\.attn_q_a\.weight is type-142, which cannot be decoded"):
        export_model(tmp_path / "type.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.part"))


def test_metadata_without_a_place_is_listed(demo, tmp_path):
    from ggufmill import edit_metadata

    shutil.copy(demo, tmp_path / "more.gguf")
    edit_metadata(tmp_path / "more.gguf", set={"deepseek2.own": 3, "general.license": "mit", "general.tags": ["a", "b"]})
    result = export_model(tmp_path / "more.gguf", tmp_path / "out")
    assert result.lost == ["deepseek2.own, which the config.json cannot say"]
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()
