from typing import Any

import numpy as np
import pytest

from ggufmill.formats import TYPES, MillError, PlanError, SourceTensor, TensorSource, open_gguf
from ggufmill.jobs.execute import execute
from ggufmill.quantize import decode, encode, gguf_source
from ggufmill.quantize.importance import AssumedImportance, Importance, PendingImportance
from ggufmill.quantize.planning import outputs_of, plan_quantize
from ggufmill.quantize.recipes.mixes import file_types
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.rules import parse_rules
from ggufmill.quantize.recipes.type_selection import TypeOverrides, TypeSelector
from ggufmill.recipes import find


def deepseek_v3(layers=61, dense=3, experts=256):
    """Names and shapes (ne order) of DeepSeek-V3 in the layout with attn_kv_b, attn_k_b and attn_v_b."""
    yield "token_embd.weight", (7168, 129280)
    for i in range(layers):
        attention = {
            "attn_norm": (7168,),
            "attn_q_a": (7168, 1536),
            "attn_q_a_norm": (1536,),
            "attn_q_b": (1536, 24576),
            "attn_kv_a_mqa": (7168, 576),
            "attn_kv_a_norm": (512,),
            "attn_kv_b": (512, 32768),
            "attn_k_b": (128, 65536),
            "attn_v_b": (512, 16384),
            "attn_output": (16384, 7168),
            "ffn_norm": (7168,),
        }
        if i < dense:
            rest = {"ffn_gate": (7168, 18432), "ffn_up": (7168, 18432), "ffn_down": (18432, 7168)}
        else:
            rest = {
                "ffn_gate_inp": (7168, experts),
                "ffn_gate_exps": (7168, 2048, experts),
                "ffn_up_exps": (7168, 2048, experts),
                "ffn_down_exps": (2048, 7168, experts),
                "ffn_gate_shexp": (7168, 2048),
                "ffn_up_shexp": (7168, 2048),
                "ffn_down_shexp": (2048, 7168),
            }
            yield f"blk.{i}.exp_probs_b.bias", (experts,)
        for name, shape in (attention | rest).items():
            yield f"blk.{i}.{name}.weight", shape
    yield "output_norm.weight", (7168,)
    yield "output.weight", (7168, 129280)


def source_of(shapes, source_type="bf16", stored=None):
    def tensor(name, shape):
        def read(start, stop):
            rng = np.random.default_rng(abs(hash(name)) % 1000)
            return rng.standard_normal((int(np.prod(shape[1:])), shape[0]), np.float32)[start:stop]

        return SourceTensor(name, shape, source_type, read, None, stored)

    return TensorSource("test", {"general.architecture": "deepseek2"}, {n: tensor(n, s) for n, s in shapes}, "id")


@pytest.fixture(scope="module")
def v3():
    return source_of(deepseek_v3())


# Sizes that llama.cpp's loader printed for the published files, GiB and bits per weight; the last one was computed here
PUBLISHED = [
    ("deepseek-v3-iq4_k_r4.txt", 386.183, 4.936),
    ("deepseek-r1-0528-iq4_ks_r4.txt", 367.774, 4.701),
    ("deepseek-v3-iq2_k_r4.txt", 226.003, 2.889),
    ("deepseek-r1-0528-dq4_k_r4.txt", 413.144, 5.281),
    ("deepseek-r1-0528-iq2_k_r4.txt", 219.019, 2.799),
    ("deepseek-r1-q2_k_r4.txt", 238.69, None),
    ("deepseek-r1-q2_k.txt", 227.689, 2.910),
    ("deepseek-r1-bf16-q5_k-q6_k.txt", 479.639, 6.131),
]


@pytest.mark.parametrize(("name", "gib", "bits"), PUBLISHED)
def test_sizes_match_the_published_ones_to_the_last_digit(v3, tmp_path, name, gib, bits):
    recipe = load_recipe(find(name))
    plan = plan_quantize(v3, tmp_path / "out.gguf", rules=recipe.rules)
    assert len(plan.outputs) == 1147
    digits = len(str(gib).split(".")[1])
    assert round(plan.total_bytes / 2**30, digits) == gib
    if bits is not None:
        assert round(plan.bits_per_weight, 3) == bits
    assert not [w for w in plan.warnings if "no rule takes" in w]


def test_sizes_of_parts_match_the_published_log(v3, tmp_path):
    plan = plan_quantize(v3, tmp_path / "o.gguf", rules=load_recipe(find("deepseek-v3-iq4_k_r4.txt")).rules)
    experts = sum(o.nbytes for o in plan.outputs if "_exps" in o.name)
    assert experts / 2**20 == 376768.00
    assert {name: n for name, (n, _) in plan.histogram().items()} == {"iq4_k_r4": 116, "q8_0": 612, "iq5_k_r4": 58, "f32": 361}
    assert int(plan.metadata["general.file_type"]) == 340


def test_rows_of_128_fall_back_and_are_reported(v3, tmp_path):
    plan = plan_quantize(v3, tmp_path / "o.gguf", type=TYPES["iq4_k_r4"])
    by_name = {o.name: o for o in plan.outputs}
    k_b = by_name["blk.7.attn_k_b.weight"]
    assert k_b.type.name == "q5_0"
    assert "128 columns are no multiple of 256" in k_b.note
    assert by_name["token_embd.weight"].type.name == "iq4_k"
    assert any("another type than asked for" in w for w in plan.warnings)


def chosen_one_by_one(source, default, rules=()):
    """Type, rule and note of each tensor, and how often each rule decided, without groups of alike tensors."""
    selector = TypeSelector(source, default, rules, TypeOverrides(), True)
    found = [selector.select(tensor) for tensor in source.tensors.values()]
    return [(each.type, each.rule, each.note) for each in found], selector.hits


RULES = (
    r"blk\.[0-2]\.attn=q5_K, ^blk\.4\.ffn_up_exps\.weight$=q6_K, ffn_(up|gate)_exps=iq2_k, ffn_down_exps=iq3_k, "
    r"^output\.weight$=q8_0, attn_output=iq4_k, blk\..*_shexp=q8_0"
)


@pytest.mark.parametrize("experts", [256, 4])
def test_tensors_that_nothing_tells_apart_are_chosen_as_one_by_one(experts):
    """Mixes that count tensors, or single out the first layer; rules with and without numbers, and for single names."""
    source = source_of(deepseek_v3(layers=9, dense=2, experts=experts))
    keys = {"block_count": 9, "expert_count": experts, "attention.head_count": 128, "embedding_length": 7168}
    source.metadata.update({f"deepseek2.{key}": value for key, value in keys.items()})
    assumed = AssumedImportance({})
    for name in file_types():
        expected, _ = chosen_one_by_one(source, name)
        outputs = outputs_of(source, name, assumed)
        kinds = {o.name: (o.type, o.rule, o.note) for o in outputs if not o.name.endswith(".scale")}
        assert list(kinds.items()) == list(zip(source.tensors, expected, strict=True)), name
        plan = plan_quantize(source, "out.gguf", type=name, importance=assumed)
        assert plan.outputs == outputs
        assert plan.outputs.names == outputs.names
    for default in (None, "Q4_K_M", TYPES["q4_K"]):
        rules = parse_rules(RULES)
        plan = plan_quantize(source, "out.gguf", type=default, rules=rules, importance=assumed, recipe_text=RULES)
        expected, hits = chosen_one_by_one(source, default, rules)
        assert [(kind.type, kind.rule, kind.note) for _, kind in plan.outputs.entries()] == expected
        written = dict(entry.split(" ", 1)[::-1] for entry in plan.metadata["ggufmill.rule_hits"])
        assert {str(rule): str(n) for rule, n in hits.items()} == {str(rule): written[str(rule)] for rule in rules}


def test_routers_norms_and_biases_stay_f32(v3, tmp_path):
    plan = plan_quantize(v3, tmp_path / "o.gguf", rules=parse_rules(".*=q8_0"))
    f32 = [o.name for o in plan.outputs if o.type.name == "f32"]
    assert len(f32) == 361
    assert all("norm" in n or "ffn_gate_inp" in n or "exp_probs_b" in n for n in f32)


def test_planning_reads_nothing_and_is_deterministic(tmp_path):
    def fail(start, stop):
        raise AssertionError("a plan must not read data")

    tensors = {n: SourceTensor(n, s, "bf16", fail) for n, s in deepseek_v3(5, 1, 8)}
    source = TensorSource("t", {}, tensors, "id")
    rules = parse_rules("exps=iq4_k_r4,.*=q8_0")
    one, two = (plan_quantize(source, tmp_path / "o.gguf", rules=rules) for _ in range(2))
    assert one.fingerprint == two.fingerprint
    assert one.files[0].header == two.files[0].header
    other = plan_quantize(source, tmp_path / "o.gguf", rules=parse_rules("exps=iq5_k_r4,.*=q8_0"))
    assert other.fingerprint != one.fingerprint
    changed = plan_quantize(TensorSource("t", {}, tensors, "other"), tmp_path / "o.gguf", rules=rules)
    assert changed.fingerprint != one.fingerprint


def test_rules_without_effect_are_warnings(v3, tmp_path):
    rules = parse_rules("attn_.*=q8_0\nattn_q_a=q6_K\nffn_doom=q6_K\n.*=q8_0")
    plan = plan_quantize(v3, tmp_path / "o.gguf", rules=rules)
    assert "line 2: attn_q_a=q6_K never applies; attn_.*=q8_0 comes first and takes blk.0.attn_q_a.weight" in plan.warnings
    assert "line 3: ffn_doom=q6_K matches no tensor" in plan.warnings
    with pytest.raises(PlanError, match="--strict: .*ffn_doom"):
        plan_quantize(v3, tmp_path / "o.gguf", rules=rules, strict=True)
    plan = plan_quantize(v3, tmp_path / "o.gguf", rules=parse_rules("attn=q8_0"))
    assert any("no rule takes token_embd.weight and" in w for w in plan.warnings)
    assert next(o for o in plan.outputs if o.name == "token_embd.weight").type.name == "bf16"


def warned(v3, tmp_path, rules, **options):
    return plan_quantize(v3, tmp_path / "o.gguf", rules=parse_rules(rules), type=TYPES["q8_0"], **options).warnings


def test_warnings_for_rules_that_decide_nothing(v3, tmp_path):
    one = "line 1: ffn_norm=q4_0 decides nothing; blk.0.ffn_norm.weight stays as it is, norms, routers and the like do"
    assert warned(v3, tmp_path, "ffn_norm=q4_0") == [one]
    router = warned(v3, tmp_path, "ffn_gate_inp=q8_0")
    assert len(router) == 1
    assert router[0].endswith("; --ffn-gate-inp-type gives routers a type")
    assert warned(v3, tmp_path, "ffn_norm=f32\nffn_gate_inp=f32") == []  # recipes say what happens anyway
    overrides = TypeOverrides(output=TYPES["q6_K"])
    beaten = ["line 1: ^output\\.weight=q4_0 decides nothing; output.weight follows --output-tensor-type"]
    assert warned(v3, tmp_path, "^output\\.weight=q4_0", overrides=overrides) == beaten
    left = warned(v3, tmp_path, "^output\\.weight=q4_0", overrides=TypeOverrides(leave_output=True))
    assert left == ["line 1: ^output\\.weight=q4_0 decides nothing; output.weight follows --leave-output-tensor"]
    assert warned(v3, tmp_path, "ffn=q4_0", pure=True) == ["--pure leaves the rules aside: every weight gets the same type"]


def test_warning_for_a_ternary_default(v3, tmp_path):
    plan = plan_quantize(v3, tmp_path / "o.gguf", type=TYPES["iq2_bn"])
    assert [w for w in plan.warnings if w.startswith("iq2_bn is for models trained with ternary weights")]


def test_overrides_take_precedence_over_rules_and_pure_over_both(v3, tmp_path):
    rules = parse_rules(".*=q8_0")
    overrides = TypeOverrides(token_embedding=TYPES["q6_K"], output=TYPES["iq5_k"])
    plan = plan_quantize(v3, tmp_path / "o.gguf", rules=rules, overrides=overrides)
    by_name = {o.name: o.type.name for o in plan.outputs}
    assert (by_name["token_embd.weight"], by_name["output.weight"]) == ("q6_K", "iq5_k")
    plan = plan_quantize(v3, tmp_path / "o.gguf", type=TYPES["q4_K"], rules=rules, pure=True)
    assert {o.type.name for o in plan.outputs} == {"q4_K", "f32", "q5_0"}
    plan = plan_quantize(v3, tmp_path / "o.gguf", type=TYPES["q4_K"], overrides=TypeOverrides(leave_output=True))
    assert next(o for o in plan.outputs if o.name == "output.weight").type.name == "bf16"


def test_role_overrides_take_precedence_over_the_mix_and_rules_over_them(v3, tmp_path):
    overrides = TypeOverrides(roles={"ffn_down": TYPES["q5_K"]}, router=TYPES["q8_0"])
    plan = plan_quantize(
        v3, tmp_path / "o.gguf", type="Q4_K_M", rules=parse_rules("blk.3.ffn_down_shexp=q8_0"), overrides=overrides
    )
    by_name = {o.name: o for o in plan.outputs}
    assert by_name["blk.3.ffn_down_exps.weight"].type.name == "q5_K"
    assert by_name["blk.3.ffn_down_exps.weight"].rule == "--ffn-down-type"
    assert by_name["blk.3.ffn_down_shexp.weight"].type.name == "q8_0"
    assert by_name["blk.3.ffn_gate_inp.weight"].type.name == "q8_0"
    assert by_name["output.weight"].type.name == "q6_K"
    with pytest.raises(PlanError, match="--pure"):
        plan_quantize(v3, tmp_path / "o.gguf", type="Q4_K_M", overrides=overrides, pure=True)
    unused = plan_quantize(v3, tmp_path / "o.gguf", type="Q4_K_M", overrides=TypeOverrides(roles={"attn_qkv": TYPES["q8_0"]}))
    assert any("--attn-qkv-type applies to no tensor" in w for w in unused.warnings)


def test_extra_output_is_a_smaller_copy(v3, tmp_path):
    plan = plan_quantize(v3, tmp_path / "o.gguf", type=TYPES["q8_0"], overrides=TypeOverrides(extra_output=TYPES["q4_0"]))
    extra = plan.outputs[-1]
    assert (extra.name, extra.type.name) == ("output_extra.weight", "q4_0")
    with pytest.raises(PlanError, match="no smaller"):
        plan_quantize(v3, tmp_path / "o.gguf", type=TYPES["q4_0"], overrides=TypeOverrides(extra_output=TYPES["q8_0"]))


SMALL = [("blk.0.ffn_up.weight", (256, 16)), ("blk.0.ffn_gate_exps.weight", (256, 8, 3)), ("blk.0.attn_norm.weight", (256,))]


def test_written_bytes_are_those_of_the_codecs(tmp_path):
    source = source_of(SMALL)
    means = {"blk.0.ffn_up.weight": np.linspace(0.1, 9, 256, dtype=np.float32)[None]}
    means["blk.0.ffn_up_exps.weight"] = np.random.default_rng(1).random((3, 256), np.float32)  # gate takes up's
    plan = plan_quantize(source, tmp_path / "o.gguf", type=TYPES["iq4_k_r4"], importance=Importance(means))
    execute(plan)
    file = open_gguf(tmp_path / "o.gguf")
    up = file.tensors["blk.0.ffn_up.weight"]
    assert np.array_equal(up.data, encode(source.tensors[up.name].read(0, 16), "iq4_k_r4", means[up.name][0]))
    gate = file.tensors["blk.0.ffn_gate_exps.weight"]
    for e in range(3):
        rows = source.tensors[gate.name].read(8 * e, 8 * e + 8)
        assert np.array_equal(gate.data[8 * e : 8 * e + 8], encode(rows, "iq4_k_r4", means["blk.0.ffn_up_exps.weight"][e]))
    assert file.tensors["blk.0.attn_norm.weight"].type.name == "f32"


def test_importance_of_another_model_is_an_error(tmp_path):
    means = {"blk.0.ffn_up.weight": np.ones((1, 128), np.float32)}
    with pytest.raises(PlanError, match="imatrix entry blk.0.ffn_up.weight is 1 x 128, the tensor needs 1 x 256"):
        plan_quantize(source_of(SMALL), tmp_path / "o.gguf", type=TYPES["iq4_k"], importance=Importance(means))


def test_missing_importance_is_a_warning(tmp_path):
    plan = plan_quantize(source_of(SMALL), tmp_path / "o.gguf", type=TYPES["iq4_k"], importance=Importance({}))
    assert any("no data for blk.0.ffn_up.weight and 1 more" in w for w in plan.warnings)


def test_a_warning_counts_tensors_that_were_looked_at_as_one():
    source = source_of({f"enc.blk.{i}.attn_q.weight": (256, 256) for i in range(6)}.items())
    plan = plan_quantize(source, "o.gguf", type=TYPES["iq4_k"], importance=PendingImportance({}))
    assert any("no data for enc.blk.0.attn_q.weight and 5 more" in w for w in plan.warnings)


def test_requantising_and_repacking(tmp_path):
    execute(plan_quantize(source_of(SMALL), tmp_path / "a.gguf", type=TYPES["iq4_k"]))
    source = gguf_source(tmp_path / "a.gguf")
    with pytest.raises(PlanError, match="is iq4_k already; .* --allow-requantize"):
        plan_quantize(source, tmp_path / "b.gguf", type=TYPES["q8_0"])
    execute(plan_quantize(source, tmp_path / "b.gguf", type=TYPES["iq4_k_r4"]))  # repacking
    a, b = open_gguf(tmp_path / "a.gguf").tensors, open_gguf(tmp_path / "b.gguf").tensors
    for name in ("blk.0.ffn_up.weight", "blk.0.ffn_gate_exps.weight"):
        assert b[name].type.name == "iq4_k_r4"
        assert np.array_equal(decode(a[name].data, "iq4_k", 256), decode(b[name].data, "iq4_k_r4", 256))
    execute(plan_quantize(gguf_source(tmp_path / "b.gguf"), tmp_path / "c.gguf", type=TYPES["iq4_k"]))
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    execute(plan_quantize(source, tmp_path / "d.gguf", type=TYPES["q8_0"], allow_requantize=True))
    assert open_gguf(tmp_path / "d.gguf").tensors["blk.0.ffn_up.weight"].type.name == "q8_0"


def test_error_for_a_nonfinite_weight_names_tensor_row_and_column(tmp_path):
    def read(start, stop):
        x = np.ones((24, 256), np.float32)
        x[13, 7] = np.nan
        return x[start:stop]

    tensor = SourceTensor("blk.0.ffn_up_exps.weight", (256, 8, 3), "bf16", read)
    source = TensorSource("t", {}, {tensor.name: tensor}, "")
    with pytest.raises(MillError, match="blk.0.ffn_up_exps.weight: the weight at row 5, column 7 of matrix 1 is nan"):
        execute(plan_quantize(source, tmp_path / "o.gguf", type=TYPES["iq4_k"]))


def test_metadata_record_recipe_imatrix_and_version(tmp_path):
    importance = Importance({}, {"quantize.imatrix.file": "x.imatrix", "quantize.imatrix.entries_count": np.int32(5)})
    options: dict[str, Any] = {"rules": parse_rules(".*=q8_0"), "recipe_text": ".*=q8_0", "version": "9.9"}
    options["importance"] = importance
    metadata = plan_quantize(source_of(SMALL), tmp_path / "o.gguf", **options).metadata
    assert metadata["ggufmill.recipe"] == ".*=q8_0"
    assert metadata["ggufmill.version"] == "9.9"
    assert metadata["quantize.imatrix.file"] == "x.imatrix"
    assert (metadata["general.quantization_version"], metadata["general.file_type"]) == (2, 7)
    recipe_text = "[source]\nmodel = '/home/me/big'\n[quantize]\nrules = '.*=q8_0'"
    metadata = plan_quantize(source_of(SMALL), tmp_path / "o.gguf", **{**options, "recipe_text": recipe_text}).metadata
    assert metadata["ggufmill.recipe"] == recipe_text.replace("/home/me/", "")
    hidden = plan_quantize(source_of(SMALL), tmp_path / "o.gguf", hide_imatrix=True, **options).metadata
    assert hidden["quantize.imatrix.file"] == "top_secret"
    assert hidden["quantize.imatrix.entries_count"] == 0
    overridden = plan_quantize(source_of(SMALL), tmp_path / "o.gguf", override_kv={"general.name": "x"}, **options).metadata
    assert overridden["general.name"] == "x"


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
def test_copied_weights_are_checked_for_finiteness(tmp_path, type_name):
    x = np.ones((24, 256), np.float32)
    x[13, 7] = np.inf
    with np.errstate(over="ignore"):
        stored = {"f32": x, "f16": x.astype(np.float16), "bf16": (x.view(np.uint32) >> 16).astype(np.uint16)}[type_name]

    def raw(start, stop):
        return np.ascontiguousarray(stored[start:stop]).view(np.uint8)

    name = "blk.0.ffn_up.weight"
    tensor = SourceTensor(name, (256, 24), type_name, lambda start, stop: x[start:stop], raw, TYPES[type_name])
    source = TensorSource("t", {}, {name: tensor}, "")
    with pytest.raises(MillError, match="the weight at row 13, column 7 is inf"):
        execute(plan_quantize(source, tmp_path / "o.gguf", type=TYPES[type_name]))
    plan = plan_quantize(source, tmp_path / "p.gguf", type=TYPES[type_name], allow_nonfinite=True)
    execute(plan)
    assert plan.replaced == [(name, 1)]
    written = decode(open_gguf(tmp_path / "p.gguf").tensors[name].data, type_name, 256)
    assert written[13, 7] == 0
    assert np.isfinite(written).all()


def test_tied_embeddings_follow_the_output_override(tmp_path):
    source = source_of([("token_embd.weight", (256, 64)), *SMALL])
    options = {"type": TYPES["iq4_k"], "overrides": TypeOverrides(output=TYPES["q6_K"])}
    plan = plan_quantize(source, tmp_path / "o.gguf", **options)
    assert plan.outputs[0].type.name == "q6_K"
    options["overrides"] = TypeOverrides(token_embedding=TYPES["q8_0"], output=TYPES["q6_K"])
    plan = plan_quantize(source, tmp_path / "o.gguf", **options)
    assert plan.outputs[0].type.name == "q8_0"
    plan = plan_quantize(source, tmp_path / "o.gguf", type=TYPES["iq4_k"], overrides=TypeOverrides(leave_output=True))
    assert any("no output.weight" in w for w in plan.warnings)
