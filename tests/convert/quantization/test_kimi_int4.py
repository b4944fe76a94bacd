"""Kimi-K2.5's storage from end to end: experts in symmetric int4 with groups of 32 inside a multimodal checkpoint -> q4_0."""

import numpy as np
import pytest
from adapters import values
from quantized_weights import BF16, DRAW, packed

from ggufmill import convert_model
from ggufmill.convert import open_source
from ggufmill.formats import PlanError, open_gguf

SIZES = {"moe_intermediate_size": 64, "intermediate_size": 96}
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}


@pytest.fixture
def kimi(tmp_path, tiny_deepseek, write_checkpoint):
    """make(zero_point=False) -> (the checkpoint, one with the values that its codes stand for)."""

    def make(zero_point=False):
        text, plain = tiny_deepseek(**SIZES, num_nextn_predict_layers=0)
        text |= {"model_type": "kimi_k2"}
        stored = {f"language_model.{name}": x for name, x in plain.items() if ".mlp.experts." not in name}
        for name in [name for name in plain if ".mlp.experts." in name]:
            rows, columns = plain[name].shape
            codes = DRAW.integers(-8, 8, (rows, columns))
            scales = (0.001 + 0.02 * DRAW.random((rows, columns // 32))).astype(BF16)
            plain[name] = codes * np.repeat(scales.astype(np.float32), 32, 1)
            stem = f"language_model.{name}"
            stored |= {f"{stem}_packed": packed(codes + 8, 4), f"{stem}_scale": scales}
            stored[f"{stem}_shape"] = np.array([rows, columns], np.int32)
            if zero_point:
                zeros = np.zeros(scales.shape, int)
                stored[f"{stem}_zero_point"] = np.ascontiguousarray(packed(zeros.T + 8, 4).T)
        stored["vision_tower.patch_embed.proj.weight"] = np.zeros((8, 3, 14, 14), BF16)
        stored["mm_projector.pre_norm.weight"] = np.zeros(8, BF16)
        config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
        config |= {"text_config": text | {"quantization_config": SETTINGS}, "vision_config": {"patch_size": 14}}
        folder = write_checkpoint(tmp_path / "kimi", config, stored)
        return folder, write_checkpoint(tmp_path / "plain", text, plain)

    return make


@pytest.mark.parametrize("options", [{}, {"outtype": "q8_0", "symmetric_q40": True}])
def test_experts_become_q4_0_with_equal_values(kimi, tmp_path, options):
    folder, plain = kimi()
    convert_model(folder, tmp_path / "out.gguf", verify=True, **options)
    file = open_gguf(tmp_path / "out.gguf")
    types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    experts = [name for name in types if "_exps." in name]
    assert len(experts) == 6
    assert {types[name] for name in experts} == {"q4_0"}
    assert "q4_0" not in {types[name] for name in types.keys() - set(experts)}
    written, expected = values(open_source(tmp_path / "out.gguf")), values(open_source(plain))
    assert all(np.array_equal(written[name], expected[name]) for name in experts)
    if not options:  # all else is bf16 in the checkpoint, and stays it
        for name in ("blk.1.attn_output.weight", "blk.2.ffn_down_shexp.weight", "output.weight", "token_embd.weight"):
            assert types[name] == "bf16"
            assert np.array_equal(written[name], expected[name]), name
    assert any("vision tower" in note for note in open_source(folder).notes)


def test_codes_with_zero_points_are_not_taken_for_q4_0(kimi, tmp_path):
    folder, _ = kimi(zero_point=True)
    convert_model(folder, tmp_path / "out.gguf")
    file = open_gguf(tmp_path / "out.gguf")
    assert {tensor.type.name for name, tensor in file.tensors.items() if "_exps." in name} == {"bf16"}
    with pytest.raises(PlanError, match="weights in int4 are not symmetric in groups of 32"):
        convert_model(folder, tmp_path / "flag.gguf", symmetric_q40=True)
