import json
import os

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import FormatError
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.jobs.preflight import preflight


@pytest.fixture
def tiny(tmp_path, write_checkpoint, tiny_llama):
    """write(changes of config.json, changes of tensors; None removes one) -> folder of a tiny Llama."""

    def write(changes=None, tensor_changes=None, shards=1):
        config, tensors = tiny_llama()
        tensors = {n: a for n, a in (tensors | (tensor_changes or {})).items() if a is not None}
        return write_checkpoint(tmp_path / "tiny", config | (changes or {}), tensors, shards, vocab=False)

    return write


def test_missing_tensors_are_named(tiny):
    removed = {f"model.layers.1.mlp.{p}_proj.weight": None for p in ("gate", "up", "down")} | {"lm_head.weight": None}
    with pytest.raises(FormatError) as error:
        open_source(tiny(tensor_changes=removed))
    names = "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight, model.layers.1.mlp.down_proj.weight"
    assert f"4 tensors are missing: {names} and 1 more" in str(error.value)


def test_unknown_tensors_are_named(tiny):
    extra = {"model.layers.0.self_attn.sinks": np.zeros(4, np.float32), "model.layers.2.mlp.up_proj.weight": np.zeros((2, 2))}
    with pytest.raises(FormatError, match=r"2 tensors are unknown to this architecture: model.layers.0.self_attn.sinks, model"):
        open_source(tiny(tensor_changes=extra))
    with pytest.raises(FormatError, match=r"1 tensors are unknown to this architecture: lm_head.weight_scale$"):
        open_source(tiny(tensor_changes={"lm_head.weight_scale": np.zeros(1, np.float32)}))


def test_biases_of_zeros_are_left_out(tiny):
    """Some published files have one for every layer of a model without biases (Command R7B)."""
    names = ("model.layers.0.input_layernorm", "model.layers.1.mlp.up_proj")
    zeros = {f"{name}.bias": np.zeros(64, np.float32) for name in names}
    assert list(open_source(tiny(tensor_changes=zeros)).tensors) == list(open_source(tiny()).tensors)
    with pytest.raises(FormatError, match=r"1 tensors are unknown to this architecture: model.layers.1.mlp.up_proj.bias"):
        open_source(tiny(tensor_changes=zeros | {f"{names[1]}.bias": np.full(64, 1e-9, np.float32)}))


def test_shapes_are_checked(tiny):
    with pytest.raises(FormatError, match=r"model.embed_tokens.weight is \[41, 32\], not \[40, 32\]"):
        open_source(tiny(tensor_changes={"model.embed_tokens.weight": np.zeros((41, 32), np.float32)}))
    with pytest.raises(FormatError, match=r"model.norm.weight is \[32, 1\], not \[32\]"):
        open_source(tiny(tensor_changes={"model.norm.weight": np.zeros((32, 1), np.float32)}))


def test_types_and_scales_are_checked(tiny, write_checkpoint, tiny_deepseek):
    with pytest.raises(FormatError, match=r"lm_head.weight is I8"):
        open_source(tiny(tensor_changes={"lm_head.weight": np.zeros((40, 32), np.int8)}))
    config, tensors = tiny_deepseek((16, 16))
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    folder = tiny()
    with pytest.raises(FormatError, match=rf"{name} of shape \[3, 3\] does not fit a weight of 40 x 64"):
        open_source(write_checkpoint(folder, config, tensors | {name: np.zeros((3, 3), np.float32)}))
    del tensors[name]
    with pytest.raises(FormatError, match=r"experts.3.up_proj.weight is F8_E4M3 without a weight_scale_inv"):
        open_source(write_checkpoint(folder, config, tensors))


def test_tables_and_activation_scales_are_ignored(tiny):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "model.layers.0.self_attn.k_proj.k_scale": np.zeros(1, np.float32),
        "model.layers.0.mlp.up_proj.input_scale": np.zeros(1, np.float32),
    }
    source = open_source(tiny(tensor_changes=extra))
    assert len(source.tensors) == 21
    assert not any("left out" in note for note in source.notes)


def test_unknown_architectures(tiny):
    with pytest.raises(
        FormatError, match=r"unsupported architecture OPTForCausalLM; the nearest .* docs/adding/architecture.md"
    ):
        open_source(tiny({"architectures": ["OPTForCausalLM"]}))
    for wrong in (None, [], "LlamaForCausalLM", [3], 5, {"a": 1}, [["LlamaForCausalLM"]], [None], True):
        with pytest.raises(FormatError, match=r"config.json: (the|no) architecture .*docs/adding/architecture.md"):
            open_source(tiny({"architectures": wrong}))


def test_damaged_folders(tiny, tmp_path):
    folder = tiny(shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(
        FormatError, match=r"model-00002-of-00002.safetensors: the file is 7 bytes shorter than its header says"
    ):
        open_source(folder)
    shard.unlink()
    with pytest.raises(FormatError, match=r"1 of 2 shards are missing, the first is model-00002-of-00002.safetensors"):
        open_source(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(FormatError, match=r"'../x.safetensors' is not the name of a shard in this folder"):
        open_source(folder)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "not a JSON object")])
def test_damaged_configs(tiny, text, message):
    folder = tiny()
    (folder / "config.json").write_text(text)
    with pytest.raises(FormatError, match=f"config.json: {message}"):
        open_source(folder)


def test_a_folder_without_config(tiny):
    folder = tiny()
    (folder / "config.json").unlink()
    with pytest.raises(FormatError, match=r"is no checkpoint: it has no config\.json"):
        open_source(folder)


@pytest.mark.parametrize("text", ['{"_name_or_path": "a\\ud800b"}', '{"a": ["\\udcff"]}', '{"\\uDFFF": 1}'])
def test_lone_surrogates_in_json(tiny, text):
    folder = tiny()
    (folder / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config.json: not Unicode text: half a character at the end of .*\\ud[8-f]"):
        open_source(folder)
    (folder / "config.json").write_text('{"whole": "\\ud83d\\ude00"}')
    with pytest.raises(FormatError, match=r"no architecture is named"):
        open_source(folder)


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(FormatError, match=r"nowhere does not exist"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(FormatError, match=r"is neither a checkpoint folder nor a .gguf file"):
        open_source(tmp_path / "a.bin")
    (tmp_path / "a.gguf").write_bytes(b"no")
    with pytest.raises(FormatError, match=r"too few for a GGUF file"):
        open_source(str(tmp_path / "a.gguf"))


def test_identity(tiny):
    folder = tiny(shards=2)
    first = open_source(folder).identity
    assert open_source(folder).identity == first
    assert open_source(tiny({"rms_norm_eps": 1e-6}, shards=2)).identity != first
    assert open_source(tiny(shards=3)).identity != first
    half = {"lm_head.weight": np.zeros((40, 32), np.float16)}
    assert open_source(tiny(tensor_changes=half, shards=2)).identity != first


def test_identity_changes_with_any_file(tiny):
    """Other weights with the same names, dtypes and shapes are recognised by size and modification time of the files."""
    folder = tiny(shards=2)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "README.md").write_text("not a part of the model")
    identities = {open_source(folder).identity}
    os.utime(folder / "README.md", ns=(1, 1))
    assert open_source(folder).identity in identities
    files = open_source(folder).files
    assert len(files) == 7
    for file in files:
        os.utime(file, ns=(1, 1))
        identities.add(open_source(folder).identity)
        os.utime(file, ns=(1, 2))
        identities.add(open_source(folder).identity)
    assert len(identities) == 1 + 2 * len(files)


def test_files_and_general_name(tiny, tmp_path):
    folder = tiny(shards=2)
    assert {p.name for p in open_source(folder).files} == {p.name for p in folder.iterdir()}
    tokenizer_files = {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "tokenizer.model",
    }
    for name in tokenizer_files:
        (folder / name).write_text("{}")
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordPiece", "vocab": {}}}')
    assert tokenizer_files <= {p.name for p in open_source(folder).files}
    for name in tokenizer_files:
        (folder / name).unlink()
    cache = tmp_path / "hub" / "models--someone--Some-Model-7B" / "snapshots" / "abc123"
    cache.parent.mkdir(parents=True)
    folder.rename(cache)
    assert open_source(cache).metadata["general.name"] == "Some-Model-7B"


def test_a_gguf_of_the_same_tensors(tiny, tmp_path):
    source = open_source(tiny())
    outputs = [Output(t.name, t.shape, t.source_type, t.stored, "kept", t.raw) for t in source.tensors.values()]
    plan = make_plan(outputs, source.metadata, tmp_path / "out.gguf")
    preflight(plan)
    execute(plan, threads=1)
    gguf = open_source(tmp_path / "out.gguf")
    assert list(gguf.tensors) == list(source.tensors)
    assert gguf.metadata == source.metadata
    for name in ("token_embd.weight", "blk.1.attn_q.weight", "output_norm.weight"):
        a, b = source.tensors[name], gguf.tensors[name]
        assert np.array_equal(a.read(0, a.n_rows), b.read(0, b.n_rows))
