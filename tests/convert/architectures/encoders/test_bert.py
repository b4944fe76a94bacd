"""Metadata of encoders from published configs."""

from pathlib import Path

from ggufmill.convert.architectures.encoders.bert import bert, nomic
from ggufmill.convert.config import Config

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 40}
NOMIC = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "vocab_size": 40, "activation_function": "swiglu"}
NOMIC |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "causal", "prenorm"), False)


def spec(function, folder, **values):
    return function(Config(Path(folder) / "config.json", values), "ik")


def test_a_model_that_ranks_has_no_note_about_its_pooling(tmp_path):
    sizes = SIZES | {"max_position_embeddings": 514, "pad_token_id": 1}
    ranks = spec(bert, tmp_path, architectures=["XLMRobertaForSequenceClassification"], id2label={"0": "x"}, **sizes)
    assert ranks.metadata["bert.pooling_type"] == 4
    assert ranks.notes == []
    assert "taken as mean" in spec(bert, tmp_path, architectures=["XLMRobertaModel"], **sizes).notes[0]


def test_nomic_has_the_context_that_it_was_trained_for(tmp_path):
    """n_positions of the published config.json is 8192, which needs another scaling of the rotary embedding."""
    long = spec(nomic, tmp_path, n_positions=8192, max_trained_positions=2048, **NOMIC)
    assert long.metadata["nomic-bert.context_length"] == 2048
    assert spec(nomic, tmp_path, n_positions=128, **NOMIC).metadata["nomic-bert.context_length"] == 128
