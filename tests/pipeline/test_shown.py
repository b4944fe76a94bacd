"""Results in a notebook: one line, and a table."""

import dataclasses
import inspect
import typing
from importlib import import_module

import numpy as np
import pytest

import ggufmill


def result_types():
    """Every dataclass that a function of the library returns."""
    found = {}
    for verb in ggufmill.VERBS.values():
        for name in verb.functions:
            module = import_module(getattr(ggufmill, name).__module__)
            returned = eval(str(inspect.signature(getattr(ggufmill, name)).return_annotation), {**vars(module)})
            for each in typing.get_args(returned) or (returned,):
                if dataclasses.is_dataclass(each):
                    found[each.__name__] = each
    return found


TYPES = result_types()
WALLS = [
    "long text " * 1000,
    [{"name": f"blk.{i}.ffn_up.weight", "nbytes": i} for i in range(1000)],
    {f"blk.{i}.ffn_up.weight": np.ones(10) for i in range(1000)},
    np.arange(1000.0),
    3.14159265358979,
]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", WALLS, ids=["text", "records", "arrays", "array", "number"])
def test_each_result_is_one_short_line(name, value):
    result = object.__new__(TYPES[name])
    for field in dataclasses.fields(TYPES[name]):
        object.__setattr__(result, field.name, value)
    text = repr(result)
    assert text.startswith(f"<{name}")
    assert len(text) < 200
    assert "\n" not in text
    html = result._repr_html_()
    assert html.count("<table>") == 1
    assert len(html) < 20_000


def test_lines_and_tables_show_figures_and_records():
    lint = ggufmill.lint_recipe("demo")
    assert repr(lint).startswith("<LintResult recipe='demo' rules=")
    explained = ggufmill.explain_recipe(ggufmill.recipes.FOLDER / "demo", type="Q4_K_M")
    assert "Explanation shares=[" in repr(explained)
    assert "<td>Q4_K_M: output</td>" in explained._repr_html_()
    assert "<script>" not in dataclasses.replace(lint, recipe="<script>")._repr_html_()


def test_the_package_shows_what_it_offers():
    assert {name for name in dir(ggufmill) if not name.startswith("__")} == set(ggufmill.__all__)


def test_a_wrong_keyword_is_answered_with_near_ones():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'chunk'; did you mean chunks"):
        ggufmill.perplexity("none.gguf", "none.txt", chunk=8)
