"""`ggufmill recipes`: checking a recipe by itself and against a model."""

import json
from pathlib import Path

import pytest

from ggufmill.convert import open_source
from ggufmill.quantize.importance import AssumedImportance
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.recipes import find, names

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def test_lint_by_itself_and_against_a_model(mill, tmp_path):
    recipe = tmp_path / "r.txt"
    recipe.write_text("blk.[0-12].ffn=q8_0\nblk=iq4_k\nblk=q8_0\n")
    code, out, _ = mill("recipes", "lint", recipe, "--json")
    assert code == 0
    assert len(json.loads(out)["warnings"]) == 2
    code, out, err = mill("recipes", "lint", recipe, DEMO, "--strict")
    assert code == 1
    assert "blk=q8_0 never applies; blk=iq4_k comes first" in out
    assert "has 4 warnings" in err
    assert mill("recipes", "lint", "demo", DEMO, "--strict")[0] == 0


def test_explain_lists_the_share_of_each_rule(mill):
    code, out, _ = mill("recipes", "explain", DEMO, "--recipe", "demo", "--json")
    assert code == 0
    result = json.loads(out)
    assert sum(rule["nbytes"] for rule in result["rules"]) == result["total_bytes"]
    assert any(rule["rule"] == r"token_embd\.weight=q8_0" and rule["tensors"] == 1 for rule in result["rules"])
    code, out, _ = mill("recipes", "explain", DEMO, "--type", "iq2_xxs")
    assert code == 0
    assert "iq2_xxs needs an imatrix" in out
    assert mill("recipes", "explain", DEMO)[0] == 2


def test_explain_gives_the_size_that_quantize_plans(mill):
    """Only with its metadata is a file's size known: `quantize --dry-run` has them all."""
    out = mill("recipes", "explain", DEMO, "--recipe", "demo")[1]
    assert out.splitlines()[-1] == "74 tensors, 5.599 bits per weight, about 6.027 MiB"
    planned = mill("quantize", DEMO, "o.gguf", "--recipe", "demo", "--dry-run", "--no-timing")[1]
    assert "74 tensors, 5.599 bits per weight, 6.027 MiB (6,319," in planned


def test_lint_names_types_that_need_an_imatrix_without_a_model_too(mill, tmp_path):
    recipe = tmp_path / "r.txt"
    recipe.write_text("ffn_up=iq2_xxs\nffn_down=iq4_k\nffn_gate=iq2_xxs\nattn=iq1_s_r4\n")
    code, out, _ = mill("recipes", "lint", recipe, "--strict", "--json")
    assert code == 0
    assert json.loads(out)["notes"] == [
        "iq2_xxs needs an imatrix: 2 rules, first line 1",
        "iq1_s_r4 needs an imatrix: 1 rule, first line 4",
    ]
    computed = tmp_path / "r.toml"
    computed.write_text("[imatrix]\ntext = 'c.txt'\n[quantize]\nrules = 'ffn_up=iq2_xxs'\n")
    assert json.loads(mill("recipes", "lint", computed, "--json")[1])["notes"] == []


def test_a_recipe_with_a_target_leaves_types_open(mill, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[quantize]\ntarget_bpw = 4\nrules = 'token_embd=q8_0'\n")
    code, out, err = mill("recipes", "lint", recipe, DEMO, "--json", "--strict")
    assert code == 0, err
    assert json.loads(out)["warnings"] == []
    assert "r.toml has a target" in err


PUBLISHED = {  # GiB, and bits per weight
    "deepseek-v3-iq4_k_r4.txt": (386.183, 4.936),
    "deepseek-r1-0528-iq4_ks_r4.txt": (367.774, 4.701),
    "deepseek-v3-iq2_k_r4.txt": (226.003, 2.889),
    "deepseek-r1-0528-dq4_k_r4.txt": (413.144, 5.281),
    "deepseek-r1-0528-iq2_k_r4.txt": (219.019, 2.799),
}


@pytest.mark.slow
def test_shipped_recipes_fit_their_model(mill, header_only_deepseek_v3):
    """Each on the headers of the 671 B model it is for: sizes as published; the one warning is what llama-quantize does there
    too."""
    listed = json.loads(mill("recipes", "list", "--json")[1])["recipes"]
    assert [recipe["name"] for recipe in listed] == names()
    assert all(recipe["about"] for recipe in listed)
    fallback = "another type than asked for: blk.0.attn_k_b.weight (iq4_nl) and 60 more"
    expected = {"deepseek-r1-q2_k.txt": [f"{fallback}: q2_K asked for; 128 columns are no multiple of 256"]}
    source, assumed = open_source(header_only_deepseek_v3, vocab=False), AssumedImportance({})
    assert set(PUBLISHED) < set(names())
    for name in names():
        recipe = load_recipe(find(name), several=True)
        if name.endswith(".txt"):
            plan = plan_quantize(source, "out.gguf", rules=recipe.rules, importance=assumed, ignore_imatrix_rules=True)
            warnings = [w for w in plan.warnings if "decides nothing" not in w]  # people give rules to norms too
            assert warnings == expected.get(name, []), name
            if name in PUBLISHED:
                assert (round(plan.total_bytes / 2**30, 3), round(plan.bits_per_weight, 3)) == PUBLISHED[name]
        assert mill("recipes", "lint", name, "--strict")[0] == 0
