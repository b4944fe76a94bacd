"""Types written as rules: parsed again, they give every tensor its type and match no other tensor."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES
from ggufmill.quantize.recipes.format_rules import layers_regex, rules_text
from ggufmill.quantize.recipes.lint import suspicious_rules, unreachable_rules
from ggufmill.quantize.recipes.rules import RuleMatcher, parse_rules


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 260), min_size=1))
def test_layers_regex_is_exact(numbers):
    pattern = re.compile(f"(?:{layers_regex(sorted(numbers))})")
    assert {n for n in range(1000) if pattern.fullmatch(str(n))} == numbers


def test_layers_regex_uses_ranges():
    assert layers_regex(range(3, 61)) == "[3-9]|[1-5][0-9]|60"
    assert layers_regex([7]) == "7"
    assert layers_regex([1, 2, 5]) == "[125]"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["iq2_k", "iq3_k_r4", "q6_K"]), min_size=1, max_size=70), st.integers(0, 3))
def test_rules_give_every_tensor_its_type(type_names, others):
    roles = ("ffn_up.weight", "ffn_up_exps.weight")
    types = {f"blk.{i}.{role}": TYPES[name] for role in roles for i, name in enumerate(type_names)}
    types |= {"output.weight": TYPES["q6_K"], "token_embd.weight": TYPES["q4_K"]}
    other_names = [f"blk.{len(type_names) + i}.ffn_up.weight" for i in range(others)]
    rules = parse_rules(rules_text(types, other_names))
    matcher = RuleMatcher(rules)
    for name, tensor_type in types.items():
        rule = matcher.first(name)
        assert rule is not None
        assert rule.type is tensor_type
        assert sum(r.regex.search(name) for r in rules) == 1
    assert all(matcher.first(name) is None for name in [*other_names, "blk.0.attn_output.weight", "blk.0.ffn_down.weight"])
    assert not suspicious_rules(rules)
    assert not unreachable_rules(rules)
    assert len(rules) <= 2 + 2 * len(set(type_names))
