"""Types of the tensors of recurrent layers: which llama-quantize leaves as they are, what a stock mix and a shipped recipe give
the others. The types of Q4_K_M are those that llama.cpp's own quantiser chose for models of these sizes."""

import numpy as np

from ggufmill.formats import SourceTensor, TensorSource
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.type_selection import TypeOverrides, TypeSelector
from ggufmill.recipes import find

LAYERS = 8
# name -> ne shape, type in Q4_K_M; f32: never quantised
TENSORS = {
    "ssm_in.weight": ((256, 1064), "q4_K"),
    "ssm_out.weight": ((512, 256), "q4_K"),
    "ssm_conv1d.weight": ((4, 544), "f32"),
    "ssm_conv1d.bias": ((544,), "f32"),
    "ssm_conv1d_q.weight": ((4, 1, 256), "f32"),
    "ssm_x.weight": ((512, 32), "f32"),  # ik_llama.cpp's rule; llama.cpp quantises these two
    "ssm_dt.weight": ((16, 512), "f32"),
    "ssm_dt.bias": ((8,), "f32"),
    "ssm_a": ((1, 8), "f32"),
    "ssm_d": ((1, 8), "f32"),
    "ssm_norm.weight": ((256, 2), "f32"),
    "shortconv.in_proj.weight": ((256, 768), "q4_K"),
    "shortconv.out_proj.weight": ((256, 256), "q4_K"),
    "shortconv.conv.weight": ((3, 256), "f32"),
    "ssm_f_a.weight": ((256, 64), "q4_K"),
    "ssm_beta.weight": ((256, 8), "q4_K"),
}


def source():
    shapes = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, (shape, _) in TENSORS.items()}
    shapes = {"token_embd.weight": (256, 288), **shapes, "output.weight": (256, 288)}
    tensors = {n: SourceTensor(n, s, "f32", lambda start, stop: np.zeros((stop - start, 1))) for n, s in shapes.items()}
    return TensorSource("test", {"general.architecture": "mamba2", "mamba2.block_count": LAYERS}, tensors, "mamba2")


def chosen(default, rules=()):
    model = source()
    selector = TypeSelector(model, default, rules, TypeOverrides(), has_imatrix=False)
    return {name: selector.select(tensor).type.name for name, tensor in model.tensors.items()}


def test_a_stock_mix_leaves_small_tensors():
    types = chosen("Q4_K_M")
    assert types["output.weight"] == "q6_K"
    for name, (_, expected) in TENSORS.items():
        assert {types[f"blk.{i}.{name}"] for i in range(LAYERS)} == {expected}, name


def test_a_shipped_recipe_leaves_them_too():
    recipe = load_recipe(find("deepseek-r1-q2_k"))
    types = chosen(recipe.type, recipe.rules)
    for name, (_, expected) in TENSORS.items():
        assert types[f"blk.0.{name}"] == ("f32" if expected == "f32" else "q2_K"), name
