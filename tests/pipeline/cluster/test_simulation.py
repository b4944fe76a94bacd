"""The simulated cluster: bounds that no cluster can beat, cases worked out by hand, and the plan of a real model."""

import json
from dataclasses import replace

import pytest

from ggufmill.pipeline.cluster.forecast import forecast_cluster
from ggufmill.pipeline.cluster.simulation import PER_THREAD, ClusterRates, PieceWork, estimate, simulate
from ggufmill.pipeline.quantize import quantize_model

FAST = 1e15
RATES = ClusterRates(2, 3, FAST, FAST, FAST, FAST, 0.0, 5.0)


def test_threads_share_pieces():
    pieces = [PieceWork(2.0, 10, 10)] * 13  # on 6 threads: three rounds
    assert simulate(pieces, RATES) == pytest.approx(5 + 6)
    assert simulate(pieces, replace(RATES, machines=13)) == pytest.approx(5 + 2)
    assert simulate([], RATES) == 5


@pytest.mark.parametrize("is_collected", [False, True])
@pytest.mark.parametrize(
    ("part", "slow"),
    [
        ("storage", {"read": 10.0}),
        ("storage", {"write": 10.0}),
        ("network", {"network": 10.0}),
        ("network", {"relay": 10.0}),
        ("scheduler", {"piece_seconds": 1.0}),
    ],
)
def test_the_slowest_part_decides(part, slow, is_collected):
    rates = replace(RATES, is_collected=is_collected, **slow)
    pieces = [PieceWork(0.1, 100, 50)] * 240
    busy = estimate(pieces, rates)
    if "relay" in slow and not is_collected:
        assert simulate(pieces, rates) == pytest.approx(simulate(pieces, RATES))
        return
    assert max(busy, key=lambda name: busy[name]) == part
    assert 5 + busy[part] <= simulate(pieces, rates) <= 5 + 1.1 * busy[part]


def test_no_part_is_faster_than_its_rate():
    for machines in (1, 2, 5, 30):
        for is_collected in (False, True):
            checked = 0 if is_collected else 200
            pieces = [PieceWork(0.3 + i % 7, 40 + i % 11, 30 + i % 5, checked * (i % 9 == 0)) for i in range(300)]
            rates = ClusterRates(machines, 4, 300.0, 100.0, 60.0, 80.0, 0.02, 1.0, is_collected)
            assert simulate(pieces, rates) >= 1 + max(estimate(pieces, rates).values())


def test_pieces_that_are_collected_wait_for_the_first():
    """No more are in flight than `map_ordered` gives out, so one long piece stops all threads after a while."""
    slots = PER_THREAD * 6
    pieces = [PieceWork(1000.0, 0, 0), *[PieceWork(1.0, 0, 0)] * 5000]
    collected = simulate(pieces, replace(RATES, is_collected=True))
    assert collected == pytest.approx(5 + 1000 + (5000 - slots + 1) / 6, abs=2)
    assert simulate(pieces, RATES) == pytest.approx(5 + 1000 + 0.0, abs=2)


def test_checksums_are_read_again():
    pieces = [PieceWork(0.0, 0, 100, 0), PieceWork(0.0, 0, 100, 200)]
    assert simulate(pieces, replace(RATES, read=10.0)) == pytest.approx(5 + 20)


@pytest.mark.slow
def test_forecast_of_a_model_of_671_billion_weights(header_only_deepseek_v3, tmp_path):
    recipe = "deepseek-v3-iq4_k_r4"
    plan = quantize_model(
        header_only_deepseek_v3, tmp_path / "o.gguf", recipe=recipe, vocab=False, dry_run=True, no_timing=True
    ).plan
    given = {"threads": 16, "read_rate": 1e10, "write_rate": 1e10, "network_rate": 1e9, "encode_rate": 1e7}
    forecast = forecast_cluster(plan, (1, 8, 64), **given, piece_seconds=0.01, start_seconds=20.0)
    one, eight, many = forecast.rows
    assert one.busy["encoding"] == pytest.approx(sum(o.n_elements for o in plan.outputs) / 16e7, rel=0.01)
    assert (one.bound, one.pieces) == ("encoding", eight.pieces)
    assert 7 < one.simulated / eight.simulated < 8
    assert all(row.estimated <= row.simulated < 1.2 * row.estimated for row in forecast.rows[:2])
    assert many.simulated > 20 + many.busy["storage"] > 20 + (1.9 * plan.total_bytes + 671e9) / 1e10
    collected = forecast_cluster(plan, (64,), **given, output="collect").rows[0]
    assert collected.bound == "network"
    json.dumps(forecast.as_json())


def test_plan_prints_a_table(mill, models):
    arguments = ("plan", models.bf16, "--type", "q4_0", "--cluster=1,4", "--encode-rate", "1e6", "--cluster-threads", 2)
    code, out, err = mill(*arguments)
    assert (code, err) == (0, "")
    assert "projected, not measured: 2 threads per machine" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["1", "4"]
    rows = json.loads(mill(*arguments, "--json")[1])["cluster"]["machines"]
    assert [row["machines"] for row in rows] == [1, 4]
    assert "--read-rate does nothing without --cluster" in mill("plan", models.bf16, "--read-rate", "1G")[2]
    assert "from 1 to 1000" in mill("plan", models.bf16, "--cluster=0")[2]
