"""Projector files of tiny checkpoints that transformers saved: every number of the tower is there under llama.cpp's name."""

import json

import numpy as np
import pytest
from adapters import values
from tower_checkpoints import PROCESSOR, save_tower

from ggufmill.convert.projectors.source import open_projector
from ggufmill.convert.projectors.types import projector_types
from ggufmill.formats import FormatError, open_gguf

# checkpoint -> projectors, tensors in the file, some of their shapes
FILES = {
    "Gemma3": (
        ["gemma3"],
        55,
        {"mm.input_projection.weight": (64, 32), "v.patch_embd.weight": (8, 8, 3, 32), "v.blk.2.ffn_up.weight": (32, 48)},
    ),
    "Qwen2_5_VL": (
        ["qwen2.5vl_merger"],
        55,
        {"v.patch_embd.weight.1": (8, 8, 3, 32), "v.blk.1.attn_k.weight": (32, 32), "mm.2.weight": (128, 64)},
    ),
    "Qwen2VL": (["qwen2vl_merger"], 56, {"v.blk.0.ffn_up.bias": (64,), "v.post_ln.bias": (32,)}),
    "Qwen3VL": (
        ["qwen3vl_merger"],
        58,
        {"v.deepstack.2.fc2.weight": (128, 64), "v.blk.1.attn_qkv.weight": (32, 96), "v.position_embd.weight": (32, 16)},
    ),
    "Glm4v": (["glm4v"], 35, {"mm.patch_merger.weight": (2, 2, 32, 64), "v.norm_embd.weight": (32,)}),
    "Mistral3": (["pixtral"], 34, {"mm.patch_merger.weight": (128, 32), "v.token_embd.img_break": (64,)}),
    "InternVL": (
        ["internvl"],
        64,
        {
            "v.class_embd": (32, 1, 1),
            "v.blk.2.ls1.weight": (32,),
            "mm.model.mlp.3.weight": (64, 64),
            "mm.model.mlp.0.bias": (128,),
        },
    ),
    "InternVL chat": (
        ["internvl"],
        64,
        {"v.class_embd": (32, 1, 1), "v.blk.2.attn_v.bias": (32,), "v.blk.0.ls2.weight": (32,)},
    ),
    "Kimi-VL": (
        ["kimivl"],
        59,
        {"v.position_embd.weight": (32, 4096), "v.blk.1.attn_k.bias": (32,), "mm.input_norm.bias": (32,)},
    ),
    "Kimi-K2.5": (["kimik25"], 47, {"v.position_embd.weight": (32, 16, 16), "v.blk.1.attn_qkv.weight": (32, 96)}),
    "Gemma4": (
        ["gemma4v", "gemma4a"],
        322,
        {
            "v.std_bias": (32,),
            "v.blk.2.ffn_down.output_max": (1,),
            "a.blk.0.conv_dw.weight": (5, 32),
            "a.conv1d.1.norm.weight": (4,),
        },
    ),
    "Qwen2Audio": (["qwen2a"], 54, {"a.conv1d.1.weight": (3, 128, 32), "a.conv1d.2.bias": (1, 32), "mm.a.fc.weight": (32, 64)}),
    "Voxtral": (["voxtral"], 54, {"a.position_embd.weight": (32, 1500), "mm.a.mlp.1.weight": (128, 64)}),
    "Ultravox": (["ultravox"], 56, {"mm.a.norm_pre.weight": (256,), "mm.a.norm_mid.weight": (64,), "a.post_ln.bias": (32,)}),
    "Qwen2.5-Omni": (
        ["qwen2.5o"],
        109,
        {"v.patch_embd.weight.1": (14, 14, 3, 32), "a.position_embd.weight": (32, 1500), "mm.a.fc.bias": (64,)},
    ),
}
TEXT_MODEL = ("language_model", "lm_head", "thinker.model.", "audio_bos_eos_token", "model.embed_tokens", "inv_timescales")
MADE = ("v.token_embd.img_break", "a.position_embd.weight")  # of the text model; computed
CHANGED = ("mm.soft_emb_norm.weight", "per_dim_scale.weight")  # plus 1; softplus


def save(family, folder):
    """A tiny checkpoint and its tensors."""
    folder.mkdir(exist_ok=True)
    return save_tower(family, folder)


@pytest.mark.parametrize("family", FILES)
def test_every_number_of_the_towers_is_in_the_file(tmp_path, family):
    tensors = save(family, tmp_path)
    projectors, count, shapes = FILES[family]
    source = open_projector(tmp_path)
    metadata = source.metadata
    keys = {"general.architecture": "clip", "general.type": "mmproj"}
    assert {key: metadata[key] for key in keys} == keys
    assert [value for key, value in metadata.items() if key.endswith("projector_type")] == projectors
    modalities = [m for m in ("vision", "audio") if metadata.get(f"clip.has_{m}_encoder")]
    assert modalities == [
        m for m, letter in (("vision", "v."), ("audio", "a.")) if any(n.startswith(letter) for n in source.tensors)
    ]
    for modality in modalities:
        assert metadata[f"clip.{modality}.block_count"] == 3
        assert metadata[f"clip.{modality}.projection_dim"] == 64
    if "vision" in modalities:
        assert metadata["clip.vision.image_mean"].tolist() == np.float32(PROCESSOR["image_mean"]).tolist()
    assert {name: source.tensors[name].shape for name in shapes} == shapes
    assert len(source.tensors) == count
    got = values(source)
    computed = MADE if family == "Qwen2.5-Omni" else MADE[:1]
    tower = [x for name, x in tensors.items() if not any(part in name for part in TEXT_MODEL)]
    ours = [x for name, x in got.items() if name not in computed]
    assert sum(x.size for x in tower) == sum(x.size for x in ours)
    changed = [x for name, x in got.items() if name.endswith(CHANGED)]
    stored, written = (np.sort(np.concatenate([x.reshape(-1) for x in many])) for many in (tower, ours))
    assert len(np.setdiff1d(written, stored)) <= sum(x.size for x in changed)


def test_orders_of_rows_and_frames(tmp_path):
    tensors = save("Qwen2_5_VL", tmp_path / "qwen")
    got = values(open_projector(tmp_path / "qwen"))
    convolution = next(x for name, x in tensors.items() if name.endswith("patch_embed.proj.weight"))
    for frame, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        assert np.array_equal(got[name].reshape(32, 3, 8, 8), convolution[:, :, frame])
    qkv = next(x for name, x in tensors.items() if name.endswith("blocks.1.attn.qkv.weight"))
    bias = next(x for name, x in tensors.items() if name.endswith("blocks.1.attn.qkv.bias"))
    assert np.array_equal(got["v.blk.1.attn_v.weight"], qkv[64:])
    assert np.array_equal(got["v.blk.1.attn_k.bias"][0], bias[32:64])
    tensors = save("Mistral3", tmp_path / "mistral")
    got = values(open_projector(tmp_path / "mistral"))
    q = next(x for name, x in tensors.items() if name.endswith("layers.0.attention.q_proj.weight"))
    assert np.array_equal(got["v.blk.0.attn_q.weight"].reshape(2, 8, 2, 32), q.reshape(2, 2, 8, 32).swapaxes(1, 2))
    embeddings = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight"))
    assert np.array_equal(got["v.token_embd.img_break"][0], embeddings[5])


def test_queries_keys_and_values_of_moonvit(tmp_path):
    """Kimi-K2.5's pairs (x, y, x, y ...) become halves; Kimi-VL's stay in their order, in three matrices."""
    stored = save("Kimi-K2.5", tmp_path / "k2.5")
    got = values(open_projector(tmp_path / "k2.5"))
    for suffix in ("weight", "bias"):
        qkv = stored[f"vision_tower.encoder.blocks.1.wqkv.{suffix}"].reshape(3, 2, 16, -1)  # part, head, row
        ours = got[f"v.blk.1.attn_qkv.{suffix}"].reshape(3, 2, 16, -1)
        order = [4 * pair + 2 * axis + i for axis in (0, 1) for pair in range(4) for i in (0, 1)]
        assert np.array_equal(ours[:2], qkv[:2, :, order])
        assert np.array_equal(ours[2], qkv[2])
    stored = save("Kimi-VL", tmp_path / "vl")
    got = values(open_projector(tmp_path / "vl"))
    for i, part in enumerate("qkv"):
        assert np.array_equal(
            got[f"v.blk.2.attn_{part}.weight"], stored["vision_tower.encoder.blocks.2.wqkv.weight"][32 * i :][:32]
        )
    grid = stored["vision_tower.patch_embed.pos_emb.weight"]
    assert np.array_equal(got["v.position_embd.weight"], grid.reshape(4096, 32))


def test_what_audio_towers_compute(tmp_path):
    """Sinusoids of Whisper as transformers has them; softplus of Gemma 4's scales; biases of convolutions as columns."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    stored = save("Qwen2.5-Omni", tmp_path / "omni")
    got = values(open_projector(tmp_path / "omni"))
    expected = modeling.SinusoidsPositionEmbedding(1500, 32).positional_embedding.numpy()
    assert np.abs(got["a.position_embd.weight"] - expected).max() < 1e-6
    assert np.array_equal(got["a.conv1d.1.bias"].reshape(-1), stored["thinker.audio_tower.conv1.bias"])
    stored = save("Gemma4", tmp_path / "gemma")
    got = values(open_projector(tmp_path / "gemma"))
    scale = torch.from_numpy(stored["model.audio_tower.layers.1.self_attn.per_dim_scale"])
    assert np.allclose(got["a.blk.1.per_dim_scale.weight"][0], torch.nn.functional.softplus(scale), rtol=1e-6, atol=0)


def test_checkpoints_with_and_without_an_audio_tower(tmp_path):
    pytest.importorskip("safetensors")
    save("Gemma4", tmp_path)
    both = open_projector(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"audio_config": None}))
    vision = open_projector(tmp_path)
    assert set(vision.tensors) == {name for name in both.tensors if not name.startswith(("a.", "mm.a."))}
    assert "clip.has_audio_encoder" not in vision.metadata


def test_infinite_limits_are_the_largest_numbers(mill, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    save("Gemma4", tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    for side in ("min", "max"):
        name = f"model.vision_tower.encoder.layers.1.mlp.up_proj.input_{side}"
        tensors[name] = np.array(-np.inf if side == "min" else np.inf, np.float32)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    assert mill("convert", tmp_path, tmp_path / "out.gguf", "--mmproj")[0] == 0
    file = open_gguf(tmp_path / "out.gguf")
    low, high = (file.tensors[f"v.blk.1.ffn_up.input_{side}"].data.view(np.float32) for side in ("min", "max"))
    assert high.tolist() == [np.finfo(np.float32).max]
    assert low.tolist() == [-high[0]]
    assert file.tensors["v.blk.0.ffn_up.input_max"].data.view(np.float32)[0] < 100


def test_settings_that_cannot_be_converted_are_refused(tmp_path):
    save("InternVL chat", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"image_size": [32, 64]}, r"image_size is \[32, 64\]; towers of square images"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; silu and gelu"),
        ({"num_hidden_layers": 4}, r"layers.3.attn.qkv.weight is missing"),
    ):
        changed = config | {"vision_config": config["vision_config"] | change}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(FormatError, match=message):
            open_projector(tmp_path)


def test_types_are_those_that_llama_cpp_chooses(mill, tmp_path):
    save("Gemma3", tmp_path / "gemma3")
    assert mill("convert", tmp_path / "gemma3", tmp_path / "mmproj.gguf", "--mmproj")[0] == 0
    file = open_gguf(tmp_path / "mmproj.gguf")
    types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert (types["v.blk.0.attn_q.weight"], types["mm.input_projection.weight"], types["v.patch_embd.weight"]) == (
        "f16",
        "f16",
        "f32",
    )
    assert file.metadata["general.file_type"] == 1
    save("Gemma4", tmp_path / "gemma4")
    chosen, _ = projector_types(open_projector(tmp_path / "gemma4"), "q8_0")
    types = {
        "a.conv1d.0.weight": "f32",
        "a.input_projection.weight": "f32",
        "mm.a.input_projection.weight": "q8_0",
        "a.blk.0.conv_dw.weight": "f32",
        "a.blk.0.attn_k_rel.weight": "q8_0",
        "v.blk.0.attn_q.weight": "q8_0",
        "v.blk.0.attn_q.input_min": "f32",
    }
    assert {name: chosen[name].name for name in types} == types
    save("Ultravox", tmp_path / "ultravox")
    chosen, _ = projector_types(open_projector(tmp_path / "ultravox"), "f32")
    types = {"a.conv1d.1.weight": "f16", "a.conv1d.1.bias": "f32", "a.position_embd.weight": "f32", "mm.a.mlp.1.weight": "f32"}
    assert {name: chosen[name].name for name in types} == types
    save("Qwen3VL", tmp_path / "qwen3vl")
    source = open_projector(tmp_path / "qwen3vl")
    for outtype, expected in (("f16", ("f16", "f16", "f32")), ("q8_0", ("q8_0", "f32", "f32")), ("f32", ("f32",) * 3)):
        chosen, _ = projector_types(source, outtype)
        names = ("v.blk.0.attn_qkv.weight", "v.patch_embd.weight", "v.position_embd.weight")
        assert tuple(chosen[name].name for name in names) == expected


def test_unknown_missing_and_unprepared_towers_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    save("Qwen3VL", tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith("pos_embed.weight")).removesuffix("pos_embed.weight")
    safetensors.save_file(tensors | {f"{prefix}strange.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"1 tensors are unknown to this architecture: strange.weight"):
        open_projector(tmp_path)
    del tensors[f"{prefix}blocks.2.norm1.weight"]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"blocks.2.norm1.weight is missing"):
        open_projector(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(FormatError, match=r"preprocessor_config.json is missing"):
        open_projector(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen9VLForConditionalGeneration"]}))
    with pytest.raises(FormatError, match=r"the tower of Qwen9VLFor\w+ is not known; the nearest known name is Qwen"):
        open_projector(tmp_path)


def test_rows_that_are_no_whole_blocks_are_f16(mill, tmp_path):
    save("Gemma4", tmp_path)
    assert mill("convert", tmp_path, tmp_path / "out.gguf", "--mmproj", "--outtype", "q8_0")[0] == 0
    file = open_gguf(tmp_path / "out.gguf")
    names = ("mm.a.input_projection.weight", "v.blk.0.ffn_down.weight", "v.blk.0.ffn_up.weight")  # rows of 48, 48, 32
    assert [file.tensors[name].type.name for name in names] == ["f16", "f16", "q8_0"]


def test_a_projector_file_is_not_split(mill, tmp_path):
    save("InternVL chat", tmp_path)
    for option in (("--split-max-size", "1M"), ("--split-max-tensors", 1), ("--no-tensor-first-split",)):
        code, _, err = mill("convert", tmp_path, tmp_path / "out.gguf", "--mmproj", *option)
        assert (code, f"{option[0]} does nothing without a text model" in err) == (2, True)
    code, _, err = mill("convert", tmp_path, tmp_path / "out.gguf", "--mmproj", "--outtype", "mxfp4")
    assert (code, "a projector file is auto, f32, f16, bf16 or q8_0" in err) == (1, True)
    assert not list(tmp_path.glob("out*"))
