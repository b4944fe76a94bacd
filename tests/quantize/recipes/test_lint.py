"""Linting recipes without a model, and the shares of rules in a plan."""

import numpy as np
import pytest

from ggufmill.formats import SourceTensor, TensorSource
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.lint import (
    TERNARY_TYPES,
    rule_shares,
    rules_needing_imatrix,
    suspicious_rules,
    unportable_rules,
    unreachable_rules,
)
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.rules import RecipeError, parse_rules
from ggufmill.quantize.recipes.shell import rules_from_shell

SCRIPT = r"""#!/usr/bin/env bash
custom="
## Attention
blk\..*\.attn_.*=q8_0
blk\.([3-9]|[1-5][0-9]|60)\.ffn_down_exps\.weight=iq3_k_r4
"

custom=$(
  echo "$custom" | grep -v '^#' | sed -Ez 's:\n+:,:g;s:,$::;s:^,::'
)
./build/bin/llama-quantize --custom-q "$custom" in.gguf out.gguf IQ3_K_R4 24
"""


def _source(names, shape=(256, 4)):
    def read(start, stop):
        return np.zeros((stop - start, shape[0]), np.float32)

    return TensorSource("s", {}, {name: SourceTensor(name, shape, "f32", read) for name in names}, "id")


def test_posted_shell_script_is_a_recipe(tmp_path):
    (tmp_path / "post.txt").write_text(SCRIPT)
    rules = load_recipe(tmp_path / "post.txt").rules
    assert [(r.line, r.type.name) for r in rules] == [(4, "q8_0"), (5, "iq3_k_r4")]
    assert [str(r) for r in parse_rules(rules_from_shell('custom2="a=q8_0,b=q6_K"\n'))] == ["a=q8_0", "b=q6_K"]
    plain = "ffn=q8_0\n"
    assert rules_from_shell(plain) == plain


DOCUMENT = r"""#!/bin/sh
custom=$(cat <<'EOF'
# Attention
blk\..*\.attn_.*=q8_0
ffn=iq4_k
EOF
)
./llama-quantize --custom-q "$custom" in.gguf out.gguf IQ4_K 24
"""
READ = """read -r -d '' rules <<-"END" || true
\tattn=q8_0
\tEND
"""


@pytest.mark.parametrize(
    ("script", "rules"),
    [
        (DOCUMENT, [(4, r"blk\..*\.attn_.*=q8_0"), (5, "ffn=iq4_k")]),
        (READ, [(2, "attn=q8_0")]),
        ('./llama-quantize \\\n  --custom-q "a=q8_0,b=q6_K" \\\n  in.gguf out.gguf Q4_K 8\n', [(2, "a=q8_0"), (2, "b=q6_K")]),
        ('llama-quantize --custom-q "a=q8_0,\\\nb=q6_K" in.gguf out.gguf Q4_K\n', [(1, "a=q8_0"), (2, "b=q6_K")]),
        ("llama-quantize --custom-q=a=q8_0,b=q6_K in.gguf out.gguf Q4_K\n", [(1, "a=q8_0"), (1, "b=q6_K")]),
        ("llama-quantize --custom-q 'a=q8_0' --custom-q 'b=q6_K' in out Q4_K\n", [(1, "a=q8_0"), (1, "b=q6_K")]),
        ('# from: llama-quantize --custom-q "c=q5_K" in out\na=q8_0\n', [(2, "a=q8_0")]),
    ],
)
def test_places_of_rules_in_shell_scripts(tmp_path, script, rules):
    (tmp_path / "post.sh").write_text(script)
    recipe = load_recipe(tmp_path / "post.sh")
    assert [(rule.line, str(rule)) for rule in recipe.rules] == rules
    assert [str(rule) for rule in parse_rules(recipe.rules_text)] == [text for _, text in rules]


def test_unreachable_rules():
    rules = parse_rules("ffn_up=q8_0\nffn_up=iq4_k\n.*=q6_K\nattn=q8_0\n")
    warnings = unreachable_rules(rules)
    assert len(warnings) == 2
    assert "line 2" in warnings[0]
    assert "says q8_0 and comes first" in warnings[0]
    assert "line 4" in warnings[1]
    assert "line 3" in warnings[1]
    assert not unreachable_rules(parse_rules("ffn_up=q8_0\n.*=q6_K\n"))


@pytest.mark.parametrize("name", TERNARY_TYPES)
def test_warning_for_ternary_types(name):
    assert "ternary" in suspicious_rules(parse_rules(f"ffn={name}"))[0]


def test_rules_that_llama_quantize_would_split():
    assert "a comma" in unportable_rules(parse_rules("blk.{1,2}.ffn=q8_0"))[0]
    assert not unportable_rules(parse_rules("ffn=q8_0"))


def test_rules_whose_types_need_an_imatrix():
    assert not rules_needing_imatrix(parse_rules("ffn=q8_0,attn=iq4_k_r4"))
    assert rules_needing_imatrix(parse_rules("a=q8_0\nb=iq2_xs_r4")) == ["iq2_xs_r4 needs an imatrix: 1 rule, first line 2"]


def test_rule_shares_add_up_to_the_plan(tmp_path):
    names = [f"blk.{i}.ffn_{part}.weight" for i in range(3) for part in ("up", "down")] + ["output.weight"]
    plan = plan_quantize(_source(names), tmp_path / "o.gguf", type="Q4_K_M", rules=parse_rules("ffn_down=q8_0"))
    shares = {share.rule: share for share in rule_shares(plan)}
    assert shares["ffn_down=q8_0"].tensors == 3
    assert shares["ffn_down=q8_0"].bits_per_weight == 8.5
    assert shares["Q4_K_M"].types == ["q4_K"]
    assert shares["Q4_K_M: output"].types == ["q6_K"]
    assert sum(share.nbytes for share in shares.values()) == plan.total_bytes


def test_thousands_of_rules_over_thousands_of_tensors(tmp_path):
    names = [f"blk.{i}.ffn_{part}.weight" for i in range(1000) for part in ("up", "down", "gate")]
    literal = "\n".join("^" + name.replace(".", r"\.") + "$=q8_0" for name in reversed(names))
    unmatched = "\n".join("^" + name.replace("blk.", "blk.9").replace(".", r"\.") + "$=q8_0" for name in names[:1500])
    source = _source(names)
    plan = plan_quantize(source, tmp_path / "o.gguf", rules=parse_rules(literal + "\n" + unmatched))
    assert {o.type.name for o in plan.outputs} == {"q8_0"}
    assert len(plan.warnings) >= 500


def test_a_pattern_of_the_output_that_takes_those_of_attention():
    [warning] = suspicious_rules(parse_rules(r"output\.weight=q8_0"))
    assert warning.startswith(r"line 1: output\.weight=q8_0 takes attn_output.weight of every layer too; ^output\.weight")
    assert not suspicious_rules(parse_rules("^output\\.weight=q8_0\nattn_output=q8_0\n.*=q4_K"))


@pytest.mark.parametrize(
    ("pattern", "known"),
    [("mlp.down_proj", "ffn_down"), (r"self_attn\.q_proj", "attn_q"), ("lm_head", "output"), (r"model\.layers", "blk")],
)
def test_names_of_checkpoints_are_answered_with_those_of_a_gguf(pattern, known):
    [warning] = suspicious_rules(parse_rules(f"{pattern}=q8_0"))
    assert warning.endswith(f"is a name in checkpoints, which GGUF calls {known}")


def test_backslashes_stand_once():
    assert r"'blk\.[0-10]'" in suspicious_rules(parse_rules(r"blk\.[0-10]=q8_0"))[0]


def test_all_wrong_rules_are_named():
    with pytest.raises(RecipeError) as error:
        parse_rules("a=q9\nb=q8_0,(=q4_0\nc=iq99_k,d=q8_0\ne")
    for said in (
        "line 1, column 3: there is no tensor type 'q9'",
        "line 2, column",
        "line 3, column 3: there",
        "line 4, column 1",
    ):
        assert said in str(error.value)
    with pytest.raises(RecipeError, match="what follows was not read"):
        parse_rules("a=q9," * 10_000)


def test_shares_of_a_plan_come_in_the_order_of_the_rules_with_their_lines(tmp_path):
    names = [f"blk.{i}.ffn_{part}.weight" for i in range(3) for part in ("up", "down")] + ["output.weight"]
    rules = parse_rules("# a\nffn_down=q8_0\nffn_up=q6_K\n")
    plan = plan_quantize(_source(names), tmp_path / "o.gguf", type="Q4_K_M", rules=rules)
    found = [(share.rule, share.line) for share in rule_shares(plan, rules)]
    assert found == [("ffn_down=q8_0", 2), ("ffn_up=q6_K", 3), ("Q4_K_M: output", None)]
