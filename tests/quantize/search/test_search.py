"""Choosing types: groups, curves of sensitivity, budgets, twins."""

import re

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError, SourceTensor
from ggufmill.quantize.search.search import Budget, Curve, Search, grouped, packed

KINDS = [TYPES[name] for name in ("q4_0", "q5_0", "q8_0")]
ERRORS = {"q4_0": 0.008, "q5_0": 0.002, "q8_0": 0.00003}


def tensors(*names, rows=64):
    return {name: SourceTensor(name, (256, rows), "f32", lambda a, b: np.zeros((b - a, 256), np.float32)) for name in names}


def search(named, groups=None):
    return Search(named, dict.fromkeys(named, KINDS), dict.fromkeys(named, ERRORS), groups or grouped(list(named), 99))


def test_curve_goes_through_its_points_and_is_proportional_beyond():
    curve = Curve()
    assert curve.slope(0.3) == 1
    curve.add(0.01, 0.02)
    curve.add(0.1, 0.05)
    assert [e * curve.slope(e) for e in (0.01, 0.1)] == pytest.approx([0.02, 0.05])
    assert [e * curve.slope(e) for e in (0.001, 0.2)] == pytest.approx([0.002, 0.1])
    assert 0.02 < 0.03 * curve.slope(0.03) < 0.05
    curve.add(0.5, -1.0)  # noise: never free
    assert curve.slope(0.5) > 0


def test_groups_are_tensors_or_bands_of_layers():
    names = [
        "output.weight",
        *(f"blk.{i}.{r}" for i in range(61) for r in ("ffn_up.weight", "attn_kv_b.weight", "attn_k_b.weight")),
    ]
    assert len(grouped(names, 200)) == 123  # attn_k_b is attn_kv_b's twin
    bands = grouped(names, 21)
    assert len(bands) == 21
    members = [name for group in bands for name in group.tensors]
    assert sorted(members) == sorted(n for n in names if "attn_k_b" not in n)
    assert "ffn_up.weight, layers 0 to 5" in [group.name for group in bands]


def test_the_sensitive_tensor_gets_the_larger_type():
    named = tensors("blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "blk.0.ffn_down.weight", "blk.1.ffn_down.weight")
    job = search(named)
    for group in job.groups:
        factor = 100 if "down" in group.name else 1
        job.learn(group, dict.fromkeys(group.tensors, TYPES["q4_0"]), 0.008 * factor)
    low, high = job.span()
    found = job.within([Budget((low + high) // 2)])
    assert low <= found.nbytes <= (low + high) // 2
    assert {n: k.name for n, k in found.types.items() if "down" in n} == {n: "q8_0" for n in named if "down" in n}
    assert {k.name for n, k in found.types.items() if "up" in n} == {"q4_0"}
    assert found.predicted == pytest.approx(2 * 0.008 + 2 * 0.00003 * 100)


def test_two_budgets_are_kept_apart():
    named = tensors("blk.0.attn_q.weight", "blk.0.ffn_up.weight")
    size = {kind.name: kind.nbytes((256, 64)) for kind in KINDS}
    found = search(named).within([Budget(size["q5_0"]), Budget(size["q8_0"], re.compile("attn"))])
    assert {n: k.name for n, k in found.types.items()} == {"blk.0.attn_q.weight": "q8_0", "blk.0.ffn_up.weight": "q5_0"}
    with pytest.raises(PlanError, match="finds no tensor"):
        search(named).within([Budget(10**6), Budget(10**6, re.compile("nothing"))])


def test_twins_share_a_sensitivity_and_are_not_in_the_prediction():
    job = search(tensors("blk.0.attn_kv_b.weight", "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"))
    assert [group.tensors for group in job.groups] == [("blk.0.attn_kv_b.weight",)]
    job.learn(job.groups[0], {"blk.0.attn_kv_b.weight": TYPES["q4_0"]}, 0.08)
    q4 = TYPES["q4_0"]
    assert job.damage("blk.0.attn_kv_b.weight", q4) == pytest.approx(0.08)
    assert job.damage("blk.0.attn_k_b.weight", q4) == pytest.approx(0.04)
    assert job.found(dict.fromkeys(job.tensors, q4)).predicted == pytest.approx(0.08)


def test_fewest_bytes_below_a_divergence():
    job = search(tensors(*(f"blk.{i}.ffn_up.weight" for i in range(6))))
    found = job.below(6 * 0.002 + 1e-9)
    assert found.predicted <= 6 * 0.002 + 1e-9
    assert found.nbytes <= 6 * TYPES["q5_0"].nbytes((256, 64))


def test_steps_around_a_choice_and_the_correction():
    job = search(tensors("blk.0.ffn_up.weight"))
    group = job.groups[0]
    job.learn(group, {"blk.0.ffn_up.weight": TYPES["q4_0"]}, 0.016)
    found = job.found({"blk.0.ffn_up.weight": TYPES["q5_0"]})
    down, up = job.neighbours(found, group)
    assert down == {"blk.0.ffn_up.weight": TYPES["q4_0"]}
    assert up == {"blk.0.ffn_up.weight": TYPES["q5_0"]}  # half the error: nearer to q5_0 itself than to q8_0
    job.correct(group, found, 8.0, 1.0)
    assert group.curve.slope(0.002) == pytest.approx(8.0)
    job.correct(group, found, -1.0, 1.0)  # noise: a bounded step
    assert group.curve.slope(0.002) == pytest.approx(1.0)


def test_packed_where_it_fits():
    named = tensors("blk.0.ffn_up.weight", "blk.0.attn_q.weight", "token_embd.weight") | tensors("output.weight", rows=10)
    types = packed(dict.fromkeys(named, TYPES["q4_0"]), named, re.compile("attn"))
    assert [kind.name for kind in types.values()] == ["q4_0_r8", "q4_0", "q4_0", "q4_0"]
