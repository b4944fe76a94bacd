"""Settings that a GGUF cannot say are refused instead of converted to a model that computes something else."""

import json

import pytest
from checkpoint_cases import new_config, oracle
from model_cases import CASES
from model_cases.common import COMMON, LLAMA3, YARN

from ggufmill.convert.architectures.registry import model_spec
from ggufmill.convert.config import Config
from ggufmill.formats import FormatError


def spec_of(case, folder, **changes):
    _, transformers = oracle()
    family, options, *layout = CASES[case]
    architecture, config = new_config(transformers, family, COMMON | options | changes)
    values = json.loads(config.to_json_string()) | {"architectures": [architecture.__name__]}
    values |= {key: value for key, value in changes.items() if value is None}
    return model_spec(Config(folder / "config.json", values), layout[0] if layout else "ik")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("v3", {"rope_parameters": LLAMA3}, "'llama3' cannot be converted for latent attention"),
        ("longcat-flash", {"rope_parameters": LLAMA3}, "'llama3' cannot be converted for latent attention"),
        ("v2-lite", {"norm_topk_prob": True}, "norm_topk_prob is True: normalising of experts' weights in DeepSeek-V2"),
        ("cohere2", {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3}, "layer_types has no sliding_attention"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is null"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is null"),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}, "a GGUF can only say the latter"),
        ("v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}, "a GGUF can only say the latter"),
    ],
)
def test_what_cannot_be_said_is_refused(tmp_path, case, changes, message):
    with pytest.raises(FormatError, match=message):
        spec_of(case, tmp_path, **changes)


def test_what_only_a_note_says(tmp_path):
    """Beyond the trained context only."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert any("dynamic rotary scaling" in note for note in spec_of("llama", tmp_path, rope_parameters=dynamic).notes)
