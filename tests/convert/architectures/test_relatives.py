"""What is offered for an architecture that is not known: those that its config.json suits and whose tensors it has."""

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import FormatError


def refusal(write_checkpoint, folder, config, tensors):
    with pytest.raises(FormatError) as caught:
        open_source(write_checkpoint(folder, config, tensors))
    return str(caught.value)


def test_a_renamed_model_is_known_by_its_tensors_not_by_its_name(write_checkpoint, tmp_path, tiny_llama, tiny_deepseek):
    config, tensors = tiny_llama(architectures=["DeepseekNextForCausalLM"])
    said = refusal(write_checkpoint, tmp_path / "llama", config, tensors)
    assert "unsupported architecture DeepseekNextForCausalLM; the nearest by its tensors: LlamaForCausalLM (all" in said
    assert "Deepseek" not in said.split("by its tensors: ")[1]
    config, tensors = tiny_deepseek(architectures=["LlamaNextForCausalLM"])
    said = refusal(write_checkpoint, tmp_path / "deepseek", config, tensors)
    nearest = said.split("by its tensors: ")[1].split(" ")[0]
    assert nearest in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    assert "LlamaForCausalLM" not in said


def test_keys_of_the_config_decide_between_the_same_tensors(write_checkpoint, tmp_path, tiny_llama):
    factors = dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 0.5)
    config, tensors = tiny_llama(architectures=["LlamaNextForCausalLM"], **factors)
    assert "by its tensors: GraniteForCausalLM" in refusal(write_checkpoint, tmp_path / "granite", config, tensors)


def test_what_a_relative_lacks_is_said(write_checkpoint, tmp_path, tiny_llama):
    config, tensors = tiny_llama(architectures=["OtherForCausalLM"])
    tensors |= {f"model.layers.{i}.hyper.weight": np.ones((3, 3), np.float32) for i in range(2)}
    said = refusal(write_checkpoint, tmp_path / "other", config, tensors)
    assert "(without model.layers.N.hyper.weight)" in said
    del tensors["model.norm.weight"]
    said = refusal(write_checkpoint, tmp_path / "less", config, tensors)
    assert "(without model.layers.N.hyper.weight; needs model.norm.weight)" in said


def test_nothing_is_offered_where_nothing_is_alike(write_checkpoint, tmp_path, tiny_llama):
    config, _ = tiny_llama(architectures=["LlamaNextForCausalLM"])
    tensors = {f"core.{i}.{part}.weight": np.ones((4, 4), np.float32) for i in range(3) for part in "abcdefgh"}
    said = refusal(write_checkpoint, tmp_path / "new", config, tensors)
    assert "no known one suits its config.json and has most of its tensors" in said


def test_quantised_weights_count_as_their_tensors(write_checkpoint, tmp_path, tiny_deepseek):
    config, tensors = tiny_deepseek(block=(32, 32), architectures=["NewForCausalLM"])
    said = refusal(write_checkpoint, tmp_path / "fp8", config, tensors)
    assert "by its tensors: DeepseekV3ForCausalLM (all its tensors)" in said
    assert "weight_scale_inv" not in said
