"""GPT-2: learned positions, matrices that are stored transposed."""

from __future__ import annotations

from dataclasses import replace

from ...config import Config
from ...model_spec import ModelSpec, TensorSpec
from ...tensor_transforms import Transform, transposed, unchanged
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor

NAMES = CheckpointNames("h.{}", "wte.weight", "ln_f.weight", "wte.weight")
OLDER_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def gpt2(config: Config, mla_layout: str) -> ModelSpec:
    """GPT-2 and its relatives of the same class. The output, tied to the embeddings, is written too, as readers ask for it.

    Raises FormatError for settings that cannot be converted.
    """
    config = config.with_defaults({key: config.get(old) for key, old in OLDER_KEYS.items() if config.get(old) is not None})
    config = config.with_defaults({"layer_norm_epsilon": 1e-5, "n_inner": 4 * config.integer("hidden_size")})
    config.require("activation_function", "gelu_new", "this activation")
    config.require("scale_attn_weights", True, "scores without a factor")
    config.require("scale_attn_by_inverse_layer_idx", False, "scores with a factor per layer")
    config.require("add_cross_attention", False, "attention to an encoder")
    config.require("tie_word_embeddings", True, "an output that is not tied to the embeddings")
    config = config.with_values({"tie_word_embeddings": False, "num_key_value_heads": config.integer("num_attention_heads")})
    spec = DecoderSpec(
        "gpt2", config, norm=("attention.layer_norm_epsilon", "layer_norm_epsilon"), keys={"feed_forward_length": "n_inner"}
    )
    size, rows = spec.hidden_size, spec.intermediate_size

    def stored_transposed(name: str, source: str, shape: tuple[int, int]) -> list[LayerTensor]:
        """shape: of the tensor, [rows, columns]."""
        parts: tuple[tuple[str, tuple[int, ...], Transform], ...]
        parts = (("weight", shape[::-1], transposed), ("bias", shape[:1], unchanged))
        return [LayerTensor(f"{name}.{part}", f"{source}.{part}", s, transform) for part, s, transform in parts]

    layer = [
        *spec.layer_norm("attn_norm", "ln_1"),
        *stored_transposed("attn_qkv", "attn.c_attn", (3 * size, size)),
        *stored_transposed("attn_output", "attn.c_proj", (size, size)),
        *spec.layer_norm("ffn_norm", "ln_2"),
        *stored_transposed("ffn_up", "mlp.c_fc", (rows, size)),
        *stored_transposed("ffn_down", "mlp.c_proj", (size, rows)),
    ]
    spec.renamed_prefixes["transformer."] = ""
    spec.skipped_prefixes["lm_head."] = "output tied to the embeddings"
    model = spec.build(layer, NAMES, norm_bias=True)
    positions = TensorSpec("position_embd.weight", ("wpe.weight",), (config.integer("max_position_embeddings"), size))
    return replace(model, tensors=[*model.tensors, positions])
