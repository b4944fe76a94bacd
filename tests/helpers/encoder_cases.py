"""Tiny random encoders of transformers: case -> (class, config besides COMMON, pooling in sentence-transformers' files)."""

import json
from copy import deepcopy

import numpy as np
from checkpoint_cases import oracle, randomise, save_tokenizer, write_gguf
from model_cases.common import PLAIN

from ggufmill.convert import open_source

VOCABULARY, LENGTH = 288, 70
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODERN = {"local_attention": 18, "num_hidden_layers": 5, "norm_eps": 1e-5, "cls_token_id": 1, "sep_token_id": 2}
MODERN_ROPE = {"full_attention": PLAIN | {"rope_theta": 160000.0}, "sliding_attention": PLAIN}
GEMMA = {"head_dim": 24, "num_key_value_heads": 1, "num_hidden_layers": 7, "use_bidirectional_attention": True}
GEMMA |= {"sliding_window": 18, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
QWEN = {"head_dim": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": PLAIN}
CASES = {
    "bert": ("BertModel", {"type_vocab_size": 2}, "cls"),
    "bert-masked": ("BertForMaskedLM", {"type_vocab_size": 3, "pad_token_id": 0}, "mean"),
    "roberta": ("RobertaModel", {"type_vocab_size": 1}, "mean"),
    "xlm-roberta": ("XLMRobertaModel", {"type_vocab_size": 1, "num_attention_heads": 2}, "cls"),
    "camembert": ("CamembertModel", {"type_vocab_size": 1}, None),
    "nomic-bert": ("NomicBertModel", {"rope_parameters": PLAIN | {"rope_theta": 1000.0}}, "mean"),
    "nomic-bert-theta": ("NomicBertModel", {"rope_parameters": PLAIN, "num_attention_heads": 2, "type_vocab_size": 4}, None),
    "jina-bert-v3": ("JinaEmbeddingsV3Model", {"rope_parameters": PLAIN | {"rope_theta": 20000.0}}, "mean"),
    "jina-bert-v3-theta": ("JinaEmbeddingsV3Model", {"rope_parameters": PLAIN, "num_attention_heads": 8}, "mean"),
    "modern-bert": ("ModernBertModel", MODERN | {"rope_parameters": MODERN_ROPE}, "cls"),
    "modern-bert-masked": ("ModernBertForMaskedLM", MODERN | {"global_attn_every_n_layers": 2, "local_attention": 10}, "mean"),
    "gemma-embedding": ("Gemma3TextModel", GEMMA, "mean"),
    "gemma-embedding-dense": ("Gemma3TextModel", GEMMA | {"sliding_window": 30}, "dense"),
    "qwen3-embedding": ("Qwen3ForCausalLM", QWEN, "last"),
    "qwen3-embedding-base": ("Qwen3Model", QWEN | {"tie_word_embeddings": False}, "last"),
}
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}


def write_modules(folder, pooling, dense=()):
    """sentence-transformers' files; dense: matrices [outputs, inputs]. The type of a module is only its last part."""
    from safetensors.numpy import save_file

    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *(("Dense", f"{i}_Dense") for i in range(2, 2 + len(dense)))]
    listed = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for (kind, path), matrix in zip(modules[1:], (None, *dense), strict=True):
        (folder / path).mkdir()
        values = {key: name == pooling for name, key in MODES.items()}
        if kind == "Dense":
            values = {"in_features": matrix.shape[1], "out_features": matrix.shape[0], "bias": False}
            values["activation_function"] = "torch.nn.modules.linear.Identity"
            save_file({"linear.weight": matrix}, folder / path / "model.safetensors")
        (folder / path / "config.json").write_text(json.dumps(values))


def convert_encoder(case, folder):
    """(tokens, outputs of transformers float32 [tokens, 64], dense matrices, path of the GGUF) of a case's random model."""
    torch, transformers = oracle()
    folder.mkdir(exist_ok=True)
    name, options, pooling = CASES[case]
    architecture = getattr(transformers, name)
    config = architecture.config_class(**deepcopy(COMMON | options), attn_implementation="eager")
    reference = randomise(architecture(config))
    tokens = np.random.default_rng(3).integers(3, VOCABULARY, LENGTH)
    with torch.no_grad():
        base = reference.base_model if "For" in name else reference
        expected = base(torch.tensor(tokens[None])).last_hidden_state[0].numpy()
    reference.save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json")
    dense = []
    if pooling == "dense":
        draw = np.random.default_rng(4)
        dense = [draw.standard_normal(shape).astype(np.float32) / 8 for shape in ((80, 64), (48, 80))]
    if pooling is not None:
        write_modules(folder, "mean" if dense else pooling, dense)
    return tokens, expected, dense, write_gguf(open_source(folder), folder / "model.gguf")[0]
