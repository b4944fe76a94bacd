"""Settings that a GGUF cannot say are refused; not converted to a model that computes something else, unless that is asked."""

import json

import numpy as np
import pytest
from checkpoint_cases import EXACT, LENGTH, TOLERANCE, new_config, oracle, randomise
from model_cases import CASES
from model_cases.common import COMMON, DYNAMIC, HALF, LLAMA3, PLAIN, TIED, WINDOW, YARN

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import model_spec
from ggufmill.convert.config import Config
from ggufmill.formats import FormatError, PlanError
from ggufmill.formats.source import LOST_CONFIG
from ggufmill.runtime import load_model

OTHER_MAGNITUDE = {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}
# case, changes of its config, part of the message
LOSSES = [
    ("v3", {"rope_parameters": LLAMA3}, "'llama3' with latent attention"),
    ("longcat-flash", {"rope_parameters": LLAMA3}, "'llama3' with latent attention"),
    ("v2-lite", {"norm_topk_prob": True}, "norm_topk_prob is True: DeepSeek-V2's weights of experts are not normalised"),
    ("v3", OTHER_MAGNITUDE, "mscale 0.7 and mscale_all_dim 1: a GGUF can only say the latter"),
    ("llama", {"rope_parameters": DYNAMIC}, "dynamic rotary scaling"),
    ("llama", {"rope_parameters": PLAIN | HALF}, "partial_rotary_factor is 0.5"),
    ("qwen3moe", {"rope_parameters": PLAIN | HALF}, "partial_rotary_factor is 0.5"),
    ("olmoe", {"clip_qkv": 0.5}, "clip_qkv is set"),
    ("mistral4", {"n_group": 4, "topk_group": 2}, "n_group is 4"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
]
# What a GGUF cannot say, and without which a model makes no sense.
REFUSALS = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 0, 1]},
        "no_rope_layers: a GGUF has a key for rotation in three of four layers, or in all",
    ),
    (
        "smollm3",
        {"no_rope_layer_interval": 2},
        "no_rope_layers: a GGUF has a key for rotation in three of four layers, or in all",
    ),
    ("v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
]


def config_of(case, folder, changes, **options):
    _, transformers = oracle()
    family, own, *_ = CASES[case]
    architecture, config = new_config(transformers, family, COMMON | own | changes)
    values = json.loads(config.to_json_string()) | {"architectures": [architecture.__name__]}
    return Config(folder / "config.json", values | changes, **options)


@pytest.mark.parametrize(("case", "changes", "message"), LOSSES)
def test_a_loss_is_an_error_unless_it_is_allowed(tmp_path, case, changes, message):
    with pytest.raises(FormatError, match=message) as refused:
        model_spec(config_of(case, tmp_path, changes), "ik")
    assert "--allow-lossy-config" in str(refused.value)
    losses = []
    model_spec(config_of(case, tmp_path, changes, losses=losses), "ik")
    assert len(set(losses)) == 1
    assert losses[0] in str(refused.value)
    losses.clear()
    model_spec(config_of(case, tmp_path, {}, losses=losses), "ik")
    assert losses == []


@pytest.mark.parametrize(("case", "changes", "message"), REFUSALS)
def test_what_makes_no_sense_without_is_always_refused(tmp_path, case, changes, message):
    for losses in (None, []):
        with pytest.raises(FormatError, match=message):
            model_spec(config_of(case, tmp_path, changes, losses=losses), "ik")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"rope_parameters": DYNAMIC}),  # as in transformers up to the trained context
        ("Qwen3", {"rope_parameters": PLAIN | HALF}),  # which transformers does not read there
        ("DeepseekV2", CASES["v2-lite"][1] | {"norm_topk_prob": True}),  # likewise
        ("Gemma3", TIED | WINDOW | {"head_dim": 24, "attn_logit_softcapping": 2.0}),  # likewise, without a loss
    ],
)
def test_what_is_left_out_is_named_in_the_file(tmp_path, family, options):
    torch, transformers = oracle()
    architecture, config = new_config(transformers, family, COMMON | options)
    reference = randomise(architecture(config))
    tokens = np.random.default_rng(3).integers(3, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    reference.save_pretrained(tmp_path)
    source = open_source(tmp_path, allow_lossy_config=True)
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    if family == "Gemma3":
        assert LOST_CONFIG not in source.metadata
        assert open_source(tmp_path).identity == source.identity
        return
    (lost,) = source.metadata[LOST_CONFIG]
    with pytest.raises(FormatError) as refused:
        open_source(tmp_path)
    assert lost in str(refused.value)


def test_it_is_for_checkpoints(tmp_path):
    with pytest.raises(PlanError, match="--allow-lossy-config is for checkpoints"):
        open_source(tmp_path / "a.gguf", allow_lossy_config=True)
