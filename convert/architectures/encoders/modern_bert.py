"""ModernBERT: norms before the blocks, global and local layers, gate and up in one matrix."""

from __future__ import annotations

from dataclasses import replace

from ...config import Config
from ...model_spec import ModelSpec, TensorSpec
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor, linear
from .pooling import pooling_keys

DEFAULTS = {"norm_eps": 1e-5, "local_attention": 128, "global_attn_every_n_layers": 3, "tie_word_embeddings": True}
DEFAULTS |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
NAMES = CheckpointNames("layers.{}", "embeddings.tok_embeddings.weight", "final_norm.weight", "decoder.weight")
HEADS = {"head.": "head of the pre-training", "decoder.": "head of the pre-training", "classifier.": "head of a classifier"}


def modern_bert(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults(DEFAULTS)
    config.require("hidden_activation", "gelu", "this activation")
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        config.require(key, False, "biases")
    thetas = _thetas(config)
    config = config.with_values(
        {"num_key_value_heads": config.integer("num_attention_heads"), "rope_theta": thetas[0], "rope_parameters": None}
        | {"tie_word_embeddings": True}  # what is tied is the head of the pre-training, which a GGUF does not have
    )
    spec = DecoderSpec("modern-bert", config, norm=("attention.layer_norm_epsilon", "norm_eps"))
    spec.add_float32({"rope.freq_base_swa": thetas[1]})
    spec.add_uint32({"attention.sliding_window": config.integer("local_attention")})
    spec.add_uint32({"attention.sliding_window_pattern": _period(spec)})
    spec.metadata |= {"modern-bert.attention.causal": False, "modern-bert.rope.scaling.type": "none"}
    spec.metadata |= pooling_keys("modern-bert", config, "mean", spec.notes)
    size, rows = spec.hidden_size, spec.intermediate_size

    def layer(number: int) -> list[LayerTensor]:
        return [
            *([spec.norm("attn_norm", "attn_norm")] if number else []),
            *linear("attn_qkv", "attn.Wqkv", (3 * size, size)),
            *linear("attn_output", "attn.Wo", (size, size)),
            spec.norm("ffn_norm", "mlp_norm"),
            *linear("ffn_up", "mlp.Wi", (2 * rows, size)),
            *linear("ffn_down", "mlp.Wo", (size, rows)),
        ]

    spec.renamed_prefixes["model."] = ""
    spec.skipped_prefixes |= HEADS
    model = spec.build(layer, NAMES)
    model.skipped_prefixes.pop(NAMES.head)
    return replace(model, tensors=[*model.tensors, TensorSpec("token_embd_norm.weight", ("embeddings.norm.weight",), (size,))])


def _thetas(config: Config) -> tuple[float, float]:
    """The thetas of global and of local layers: from rope_parameters by type of layer, or from older keys."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return tuple(config.number(f"{part}_rope_theta", positive=True) for part in ("global", "local"))  # type: ignore[return-value]
    sets = [config.part(parameters.get(f"{part}_attention") or {}) for part in ("full", "sliding")]
    for one in sets:
        one.require("rope_type", "default", "rotary scaling")
    return sets[0].number("rope_theta", positive=True), sets[1].number("rope_theta", positive=True)


def _period(spec: DecoderSpec) -> int:
    """The n of which every n-th layer, from the first on, is global. Raises FormatError for another pattern."""
    period = spec.config.integer("global_attn_every_n_layers")
    is_local = spec.local_layers(lambda i: i % period != 0)
    period = next((i for i in range(1, spec.n_layers) if not is_local[i]), spec.n_layers)
    if is_local != [i % period != 0 for i in range(spec.n_layers)]:
        raise spec.config.error(
            "layer_types has no regular pattern that begins with full_attention, which readers of GGUF need"
        )
    return period
