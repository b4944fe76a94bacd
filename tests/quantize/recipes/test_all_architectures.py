"""Every architecture that can be converted, as its model of one case: each matrix gets a type from stock mixes, and from
shipped recipes with a stock mix for what no rule of theirs names."""

import json

import numpy as np
import pytest
from checkpoint_cases import new_config, oracle
from model_cases import CASES
from model_cases.common import COMMON

from ggufmill.convert.architectures.registry import model_spec
from ggufmill.convert.config import Config
from ggufmill.formats import SourceTensor, TensorSource
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.type_selection import TypeOverrides, TypeSelector, is_quantizable
from ggufmill.recipes import find, names

MIXES = ("Q4_K_M", "Q2_K", "IQ4_K", "IQ2_M", "MXFP4_MOE")
RECIPES = [load_recipe(find(name)) for name in names() if name.endswith(".txt")]


def source_of(case, folder):
    """The tensors of a case as its config.json says, without numbers."""
    _, transformers = oracle()
    family, options, *layout = CASES[case]
    architecture, config = new_config(transformers, family, COMMON | options)
    values = json.loads(config.to_json_string()) | {"architectures": [architecture.__name__]}
    model = model_spec(Config(folder / "config.json", values), layout[0] if layout else "ik")
    shapes = {spec.name: tuple(reversed(spec.shape)) for spec in model.tensors}
    tensors = {n: SourceTensor(n, s, "f32", lambda start, stop: np.zeros((stop - start, 1))) for n, s in shapes.items()}
    return TensorSource("test", {"general.architecture": model.architecture, **model.metadata}, tensors, "test")


@pytest.mark.parametrize("case", sorted({options[0]: case for case, options in reversed(CASES.items())}.values()))
def test_every_matrix_gets_a_type(case, tmp_path):
    source = source_of(case, tmp_path)
    matrices = [tensor for tensor in source.tensors.values() if is_quantizable(tensor)]
    assert matrices
    plans = [*((mix, ()) for mix in MIXES), *(("Q4_K_M", recipe.rules) for recipe in RECIPES)]
    for default, rules in plans:
        selector = TypeSelector(source, default, rules, TypeOverrides(), has_imatrix=True)
        for tensor in matrices:
            assert selector.select(tensor).type.name != "f32", (default, tensor.name)
