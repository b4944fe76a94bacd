"""The search for types: groups, sensitivity curves, budgets, derived tensors."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError, SourceTensor
from ggufmill.jobs.patterns import NamePattern
from ggufmill.quantize.search.type_search import (
    Budget,
    SensitivityCurve,
    TypeSearch,
    group_tensors,
    on_one_scale,
    use_packed_types,
)

SEARCH_TYPES = [TYPES[name] for name in ("q4_0", "q5_0", "q8_0")]
ERRORS = {"q4_0": 0.008, "q5_0": 0.002, "q8_0": 0.00003}


def tensors(*names, rows=64):
    return {name: SourceTensor(name, (256, rows), "f32", lambda a, b: np.zeros((b - a, 256), np.float32)) for name in names}


def type_search(named, groups=None):
    return TypeSearch(
        named, dict.fromkeys(named, SEARCH_TYPES), dict.fromkeys(named, ERRORS), groups or group_tensors(list(named), 99)
    )


def test_curve_goes_through_its_points_and_is_proportional_beyond_them():
    curve = SensitivityCurve()
    assert curve.slope(0.3) == 1
    curve.add(0.01, 0.02)
    curve.add(0.1, 0.05)
    assert [e * curve.slope(e) for e in (0.01, 0.1)] == pytest.approx([0.02, 0.05])
    assert [e * curve.slope(e) for e in (0.001, 0.2)] == pytest.approx([0.002, 0.1])
    assert 0.02 < 0.03 * curve.slope(0.03) < 0.05
    curve.add(0.5, -1.0)  # noise; the divergence stays positive
    assert curve.slope(0.5) > 0


def test_groups_are_tensors_or_bands_of_layers():
    names = [
        "output.weight",
        *(f"blk.{i}.{r}" for i in range(61) for r in ("ffn_up.weight", "attn_kv_b.weight", "attn_k_b.weight")),
    ]
    assert len(group_tensors(names, 200)) == 123  # attn_k_b is derived from attn_kv_b
    bands = group_tensors(names, 21)
    assert len(bands) == 21
    members = [name for group in bands for name in group.tensors]
    assert sorted(members) == sorted(n for n in names if "attn_k_b" not in n)
    assert "ffn_up.weight, layers 0 to 5" in [group.name for group in bands]


def test_sensitive_tensors_get_larger_types():
    named = tensors("blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "blk.0.ffn_down.weight", "blk.1.ffn_down.weight")
    search = type_search(named)
    for group in search.groups:
        factor = 100 if "down" in group.name else 1
        search.add_measurement(group, dict.fromkeys(group.tensors, TYPES["q4_0"]), 0.008 * factor)
    sizes = [[t.nbytes(named[name].shape) for t in types] for name, types in search.options.items()]
    low, high = sum(map(min, sizes)), sum(map(max, sizes))
    result = search.fit_budgets([Budget((low + high) // 2)])
    assert low <= result.nbytes <= (low + high) // 2
    assert {n: k.name for n, k in result.types.items() if "down" in n} == {n: "q8_0" for n in named if "down" in n}
    assert {k.name for n, k in result.types.items() if "up" in n} == {"q4_0"}
    assert result.predicted == pytest.approx(2 * 0.008 + 2 * 0.00003 * 100)


def test_two_budgets():
    named = tensors("blk.0.attn_q.weight", "blk.0.ffn_up.weight")
    size = {t.name: t.nbytes((256, 64)) for t in SEARCH_TYPES}
    result = type_search(named).fit_budgets([Budget(size["q5_0"]), Budget(size["q8_0"], NamePattern("attn"))])
    assert {n: k.name for n, k in result.types.items()} == {"blk.0.attn_q.weight": "q8_0", "blk.0.ffn_up.weight": "q5_0"}
    with pytest.raises(PlanError, match="finds no tensor"):
        type_search(named).fit_budgets([Budget(10**6), Budget(10**6, NamePattern("nothing"))])


def test_derived_tensors_share_a_sensitivity_and_do_not_count_in_the_prediction():
    search = type_search(tensors("blk.0.attn_kv_b.weight", "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"))
    assert [group.tensors for group in search.groups] == [("blk.0.attn_kv_b.weight",)]
    search.add_measurement(search.groups[0], {"blk.0.attn_kv_b.weight": TYPES["q4_0"]}, 0.08)
    q4 = TYPES["q4_0"]
    assert search.divergence("blk.0.attn_kv_b.weight", q4) == pytest.approx(0.08)
    assert search.divergence("blk.0.attn_k_b.weight", q4) == pytest.approx(0.04)
    assert search.assignment(dict.fromkeys(search.tensors, q4)).predicted == pytest.approx(0.08)


def test_fit_divergence_takes_the_fewest_bytes():
    search = type_search(tensors(*(f"blk.{i}.ffn_up.weight" for i in range(6))))
    result = search.fit_divergence(6 * 0.002 + 1e-9)
    assert result.predicted <= 6 * 0.002 + 1e-9
    assert result.nbytes <= 6 * TYPES["q5_0"].nbytes((256, 64))


def test_neighbours_and_correction_of_a_curve():
    search = type_search(tensors("blk.0.ffn_up.weight"))
    group = search.groups[0]
    search.add_measurement(group, {"blk.0.ffn_up.weight": TYPES["q4_0"]}, 0.016)
    result = search.assignment({"blk.0.ffn_up.weight": TYPES["q5_0"]})
    down, up = search.neighbours(result, group)
    assert down == {"blk.0.ffn_up.weight": TYPES["q4_0"]}
    assert up == {"blk.0.ffn_up.weight": TYPES["q5_0"]}  # half the error: nearer to q5_0 itself than to q8_0
    search.correct_curve(group, result, 8.0, 1.0)
    assert group.curve.slope(0.002) == pytest.approx(8.0)
    search.correct_curve(group, result, -1.0, 1.0)  # noise: a bounded step
    assert group.curve.slope(0.002) == pytest.approx(1.0)


def test_packed_types_where_they_fit():
    named = tensors("blk.0.ffn_up.weight", "blk.0.attn_q.weight", "token_embd.weight") | tensors("output.weight", rows=10)
    types = use_packed_types(dict.fromkeys(named, TYPES["q4_0"]), named, NamePattern("attn"))
    assert [t.name for t in types.values()] == ["q4_0_r8", "q4_0", "q4_0", "q4_0"]


def test_relative_errors_count_as_others_do():
    """A tensor that no curvature weighs as the median one, embeddings, which all layers see, as the largest."""
    nats = {f"blk.{i}.ffn_up.weight": {"q4_0": 0.1 * size, "q8_0": 0.01 * size} for i, size in enumerate((1, 2, 9))}
    relative = {name: {"q4_0": 0.008, "q8_0": 0.0008} for name in ("blk.0.attn_q.weight", "token_embd.weight")}
    scaled = on_one_scale(nats | relative, list(relative))
    assert {name: scaled[name] for name in nats} == nats
    assert scaled["blk.0.attn_q.weight"] == pytest.approx({"q4_0": 0.2, "q8_0": 0.02})
    assert scaled["token_embd.weight"] == pytest.approx({"q4_0": 0.9, "q8_0": 0.09})
    assert on_one_scale(relative, list(relative)) == relative
