"""Every architecture that converts is exported. Per function of the table of architectures: transformers computes the same with
what is exported, or, where it has no such model, a checkpoint of random numbers comes back."""

import json

import numpy as np
import pytest
from checkpoint_cases import file_differences, oracle, save_tokenizer
from encoder_cases import CASES as ENCODERS
from encoder_cases import convert_encoder
from model_cases import CASES
from recorded_models import draw, layout_of, record_of
from safetensors.numpy import load_file, save_file

from ggufmill import convert_model, export_model
from ggufmill.convert.architectures.registry import ARCHITECTURES, TEXT_MODELS, model_spec
from ggufmill.convert.config import Config

TOLERANCES = {"qwen35moe": 2e-4}  # farther from float64 in float32 than others
AUTO = "AutoModelForCausalLM"
# Functions, or multimodal classes, whose model another class of transformers reads
OTHER_CLASSES = {"latent_attention.deepseek.mistral4": "Mistral4ForCausalLM"}
# Those that transformers reads beside other tensors of the original only, and what these are
BESIDE_OTHERS = {
    "local_attention.muse_glimmer.muse_glimmer": "the tower: transformers has the text model without its output",
    "local_attention.step35.step35": "the tower: transformers has no text model by itself",
    "experts.minimax_m3.minimax_m3": "the tower: the text model by itself reads names that no checkpoint has",
    "latent_attention.longcat_flash.longcat_flash": "matrices of experts that return their input, which nothing reads",
}
MULTIMODAL = {
    "MuseGlimmerForConditionalGeneration": "local_attention.muse_glimmer.muse_glimmer",
    "Step3p7ForConditionalGeneration": "local_attention.step35.step35",
    "MiniMaxM3SparseForConditionalGeneration": "experts.minimax_m3.minimax_m3",
}
SIZES = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
LING = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
LING_2 = LING | {"num_shared_experts": 1, "head_dim": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
LING_2 |= {"score_function": "sigmoid", "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5}
GLM = {"num_layers": 2, "ffn_hidden_size": 96, "kv_channels": 16, "padded_vocab_size": 288, "seq_length": 512, "rmsnorm": True}
GLM |= {"layernorm_epsilon": 1e-5, "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}
MROPE_3 = {"head_dim": 16, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
JINA = {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
# Without a class of transformers that has their output and reads their names: name in config.json -> other keys
WITHOUT_ORACLE = {
    "ExaoneForCausalLM": {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu", "rope_theta": 5e5},
    "InternLM3ForCausalLM": {"head_dim": 24, "qkv_bias": True, "bias": True, "rope_theta": 5e7},
    "BaichuanForCausalLM": {"model_max_length": 512, "num_key_value_heads": None},
    "ChatGLMModel": GLM,
    "BailingMoeForCausalLM": LING,
    "BailingMoeV2ForCausalLM": LING_2,
    "Qwen2VLTextModel": MROPE,
    "Qwen3VLTextModel": MROPE_3,
    "Qwen3VLMoeTextModel": MROPE_3 | EXPERTS,
    "JinaBertModel": JINA,
}
RELATIVES = {"InternLM3ForCausalLM": "LlamaForCausalLM"}  # which a GGUF does not tell apart


def functions_of(cases):
    """Function of the table -> the first case that it converts."""
    found = {}
    for case, (family, *_) in cases.items():
        name = next((n for n in (family, f"{family}ForCausalLM") if n in ARCHITECTURES), None)
        if name is not None:
            found.setdefault(MULTIMODAL.get(name, ARCHITECTURES[name]), case)
    return found


BY_TRANSFORMERS, AS_ENCODERS = functions_of(CASES), functions_of(ENCODERS)
# Further cases of these: other transforms, rotary embeddings and tensors
VARIANTS = ("llama-llama3", "llama-biases", "v3-mainline", "phi3-long", "granitemoe-shared", "ling3-odd")


def test_every_architecture_is_in_a_table():
    """Of several names of one function the first is exported; multimodal classes come back as their text models."""
    shown = {*BY_TRANSFORMERS, *AS_ENCODERS, *(ARCHITECTURES[name] for name in WITHOUT_ORACLE)}
    shown.add(ARCHITECTURES["OpenPanguV2ForCausalLM"])  # with Kimi K3 in test_definitions
    assert {*ARCHITECTURES.values()} - shown == {"multimodal.text_model"}
    assert {*TEXT_MODELS.values()} <= {*ARCHITECTURES}
    assert not {*BY_TRANSFORMERS} & {ARCHITECTURES[name] for name in WITHOUT_ORACLE}
    assert {*OTHER_CLASSES, *BESIDE_OTHERS} <= {*BY_TRANSFORMERS}


def exported(folder, layout=None):
    """folder: with the checkpoint in `model`."""
    save_tokenizer(folder / "model" / "tokenizer.json")
    convert_model(folder / "model", folder / "model.gguf", outtype="f32", mla_layout=layout)
    return export_model(folder / "model.gguf", folder / "exported")


def as_text(name):
    """The name that the text model alone has."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.")


@pytest.mark.oracle
@pytest.mark.parametrize("case", [*BY_TRANSFORMERS.values(), *VARIANTS])
def test_transformers_computes_the_same(tmp_path, case):
    torch, transformers = oracle()
    function = next((function for function, first in BY_TRANSFORMERS.items() if first == case), None)
    record = record_of(case)
    record.write(tmp_path / "model")
    result = exported(tmp_path, layout_of(case))
    folder, kind = result.folder, OTHER_CLASSES.get(function, AUTO)
    if function in BESIDE_OTHERS:  # within the original, whose own numbers are no longer there
        tensors, given = load_file(folder / "model.safetensors"), {**record.tensors()}
        ours = {as_text(name): name for name in given if as_text(name) in tensors}
        assert {*ours} == {*tensors}
        given = {name: np.zeros_like(values) for name, values in given.items()} | {ours[name]: tensors[name] for name in ours}
        folder, kind = tmp_path / "model", CASES[case][0]
        kind = kind if kind.endswith("ForConditionalGeneration") else AUTO
        save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
    keys = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.no_grad():
        model = getattr(transformers, kind).from_pretrained(folder, **keys).eval()
        logits = model(torch.tensor(record.tokens[None])).logits[0].numpy()
    assert record.difference(logits) < TOLERANCES.get(case, 1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_comes_back_with_its_pooling(tmp_path, case):
    torch, transformers = oracle()
    tokens, expected, _, made = convert_encoder(case, tmp_path / "model")
    made.unlink()
    result = exported(tmp_path)
    convert_model(result.folder, tmp_path / "again.gguf", outtype="f32")
    assert file_differences(tmp_path / "model.gguf", tmp_path / "again.gguf") == []
    model = getattr(transformers, result.architecture).from_pretrained(result.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model.base_model(torch.tensor(tokens[None])).last_hidden_state[0].numpy()
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.slow(keep=["JinaBertModel", "Qwen3VLMoeTextModel"])
@pytest.mark.parametrize("name", WITHOUT_ORACLE)
def test_a_checkpoint_of_random_numbers_comes_back(tmp_path, name):
    values = {"architectures": [name]} | SIZES | WITHOUT_ORACLE[name]
    config = Config(tmp_path / "config.json", values, n_stored=1000)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    sources = {
        source: spec.source_shape(number)
        for spec in model_spec(config, "ik").tensors
        for number, source in enumerate(spec.sources)
    }
    save_file({source: draw(source, shape, 1.0) for source, shape in sources.items()}, folder / "model.safetensors")
    result = exported(tmp_path)
    assert (result.lost, result.architecture) == ([], RELATIVES.get(name, name))
    tensors = load_file(result.folder / "model.safetensors")
    assert {source: tensors[source].shape for source in tensors} == sources
    convert_model(result.folder, tmp_path / "again.gguf", outtype="f32")
    assert file_differences(tmp_path / "model.gguf", tmp_path / "again.gguf") == []
