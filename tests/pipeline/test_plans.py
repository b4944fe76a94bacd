"""Every verb that plans makes the same plan of the same request: recipe, options and defaults count alike for all."""

import json

import numpy as np
import pytest

import ggufmill
from ggufmill.errors import MillError, PlanError
from ggufmill.formats.loaders import PROGRAMS
from ggufmill.recipes import FOLDER, names

CALIBRATION = FOLDER / "demo" / "calibration.txt"


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory):
    """An importance matrix with data for every matrix of the demo."""
    path = tmp_path_factory.mktemp("data") / "demo.imatrix"
    ggufmill.compute_imatrix(
        FOLDER / "demo", CALIBRATION, path, n_ctx=64, chunks=2, process_output=True, process_embedding=True
    )
    return path


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """The demo under the name of an architecture that is not known, and the name that it has."""
    folder = tmp_path_factory.mktemp("renamed") / "demo"
    folder.mkdir()
    config = json.loads((FOLDER / "demo" / "config.json").read_text())
    for path in (FOLDER / "demo").iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NewForCausalLM"]}))
    return folder, config["architectures"][0]


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def rows(plan):
    """Name, type and size of each tensor."""
    return [(name, kind.type.name, kind.nbytes) for name, kind in plan.outputs.entries()]


def test_a_recipe_s_program_counts_for_explain_and_lint(recipe):
    path = recipe('[quantize]\nfor = "llama.cpp"\ntype = "Q8_0"\nrules = "ffn_down=iq4_k"\n')
    for call in (
        lambda: ggufmill.quantize_model(FOLDER / "demo", "out.gguf", recipe=path, dry_run=True),
        lambda: ggufmill.explain_recipe(FOLDER / "demo", recipe=path),
        lambda: ggufmill.lint_recipe(path, FOLDER / "demo"),
        lambda: ggufmill.plan_memory(FOLDER / "demo", recipe=path),
    ):
        with pytest.raises(PlanError, match=r"llama\.cpp does not know"):
            call()


def test_a_recipe_s_outtype_counts_for_plan(recipe):
    path = recipe('[convert]\nouttype = "q8_0"\n[quantize]\nrules = "attn_q=q4_0"\n')
    expected = ggufmill.quantize_model(FOLDER / "demo", "out.gguf", recipe=path, dry_run=True).plan
    assert {kind for _, kind, _ in rows(expected)} == {"q8_0", "q4_0", "f32"}
    planned = ggufmill.plan_memory(FOLDER / "demo", recipe=path)
    assert (planned.chosen.nbytes, planned.chosen.bits_per_weight) == (expected.total_bytes, expected.bits_per_weight)


def test_a_recipe_s_architecture_counts_for_plan(recipe, renamed):
    folder, architecture = renamed
    path = recipe(f'[convert]\narchitecture = "{architecture}"\n[quantize]\ntype = "Q8_0"\n')
    expected = ggufmill.quantize_model(folder, "out.gguf", recipe=path, dry_run=True).plan
    assert ggufmill.plan_memory(folder, recipe=path).chosen.nbytes == expected.total_bytes
    with pytest.raises(MillError, match="NewForCausalLM"):
        ggufmill.plan_memory(folder, type="Q8_0")


def test_a_recipe_s_adapter_counts_for_plan(recipe):
    path = recipe('[convert]\nlora = "gone.gguf"\n[quantize]\ntype = "Q8_0"\n')
    for call in (
        lambda: ggufmill.quantize_model(FOLDER / "demo", "out.gguf", recipe=path, dry_run=True),
        lambda: ggufmill.explain_recipe(FOLDER / "demo", recipe=path),
        lambda: ggufmill.plan_memory(FOLDER / "demo", recipe=path),
    ):
        with pytest.raises(MillError, match=r"gone\.gguf"):
            call()


ODD = {
    "outtype": '[convert]\nouttype = "q8_0"\n[quantize]\nrules = "exps=q4_0"\n',
    "rules alone": '[quantize]\nrules = "ffn_down=iq4_k\\nattn=q5_K"\n',
    "mix": '[quantize]\ntype = "Q3_K_L"\n',
    "without vocabulary": '[convert]\nvocab = false\n[quantize]\ntype = "IQ4_XS"\n',
    "split": '[quantize]\ntype = "Q4_K_M"\nsplit_max_size = "4M"\n',
    **{f"for {program}": f'[quantize]\nfor = "{program}"\ntype = "Q4_K_S"\n' for program in PROGRAMS if program != "ollama"},
}


def _same(planned, explained, expected):
    assert rows(explained) == rows(expected)
    assert explained.warnings == [w for w in expected.warnings if not w.startswith("no rule takes")] or explained.warnings == [
        *expected.warnings
    ]
    assert [(at.file, at.offset) for at in explained.locations] == [(at.file, at.offset) for at in expected.locations]
    assert [file.nbytes for file in explained.files] == [file.nbytes for file in expected.files]
    assert [(w.type, w.nbytes) for _, w in planned.chosen.outputs.entries()] == [
        (w.type, w.nbytes) for _, w in expected.outputs.entries()
    ]


@pytest.mark.parametrize("name", [n for n in names() if n != "demo-quants.toml"])
def test_every_verb_plans_a_bundled_recipe_alike(name, imatrix):
    """Types and sizes, offsets and the files, of the demo (most of whose tensors such a recipe may not know)."""
    given = {"recipe": name, "imatrix": imatrix, "allow_requantize": True, "ignore_imatrix_rules": True}
    expected = ggufmill.quantize_model(FOLDER / "demo", "out.gguf", dry_run=True, no_timing=True, **given).plan
    explained = ggufmill.explain_recipe(FOLDER / "demo", recipe=name, imatrix=imatrix).plan
    _same(ggufmill.plan_memory(FOLDER / "demo", recipe=name), explained, expected)


@pytest.mark.parametrize("name", ODD)
def test_every_verb_plans_an_odd_recipe_alike(name, recipe, imatrix, tmp_path):
    path = recipe(ODD[name])
    expected = ggufmill.quantize_model(
        FOLDER / "demo", "out.gguf", recipe=path, imatrix=imatrix, dry_run=True, no_timing=True
    ).plan
    explained = ggufmill.explain_recipe(FOLDER / "demo", recipe=path, imatrix=imatrix).plan
    _same(ggufmill.plan_memory(FOLDER / "demo", recipe=path), explained, expected)
    run = f'[source]\nmodel = "{FOLDER / "demo"}"\n[imatrix]\nfile = "{imatrix}"\n'
    whole = tmp_path / "whole.toml"
    whole.write_text(run + ODD[name])
    made = ggufmill.run_recipe(whole, tmp_path / "results", dry_run=True).quants[0].plan
    assert rows(made) == rows(expected)
    assert np.array_equal(made.locations.files, expected.locations.files)


def test_convert_plans_as_a_recipe_s_outtype(recipe):
    path = recipe('[convert]\nouttype = "q8_0"\n')
    converted = ggufmill.convert_model(FOLDER / "demo", "out.gguf", outtype="q8_0", dry_run=True).plan
    assert rows(converted) == rows(ggufmill.explain_recipe(FOLDER / "demo", recipe=path).plan)
