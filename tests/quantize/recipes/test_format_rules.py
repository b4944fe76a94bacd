"""Choices of types written as rules: what is parsed again gives every tensor its type and no other tensor any."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES
from ggufmill.quantize.recipes.format_rules import layers_regex, rules_text
from ggufmill.quantize.recipes.lint import suspicious, unreachable
from ggufmill.quantize.recipes.recipe import Matcher, parse_rules


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 260), min_size=1))
def test_regex_of_numbers_is_exact(numbers):
    pattern = re.compile(f"(?:{layers_regex(sorted(numbers))})")
    assert {n for n in range(1000) if pattern.fullmatch(str(n))} == numbers


def test_ranges_are_short():
    assert layers_regex(range(3, 61)) == "[3-9]|[1-5][0-9]|60"
    assert layers_regex([7]) == "7"
    assert layers_regex([1, 2, 5]) == "[125]"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["iq2_k", "iq3_k_r4", "q6_K"]), min_size=1, max_size=70), st.integers(0, 3))
def test_rules_give_every_tensor_its_type(kinds, others):
    roles = ("ffn_up.weight", "ffn_up_exps.weight")
    types = {f"blk.{i}.{role}": TYPES[kind] for role in roles for i, kind in enumerate(kinds)}
    types |= {"output.weight": TYPES["q6_K"], "token_embd.weight": TYPES["q4_K"]}
    foreign = [f"blk.{len(kinds) + i}.ffn_up.weight" for i in range(others)]
    rules = parse_rules(rules_text(types, foreign))
    matcher = Matcher(rules)
    for name, kind in types.items():
        rule = matcher.first(name)
        assert rule is not None
        assert rule.type is kind
        assert sum(r.regex.search(name) is not None for r in rules) == 1
    assert all(matcher.first(name) is None for name in [*foreign, "blk.0.attn_output.weight", "blk.0.ffn_down.weight"])
    assert not suspicious(rules)
    assert not unreachable(rules)
    assert len(rules) <= 2 + 2 * len(set(kinds))
