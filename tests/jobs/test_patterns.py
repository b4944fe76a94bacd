"""Names are matched as `re` matches them, by whichever engine, and a pattern that would never end is refused."""

import re
import subprocess
import sys

import pytest

from ggufmill.errors import PlanError
from ggufmill.formats.source import form_of
from ggufmill.jobs import patterns
from ggufmill.jobs.patterns import NamePattern, PatternError
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.recipes import find, names

ROLES = (
    "attn_q",
    "attn_kv_b",
    "attn_output",
    "ffn_gate_exps",
    "ffn_down_shexp",
    "ffn_up",
    "ffn_gate_inp",
    "attn_norm",
    "nextn.eh_proj",
)
NAMES = ["token_embd.weight", "output.weight", "output_norm.weight", ""]
NAMES += [f"blk.{layer}.{role}.weight" for layer in (0, 1, 3, 9, 10, 11, 25, 60, 92) for role in ROLES]


@pytest.mark.parametrize("name", names())
def test_rules_of_recipes_match_as_with_re(name):
    recipe = load_recipe(find(name), several=True)
    for rule in [rule for each in (recipe, *recipe.several) for rule in each.rules]:
        pattern, plain = NamePattern(rule.pattern), re.compile(rule.pattern)
        for tensor in NAMES:
            assert pattern.search(tensor) == bool(pattern._limited.search(tensor)) == bool(plain.search(tensor))


ODD = [
    "(e{d})+",
    "(x{e<=1})+e",
    "([[:alpha:]]+)+",
    "([][a-z]+)+_",
    r"([\]a-z.]+)+t$",
    "((?i:BLK).*)+",
    "(?x) (.+) + exps",
    "(?P<a>f)(?P=a)(n)+",
    "(a(?#no)+)+",
    "(_|[k]){2}",
    "(.+?)*?q",
    "(?>a+)+t",
    "(?:a++|b)+t",
    "(?(1)a|b)+",
    "(a)?(?(1)t|b)+",
    r"(\d|1)+\.(\w|_)+",
    "(?!blk)(.+)+$",
    "(?<=k)(.)+",
    "(?s:.+)+",
    "{(a)+",
    "(a{,2})+t",
    "a{,}(t)+",
    r"(\{)*{2}(b)+",
]


@pytest.mark.parametrize("text", ODD)
def test_both_engines_read_the_same_language(text):
    try:
        plain = re.compile(text)
    except re.error:
        with pytest.raises(PatternError):
            NamePattern(text)
        return
    pattern = NamePattern(text)
    assert pattern._has_many_choices
    for name in ["blk.1.f", "attn_k", "exps", "[", "]a.t", "{a", "{{b", "attn", "xe", "ex{e<=1}e", "e{d}", ":a]"]:
        assert pattern.search(name) == bool(plain.search(name)), name


ENDLESS = ["([a-z_.0-9]+)+!", "(.|.)" * 40 + "[!?]", r"(.{0,1000}){0,1000}\d{9}", "(?x)(.+) +[!?]", ".?" * 60 + "." * 70 + "!"]
_SEARCH = """
import sys
from ggufmill.errors import PlanError
from ggufmill.jobs import patterns
patterns.TIME_LIMIT = 0.2
try:
    print(patterns.NamePattern(sys.argv[1]).search("blk.10.ffn_gate_inp_exps.weight" * 2))
except PlanError as error:
    print(error)
"""


@pytest.mark.parametrize("text", ENDLESS)
def test_patterns_that_would_never_end(text):
    done = subprocess.run([sys.executable, "-c", _SEARCH, text], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n" or "takes more than 0.2 s; write it with fewer repeats" in done.stdout
    assert done.stdout.count("\n") == 1


def test_one_line_for_a_search_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.1)
    with pytest.raises(PlanError, match="takes more than 0.1 s; write it with fewer repeats"):
        NamePattern("(.|.)" * 40 + "[!?]").search("a" * 60)


def test_repeats_that_no_name_is_long_enough_for():
    with pytest.raises(PlanError, match="match no name"):
        NamePattern("((a{1000}){1000}){1000}").search("a")


def test_long_names_are_matched_under_the_limit_too():
    pattern = NamePattern(r"a.*b$")
    assert pattern.search("a" * 50_000 + "b")
    assert not pattern.search("b" * 50_000)


NUMBERED = [
    f"{start}.{number}.{role}{more}.weight"
    for start in ("blk", "x")
    for number in (0, 7, 12, 123, 60)
    for role in ROLES
    for more in ("", ".0", ".31", ".5.8")
]
NUMBERLESS = ["attn", r"ffn_(gate|up)_exps\.weight", r"^blk\..*\.attn_[qk]", "(?:ffn|attn)_.*weight$", r"k.*?\.ff?n+"]
NUMBERLESS += ["()", "w|^$", r"\..*\."]
NUMBERED_PATTERNS = [r"blk\.\d+\.", "blk.1", r"blk\.[0-9]", "b.k", ".+attn", r"\.[^a]", "[a-z]k", "7", r"\w+\.w", "(?i)BLK"]
NUMBERED_PATTERNS += ["a{2}", "(?<=k)", "f++"]


@pytest.mark.parametrize("text", NUMBERLESS)
def test_a_pattern_that_ignores_numbers_finds_the_same_in_all_names_of_a_form(text):
    pattern = NamePattern(text)
    assert pattern.ignores_numbers
    assert all(pattern.search(name) == pattern.search(form_of(name)) for name in NUMBERED)


@pytest.mark.parametrize("text", NUMBERED_PATTERNS)
def test_a_pattern_that_may_depend_on_numbers_is_tried_with_each_name(text):
    assert not NamePattern(text).ignores_numbers


def test_the_form_of_a_name_has_no_numbers_but_those_of_words():
    assert form_of("blk.17.ssm_conv1d.3.weight") == "blk.0.ssm_conv1d.0.weight"
    assert form_of("blk.1.2.33.x.weight") == "blk.0.0.0.x.weight"
    assert form_of("output.weight") == "output.weight"
