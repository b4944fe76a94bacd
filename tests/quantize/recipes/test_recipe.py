import pytest

from ggufmill.quantize.recipes.lint import suspicious_rules
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.rules import RecipeError, RuleMatcher, TensorNames, parse_rules
from ggufmill.recipes import find, names


def pairs(text):
    return [(rule.pattern, rule.type.name) for rule in parse_rules(text)]


def test_lines_comments_and_any_case():
    text = """
    # Token embedding and output tensors
    token_embd\\.weight=q8_0
    ## experts
    blk\\.[3-4]\\.ffn_down_exps\\.weight = IQ3_K_R4   # one step up

    ^output\\.weight$=Q6_k
    """
    assert pairs(text) == [
        (r"token_embd\.weight", "q8_0"),
        (r"blk\.[3-4]\.ffn_down_exps\.weight", "iq3_k_r4"),
        (r"^output\.weight$", "q6_K"),
    ]
    assert [rule.line for rule in parse_rules(text)] == [3, 5, 7]


def test_rules_joined_by_commas_as_for_custom_q():
    assert pairs(r"attn_.*=q8_0,ffn_(gate|up)=iq4_k , .*=iq2_k,") == [
        (r"attn_.*", "q8_0"),
        (r"ffn_(gate|up)", "iq4_k"),
        (r".*", "iq2_k"),
    ]


def test_commas_and_equals_signs_within_a_regex():
    text = r"blk\.\d{1,2}\.ffn(?=_up)_up=iq4_k,x(?!=y)=q8_0"
    assert pairs(text) == [(r"blk\.\d{1,2}\.ffn(?=_up)_up", "iq4_k"), (r"x(?!=y)", "q8_0")]


def test_commas_in_brackets_do_not_end_a_rule():
    assert pairs("(?=attn_k,x)b=q8_0,c=q6_K") == [("(?=attn_k,x)b", "q8_0"), ("c", "q6_K")]
    assert pairs("c=q6_K,(?!x=y,)[=q8_0,]b=q8_0") == [("c", "q6_K"), ("(?!x=y,)[=q8_0,]b", "q8_0")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a(b=q8_0,c=q6_K", r"line 1, column 2: 'a\(b' is not a regular expression"),
        ("a=q8_0\nffn_down=iq4_kk", r"recipe, line 2, column 10: there is no tensor type 'iq4_kk'; near it are iq4_k"),
        ("a=q8_0,b", r"line 1, column 8: 'b' is not `regex=type`"),
        ("a(b=q8_0", r"line 1, column 2: 'a\(b' is not a regular expression"),
        ("=q8_0", "is not `regex=type`"),
        ("a=q8_0,,b=q6_K", "line 1, column 8: there is no rule before this comma"),
        ("a=q8_1", "cannot be quantised to q8_1"),
    ],
)
def test_errors_give_the_place_and_similar_names(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_rules(text)


def test_first_match_wins_anywhere_in_the_name():
    rules = parse_rules("ffn_down=q6_K\nffn=q4_K")
    matcher = RuleMatcher(rules)
    assert matcher.first("blk.0.ffn_down.weight") is rules[0]
    assert matcher.first("blk.0.ffn_up.weight") is rules[1]
    assert matcher.first("output.weight") is None


def test_warning_for_character_sets_that_look_like_ranges():
    assert suspicious_rules(parse_rules(r"blk\.[0-10]\.ffn=q8_0")) == [
        r"line 1: [0-10] in 'blk\.[0-10]\.ffn' is a set of single digits, not the numbers 0 to 10"
    ]
    assert not suspicious_rules(parse_rules(r"blk\.[0-9]\.ffn=q8_0"))


def test_toml(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[source]\nmodel = 'x'\n[quantize]\ntype = 'q8_0'\nrules = '''\nffn=iq4_k\n'''\n")
    recipe = load_recipe(path)
    assert [str(r) for r in recipe.rules] == ["ffn=iq4_k"]
    assert recipe.stages["source"] == {"model": "x"}
    assert recipe.type == "Q8_0"
    assert recipe.split_max_size is None


@pytest.mark.parametrize(("written", "size"), [("'5M'", 5_000_000), ("5000000", 5_000_000), ("'1GiB'", 1 << 30)])
def test_toml_sizes_are_text_or_bytes(tmp_path, written, size):
    path = tmp_path / "r.toml"
    path.write_text(f"[quantize]\nsplit_max_size = {written}\n")
    assert load_recipe(path).split_max_size == size


WRONG_VALUES = [
    ("source", "model", "5", "text"),
    ("source", "model", "''", "text"),
    ("convert", "mla_layout", "'sideways'", "one of ik, mainline, legacy"),
    ("imatrix", "text", "5", "text"),
    ("imatrix", "file", "5", "text"),
    ("imatrix", "ctx", "'abc'", "a whole number, at least 4"),
    ("imatrix", "ctx", "-5", "a whole number, at least 4"),
    ("imatrix", "chunks", "'x'", "a whole number, at least 1"),
    ("imatrix", "chunks", "1.5", "a whole number, at least 1"),
    ("imatrix", "chunks", "true", "a whole number, at least 1"),
    ("quantize", "type", "3", "text"),
    ("quantize", "rules", "5", "text"),
    ("quantize", "split_max_size", "0", "a size"),
    ("quantize", "split_max_size", "1.5", "a size"),
    ("quantize", "split_max_size", "'5Q'", "a size"),
    ("validate", "ctx", "3", "a whole number, at least 4"),
    ("validate", "chunks", "-1", "a whole number, at least 1"),
    ("validate", "baseline", "16", "text"),
    ("validate", "prompt", "5", "text"),
    ("validate", "n", "'x'", "a whole number, at least 1"),
    ("validate", "max_ppl_ratio", "'a'", "a number above 0"),
    ("validate", "max_ppl_ratio", "nan", "a number above 0"),
    ("validate", "max_kld", "inf", "a number, at least 0"),
]


@pytest.mark.parametrize(("table", "key", "value", "allowed"), WRONG_VALUES)
def test_toml_values_are_checked(tmp_path, table, key, value, allowed):
    path = tmp_path / "r.toml"
    path.write_text(f"[{table}]\n{key} = {value}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    message = str(error.value)
    assert message.startswith(f"{path}: [{table}] {key} = ")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[quantise]\nrules=''", r"\[quantise\] is not a stage"),
        ("[quantize]\nrule=''", r"\[quantize\] has no key 'rule'; it may have"),
        ("rules = 3", "is not a stage"),
        ("[convert]\ntype='f16'", r"\[convert\] has no key 'type'; it may have allow_lossy_config, architecture, lora"),
        ("[convert]\nouttype='q4_K'", r"\[convert\] outtype = 'q4_K' has to be one of auto, f32, f16"),
        ("[convert]\nouttype='f16'\n[quantize]\ntype='q4_K'", r"\[convert\] outtype and \[quantize\] type both say"),
        ("[source]\nbranch='x'", r"\[source\] has no key 'branch'; it may have model, revision"),
        ("[quantize]\ntype='q4_kk'", r"\[quantize\] type: there is no file type 'q4_kk'; near it are"),
        ("[validate]\ntext='t'\nbaseline='nope'", r"\[validate\] baseline: there is no tensor type 'nope'"),
        ("[validate]\nmax_kld=0.1", r"\[validate\] max_kld needs text"),
        ("[validate]\nprompt='a'", r"\[validate\] prompt needs text"),
        ("[imatrix]\nnextn=true", r"\[imatrix\] nextn needs text"),
        ("[convert]\nmtp=false\n[imatrix]\ntext='a'\nnextn=true", r"\[imatrix\] nextn runs the draft layers, which"),
        ("[convert]\nmtp=false\n[validate]\ntext='a'\nmtp=true", r"\[validate\] mtp runs the draft layers, which"),
        ("[imatrix]\nchunks=3", r"\[imatrix\] chunks needs text"),
        ("[imatrix]\nfile='a'\ntext='b'", r"\[imatrix\] has both text and file"),
        ("[quantize", "r.toml: "),
        ("[quantize]\nrules='ffn=q99'", r"\[quantize\] rules, line 1, column 5"),
    ],
)
def test_toml_errors(tmp_path, text, message):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(("name", "text"), [("r.txt", "a=q8_0"), ("r.toml", "[quantize]\nrules = 'a=q8_0'")])
def test_byte_order_mark(tmp_path, name, text):
    (tmp_path / name).write_text(text, "utf-8-sig")
    assert [rule.pattern for rule in load_recipe(tmp_path / name).rules] == ["a"]


def test_missing_recipe(tmp_path):
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "none.txt")


@pytest.mark.parametrize("name", names())
def test_shipped_recipes_parse_and_name_their_source(name):
    recipe = load_recipe(find(name), several=True)
    assert recipe.rules or recipe.several
    assert not suspicious_rules(recipe.rules)
    if not name.startswith("demo"):
        assert "# Source: " in recipe.text
        assert "# Size: " in recipe.text
        assert "# Perplexity: " in recipe.text


def test_rules_by_number_and_by_name_take_what_they_would_one_by_one():
    text = r"blk\.[12]\..*ffn=q6_K,ffn_down=q5_K,^blk\.3\.ffn_up\.5\.weight$=q8_0,ffn_(up|gate)=q4_K,blk\.7=q3_K,attn=q2_K"
    rules = parse_rules(text)
    matcher = RuleMatcher(rules)
    names = [
        f"blk.{i}.{role}.{j}.weight" for i in range(12) for j in range(8) for role in ("ffn_up", "ffn_down", "attn_q", "x")
    ]
    for name in names:
        assert matcher.first(name) == next((rule for rule in rules if rule.regex.search(name)), None)
    for rule in rules:
        assert rule.first_match(TensorNames(names)) == next(name for name in names if rule.regex.search(name))
