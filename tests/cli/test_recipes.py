"""`ggufmill recipes`: checking a recipe by itself and against a model."""

import json
from pathlib import Path

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


def test_explain_says_who_takes_what(mill):
    code, out, _ = mill("recipes", "explain", DEMO, "--recipe", "demo", "--json")
    assert code == 0
    found = json.loads(out)
    assert sum(rule["nbytes"] for rule in found["rules"]) == found["total_bytes"]
    assert any(rule["rule"] == r"token_embd\.weight=q8_0" and rule["tensors"] == 1 for rule in found["rules"])
    code, out, _ = mill("recipes", "explain", DEMO, "--type", "iq2_xxs")
    assert code == 0
    assert "iq2_xxs needs an imatrix" in out
    assert mill("recipes", "explain", DEMO)[0] == 2
