"""Merged weights are those that peft merges, for every kind of matrix that conversion takes apart, joins or puts in order."""

import numpy as np
import pytest
from adapters import values
from checkpoint_cases import convert_case, oracle
from model_cases import CASES

from ggufmill.convert import open_source

LINEAR = "all-linear"
# case of model_cases -> modules that the adapter changes
TARGETS = dict.fromkeys(("llama", "gpt-oss", "gemma4"), LINEAR)
TARGETS |= dict.fromkeys(("phi3", "gptneox", "falcon-40b", "bloom", "mpt"), LINEAR)  # queries, keys and values in one
TARGETS |= {"gpt2": LINEAR}  # Conv1D: matrices are stored transposed
TARGETS |= dict.fromkeys(("v2-lite", "v3", "v3-mainline"), LINEAR)  # latent attention
# experts; shared ones, and their gate, which is a vector in a GGUF; modules whose names in checkpoints are others
TARGETS |= dict.fromkeys(("mixtral", "qwen2moe", "longcat-flash", "laguna", "hy-v3", "phimoe"), LINEAR)
TARGETS |= dict.fromkeys(("qwen3next", "qwen35", "kimi-linear", "granitehybrid", "jamba", "lfm2"), LINEAR)  # recurrent layers
TARGETS |= {"mamba": ["in_proj", "x_proj", "dt_proj"], "mamba2": ["in_proj"], "nemotron-h": ["in_proj", "up_proj", "k_proj"]}


@pytest.mark.parametrize("case", TARGETS)
def test_merged_weights_are_those_of_peft(tmp_path, case):
    torch, transformers = oracle()
    peft = pytest.importorskip("peft")
    layout = {"mla_layout": CASES[case][2]} if len(CASES[case]) > 2 else {}
    convert_case(case, tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float()
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[case]))
    generator, modules = torch.Generator().manual_seed(5), set()
    with torch.no_grad():
        for name, factor in model.named_parameters():
            if "lora_" in name:
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
                modules.add(name.partition(".lora_")[0])
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    (tmp_path / "merged" / "tokenizer.json").write_bytes((tmp_path / "base" / "tokenizer.json").read_bytes())
    base, merged = (values(open_source(tmp_path / name, **layout)) for name in ("base", "merged"))
    ours = values(open_source(tmp_path / "base", lora=[tmp_path / "adapter"], **layout))
    half = values(open_source(tmp_path / "base", lora=[f"{tmp_path / 'adapter'}=0.5"], **layout))
    for name, expected in merged.items():
        tolerance = 1e-5 * max(1, np.abs(expected).max())
        assert np.allclose(ours[name], expected, rtol=0, atol=tolerance), name
        assert np.allclose(half[name], (base[name] + expected) / 2, rtol=0, atol=tolerance), name
    changed = sum(not np.array_equal(base[name], expected) for name, expected in merged.items())
    assert changed >= 3
    assert len(modules) >= 3
