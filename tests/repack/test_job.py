"""Repacking GGUF files of random bytes, and undoing it."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError, open_gguf
from ggufmill.jobs import execute as execute_module
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.repack import pack
from ggufmill.repack.job import plan_repack

# name, type, shape
MODEL = [
    ("token_embd.weight", "q8_0", (512, 16)),
    ("blk.0.attn_norm.weight", "f32", (512,)),
    ("blk.0.attn_q.weight", "q4_K", (512, 8)),
    ("blk.0.attn_k.weight", "iq6_k", (512, 8)),
    ("blk.0.attn_v.weight", "q8_0", (512, 12)),
    ("blk.0.ffn_down_exps.weight", "iq4_ks", (256, 4, 3)),
    ("blk.0.ffn_up_exps.weight", "iq2_xxs", (256, 8, 3)),
    ("blk.0.ffn_gate.weight", "bf16", (32, 16)),
    ("blk.0.ffn_down.weight", "f16", (32, 16)),
    ("output.weight", "q6_K", (256, 8)),
]
METADATA = {"general.architecture": "llama", "general.file_type": np.uint32(15), "llama.block_count": np.uint32(1)}


def write(path: Path, tensors=MODEL, metadata=METADATA, **split) -> Path:
    rng = np.random.default_rng(5)

    def output(name: str, type_name: str, shape: tuple[int, ...]) -> Output:
        columns, rows = shape[0], int(np.prod(shape[1:]))
        data = rng.integers(0, 256, (rows, TYPES[type_name].row_bytes(columns)), dtype=np.uint8)
        return Output(name, shape, type_name, TYPES[type_name], "test", lambda start, stop: data[start:stop])

    plan = make_plan([output(*t) for t in tensors], dict(metadata), path, **split)
    execute(plan, threads=1)
    return plan.files[0].path


def run(source: Path, out: Path, **options):
    plan = plan_repack(source, out, **options)
    execute(plan, threads=2)
    return open_gguf(out), {o.name: o for o in plan.outputs}


def assert_same(a, b):
    assert a.metadata == b.metadata
    assert list(a.tensors) == list(b.tensors)
    for name, info in a.tensors.items():
        assert (info.shape, info.type) == (b.tensors[name].shape, b.tensors[name].type)
        np.testing.assert_array_equal(info.data, b.tensors[name].data)


def test_default_repack_and_its_undo(tmp_path):
    source = write(tmp_path / "in.gguf")
    packed, outputs = run(source, tmp_path / "packed.gguf")
    before = open_gguf(source)
    want = {
        "blk.0.attn_q.weight": "q4_k_r4",
        "blk.0.ffn_down_exps.weight": "iq4_ks_r4",
        "blk.0.ffn_up_exps.weight": "iq2_xxs_r4",
        "output.weight": "q6_k_r4",
    }
    for name, info in packed.tensors.items():
        original = before.tensors[name]
        assert info.type.name == want.get(name, original.type.name)
        assert info.shape == original.shape
        assert outputs[name].rule == ("repack" if name in want else "kept")
        if name in want:
            expected, _ = pack(original.data, original.type.name, original.shape[0])
            np.testing.assert_array_equal(info.data, expected)
        else:
            np.testing.assert_array_equal(info.data, original.data)
    notes = {name: o.note for name, o in outputs.items() if o.note}
    assert notes == {
        "token_embd.weight": "token embeddings stay plain",
        "blk.0.attn_k.weight": "no repacked form of iq6_k",
        "blk.0.attn_v.weight": "q8_0_r8 interleaves 8 rows; 12 rows are no multiple of it",
    }
    assert packed.metadata == {**before.metadata, "general.file_type": 214}

    plain, outputs = run(tmp_path / "packed.gguf", tmp_path / "plain.gguf", undo=True)
    assert {name for name, o in outputs.items() if o.rule == "undo"} == set(want)
    assert_same(plain, before)
    assert (tmp_path / "plain.gguf").read_bytes() == source.read_bytes()


def test_groups_do_not_straddle_experts(tmp_path):
    source = write(
        tmp_path / "in.gguf", [("blk.0.ffn_up_exps.weight", "q4_K", (256, 6, 2)), ("output.weight", "q8_0", (32, 8))]
    )
    plan = plan_repack(source, tmp_path / "out.gguf")
    assert [(o.type.name, o.rule) for o in plan.outputs] == [("q4_K", "kept"), ("q8_0_r8", "repack")]
    assert "6 rows" in plan.outputs[0].note


def test_undo_of_row_ranges_that_cut_groups(tmp_path, monkeypatch):
    source = write(tmp_path / "in.gguf", [("output.weight", "q8_0", (64, 24)), ("blk.0.x_exps.weight", "iq4_ks", (256, 12, 2))])
    run(source, tmp_path / "packed.gguf")
    monkeypatch.setattr(execute_module, "CHUNK_ELEMENTS", 5 * 64)  # five rows, and one row
    plain, _ = run(tmp_path / "packed.gguf", tmp_path / "plain.gguf", undo=True)
    assert_same(plain, open_gguf(source))


def test_patterns_select_tensors_bf16_included(tmp_path):
    source = write(tmp_path / "in.gguf")
    packed, outputs = run(source, tmp_path / "a.gguf", pattern=["gate", r"blk\.0\.ffn_down"])
    changed = {name: o.type.name for name, o in outputs.items() if o.rule == "repack"}
    assert changed == {"blk.0.ffn_gate.weight": "bf16_r16", "blk.0.ffn_down_exps.weight": "iq4_ks_r4"}
    assert outputs["blk.0.ffn_down.weight"].note == "no repacked form of f16"
    assert outputs["blk.0.attn_q.weight"].note == ""
    assert packed.metadata["general.file_type"] == 15  # the q4_K tensors have not changed
    one = plan_repack(source, tmp_path / "b.gguf", pattern="output")
    assert [o.name for o in one.outputs if o.rule == "repack"] == ["output.weight"]

    back, _ = run(tmp_path / "a.gguf", tmp_path / "c.gguf", pattern="gate", undo=True)
    types = {name: info.type.name for name, info in back.tensors.items()}
    assert types["blk.0.ffn_gate.weight"] == "bf16"
    assert types["blk.0.ffn_down_exps.weight"] == "iq4_ks_r4"


@pytest.mark.parametrize(
    ("type_name", "before", "after"),
    [
        ("q4_K", 14, 214),
        ("q4_K", 15, 214),
        ("q3_K", 11, 211),
        ("q3_K", 12, 211),
        ("q3_K", 13, 211),
        ("q5_K", 16, 216),
        ("iq2_s", 29, 229),
        ("q6_0", 135, 335),
        ("iq4_xs", 30, 230),
        ("mxfp4", 38, 38),
        ("q4_K", 7, 7),
        ("q4_K", 1, 1),
        ("iq3_s", 27, 27),
    ],
)
def test_file_type_is_that_of_the_repacked_tensors(tmp_path, type_name, before, after):
    source = write(tmp_path / "in.gguf", [("output.weight", type_name, (256, 8))], {"general.file_type": np.uint32(before)})
    assert plan_repack(source, tmp_path / "out.gguf").metadata == {"general.file_type": after}


def test_no_file_type_is_added(tmp_path):
    source = write(tmp_path / "in.gguf", [("output.weight", "q8_0", (32, 8))], {})
    assert plan_repack(source, tmp_path / "out.gguf").metadata == {}


def test_split_model_becomes_one_file(tmp_path):
    source = write(tmp_path / "in.gguf", split_max_tensors=3)
    assert source.name == "in-00001-of-00004.gguf"
    single = write(tmp_path / "single.gguf")
    run(source, tmp_path / "a.gguf")
    run(single, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_fingerprints_of_different_sources_differ(tmp_path):
    a = write(tmp_path / "a.gguf", [("output.weight", "q8_0", (32, 8))], {})
    b = write(tmp_path / "b.gguf", [("output.weight", "q8_0", (32, 8))], {})
    plans = [plan_repack(p, tmp_path / "out.gguf") for p in (a, a, b)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"undo": True}, "nothing to do: no tensor is interleaved"),
        ({"pattern": "attn_z"}, "nothing to do: no tensor's name matches 'attn_z'"),
        ({"pattern": "attn_k"}, r"no tensor can be repacked \(no repacked form of iq6_k\)"),
        ({"pattern": "norm"}, "nothing to do: no tensor has a repacked form"),
        ({"pattern": "blk.(0"}, "not a regular expression"),
    ],
)
def test_nothing_to_do_and_bad_patterns(tmp_path, options, message):
    source = write(tmp_path / "in.gguf")
    with pytest.raises(PlanError, match=message):
        plan_repack(source, tmp_path / "out.gguf", **options)


def test_bf16_alone_needs_a_pattern(tmp_path):
    source = write(tmp_path / "in.gguf", [("a.weight", "bf16", (32, 16)), ("b.weight", "f32", (32,))], {})
    with pytest.raises(PlanError, match=r"nothing to do: bf16 is only repacked when asked for \(--pattern\)"):
        plan_repack(source, tmp_path / "out.gguf")
    assert {o.type.name for o in plan_repack(source, tmp_path / "out.gguf", pattern=".").outputs} == {"bf16_r16", "f32"}


def test_types_without_a_plain_form_stay(tmp_path):
    source = write(tmp_path / "in.gguf", [("a.weight", "iq1_s_r4", (256, 4)), ("b.weight", "q8_0_r8", (32, 8))], {})
    _, outputs = run(source, tmp_path / "out.gguf", undo=True)
    assert [(o.type.name, o.rule, o.note) for o in outputs.values()] == [
        ("iq1_s_r4", "kept", "no plain form of iq1_s_r4"),
        ("q8_0", "undo", ""),
    ]
