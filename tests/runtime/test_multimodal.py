"""Text models inside of checkpoints with vision towers: transformers' logits for text come out of the converted GGUF."""

import json

import numpy as np
import pytest
from checkpoint_cases import EXACT, LENGTH, TOLERANCE, oracle, randomise
from model_cases import CASES
from model_cases.common import COMMON, PLAIN
from tower_checkpoints import save_transformers

from ggufmill.convert import open_source
from ggufmill.runtime import load_model

MROPE = PLAIN | {"rope_theta": 1e6, "mrope_section": [6, 3, 3], "mrope_interleaved": True}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
QWEN_VISION |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 8}
QWEN_TEXT = COMMON | {"head_dim": 24, "rope_parameters": MROPE, "num_experts": 6, "num_experts_per_tok": 2}
QWEN_TEXT |= {"moe_intermediate_size": 40}
KIMI_TEXT = COMMON | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 32, "kv_lora_rank": 32}
KIMI_TEXT |= {"q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8}
KIMI_TEXT |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
KIMI_TEXT |= {"rms_norm_eps": 1e-6, "rope_parameters": PLAIN}
KIMI_VISION = {"patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
KIMI_VISION |= {"hidden_size": 16, "intermediate_size": 16}

QWEN2_TEXT = COMMON | {"rope_parameters": PLAIN | {"rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8}
LLAMA4_TEXT = COMMON | {"head_dim": 24, "intermediate_size_mlp": 80, "num_local_experts": 4, "interleave_moe_layer_step": 2}
LLAMA4_VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
LLAMA4_VISION |= {"patch_size": 8, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}

EXAONE_TEXT = COMMON | {"model_type": "exaone4", "sliding_window": 6, "sliding_window_pattern": "LLG"}
EXAONE_TEXT |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
EXAONE_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_key_value_heads": 1}
EXAONE_VISION |= {"out_hidden_size": 64, "patch_size": 8, "fullatt_block_indexes": [0]}

QWEN4_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
QWEN4_VISION |= {"num_position_embeddings": 16, "patch_size": 8}

# class of transformers -> its text and vision config
MODELS = {
    "Qwen4Exp": (COMMON | CASES["qwen4exp"][1], QWEN4_VISION),
    "Qwen3VL": (QWEN_TEXT, QWEN_VISION),
    "Qwen3VLMoe": (QWEN_TEXT, QWEN_VISION),
    "Kimi_K25": (KIMI_TEXT, KIMI_VISION),
    "Llama4": (LLAMA4_TEXT, LLAMA4_VISION),
    "Exaone4_5_": (EXAONE_TEXT, EXAONE_VISION),
    "Qwen2VL": (QWEN2_TEXT, QWEN2_VISION),
    "Qwen2_5_VL": (QWEN2_TEXT, QWEN_VISION | {"fullatt_block_indexes": [0]}),
}
ARCHITECTURES = {
    "Qwen4Exp": "qwen4exp",
    "Qwen2VL": "qwen2vl",
    "Qwen2_5_VL": "qwen2vl",
    "Qwen3VL": "qwen3vl",
    "Qwen3VLMoe": "qwen3vlmoe",
    "Kimi_K25": "deepseek2",
    "Llama4": "llama4",
    "Exaone4_5_": "exaone4",
}


@pytest.fixture(params=MODELS)
def checkpoint(request, tmp_path, write_checkpoint):
    """(family, folder as transformers saves it, tokens, its logits)."""
    torch, transformers = oracle()
    text, vision = MODELS[request.param]
    config = getattr(transformers, f"{request.param}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
    reference = randomise(getattr(transformers, f"{request.param}ForConditionalGeneration")(config))
    tokens = np.random.default_rng(7).integers(3, COMMON["vocab_size"], LENGTH)
    # transformers 5.24 asks Llama 4's text model for what only its vision tower gives.
    predicting = reference.language_model if request.param == "Llama4" else reference
    with torch.no_grad():
        expected = predicting(torch.tensor(tokens[None])).logits[0].numpy()
    if request.param == "Kimi_K25":  # save_pretrained renames layers of the text model, which from_pretrained then lacks
        tensors = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
        write_checkpoint(tmp_path, config.to_dict() | {"architectures": ["KimiK25ForConditionalGeneration"]}, tensors)
    else:
        reference.save_pretrained(tmp_path)
    return request.param, tmp_path, tokens, expected


def test_the_text_model_gives_the_logits_of_transformers(checkpoint):
    family, folder, tokens, expected = checkpoint
    source = open_source(folder)
    assert source.metadata["general.architecture"] == ARCHITECTURES[family]
    assert any("vision tower" in note and "left out" in note for note in source.notes)
    if family.startswith("Qwen2"):
        assert source.metadata["qwen2vl.rope.dimension_sections"].tolist() == [2, 3, 3, 0]
    if family.startswith("Qwen3"):
        assert source.metadata[f"{ARCHITECTURES[family]}.n_deepstack_layers"] == 1
        assert source.metadata[f"{ARCHITECTURES[family]}.rope.dimension_sections"].tolist() == [6, 3, 3, 0]
    model = load_model(source, **EXACT)
    assert expected.std() > 0.3
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    session = model.session()
    session.feed(tokens[:5])
    for i in range(5, LENGTH):
        assert np.abs(session.feed(tokens[i : i + 1]) - expected[i]).max() < TOLERANCE


@pytest.mark.parametrize("checkpoint", ["Qwen3VLMoe"], indirect=True)
def test_stacks_of_transposed_experts(checkpoint):
    """As the hub's files have them."""
    safetensors = pytest.importorskip("safetensors.numpy")
    _, folder, tokens, expected = checkpoint
    file = next(folder.glob("*.safetensors"))
    tensors = safetensors.load_file(file)
    stacks = [name for name in tensors if "mlp.experts." in name]
    assert len(stacks) == 2 * COMMON["num_hidden_layers"]
    stored = {name: np.ascontiguousarray(tensors[name].transpose(0, 2, 1)) for name in stacks}
    safetensors.save_file(tensors | stored, file)
    source = open_source(folder)
    up = source.tensors["blk.1.ffn_up_exps.weight"]
    assert np.array_equal(up.read(2 * 40 + 3, 2 * 40 + 9), tensors[stacks_of(stacks, 1)][2, 40 + 3 : 40 + 9])
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", ["Voxtral", "Qwen2Audio"])
def test_the_text_model_beside_an_audio_tower(tmp_path, family):
    torch, transformers = oracle()
    save_transformers(family, tmp_path)
    reference = getattr(transformers, f"{family}ForConditionalGeneration").from_pretrained(tmp_path).eval()
    tokens = np.random.default_rng(7).integers(6, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    (tmp_path / "tokenizer.json").unlink()
    source = open_source(tmp_path)
    assert any("audio tower" in note for note in source.notes)
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE


@pytest.mark.parametrize("layout", ["InternVL chat", "Qwen2.5-Omni", "Qwen2.5-VL of old"])
def test_text_models_in_the_layouts_of_their_own_repositories(tmp_path, write_checkpoint, layout):
    """The same tensors and metadata as those of the text model alone, or inside of a newer checkpoint."""
    safetensors = pytest.importorskip("safetensors.numpy")
    _, transformers = oracle()
    text = QWEN2_TEXT if layout != "InternVL chat" else COMMON
    name = "Qwen2" if layout == "InternVL chat" else "Qwen2_5_VL"
    if name == "Qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    else:
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=QWEN_VISION | {"fullatt_block_indexes": [0]})
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    randomise(model).save_pretrained(tmp_path / "known")
    tensors = safetensors.load_file(tmp_path / "known" / "model.safetensors")
    expected = open_source(tmp_path / "known")
    known = json.loads((tmp_path / "known" / "config.json").read_text())
    inner = known.get("text_config", known)
    if layout == "InternVL chat":
        tensors = {f"language_model.{key}": x for key, x in tensors.items()} | {"mlp1.0.weight": np.ones(4, np.float32)}
        config = {"architectures": ["InternVLChatModel"], "llm_config": inner}
    elif layout == "Qwen2.5-Omni":
        tensors = {f"thinker.{key}": x for key, x in tensors.items()} | {"talker.x.weight": np.ones((2, 2), np.float32)}
        inner = inner | {"model_type": "qwen2_5_omni_text"}
        config = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": {"text_config": inner}}
    else:
        rope = inner.pop("rope_parameters")
        config = inner | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        config |= {"vision_config": known["vision_config"], "rope_theta": rope["rope_theta"]}
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    source = open_source(write_checkpoint(tmp_path / "model", config, tensors))
    assert source.tensors.keys() == expected.tensors.keys()
    for key, tensor in source.tensors.items():
        assert np.array_equal(tensor.read(0, tensor.n_rows), expected.tensors[key].read(0, tensor.n_rows)), key
    architecture = expected.metadata["general.architecture"]
    own = {key for key in expected.metadata if key.startswith(f"{architecture}.")}
    assert own == {key for key in source.metadata if key.startswith(f"{architecture}.")}
    assert all(np.array_equal(source.metadata[key], expected.metadata[key]) for key in own)


def stacks_of(names, layer):
    return next(name for name in names if f"layers.{layer}." in name and name.endswith("gate_up_proj"))
