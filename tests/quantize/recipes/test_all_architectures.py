"""Every architecture that can be converted, as its model of one case: each matrix gets a type from stock mixes, and from
shipped recipes with a stock mix for what no rule of theirs names."""

import pytest
from model_cases import CASES
from recorded_models import kept_or_oracle, layout_of, record_of

from ggufmill.convert import open_source
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.type_selection import TypeOverrides, TypeSelector, is_quantizable
from ggufmill.recipes import find, names

MIXES = ("Q4_K_M", "Q2_K", "IQ4_K", "IQ2_M", "MXFP4_MOE")
RECIPES = [load_recipe(find(name)) for name in names() if name.endswith(".txt")]


@pytest.mark.parametrize("case", kept_or_oracle(sorted({row[0]: case for case, row in reversed(CASES.items())}.values())))
def test_every_matrix_gets_a_type(case, tmp_path):
    record_of(case).write(tmp_path)
    source = open_source(tmp_path, mla_layout=layout_of(case))
    matrices = [tensor for tensor in source.tensors.values() if is_quantizable(tensor)]
    assert matrices
    plans = [*((mix, ()) for mix in MIXES), *(("Q4_K_M", recipe.rules) for recipe in RECIPES)]
    for default, rules in plans:
        selector = TypeSelector(source, default, rules, TypeOverrides(), has_imatrix=True)
        for tensor in matrices:
            assert selector.select(tensor).type.name != "f32", (default, tensor.name)
