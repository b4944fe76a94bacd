"""Seconds of reading a text: what is counted, by speeds that are given."""

from dataclasses import replace
from mmap import PAGESIZE

import numpy as np
import pytest
from small_models import N_HEAD, RANK, latent, llama

from ggufmill.formats import SourceTensor
from ggufmill.runtime import load_model, timing
from ggufmill.runtime.graph import ops
from ggufmill.runtime.timing import ProductSpeed, head_seconds, layers_seconds, products
from ggufmill.simd.workers import ALONE


@pytest.fixture
def speeds(monkeypatch):
    """1 us a weight, 1 ns a product, whatever the type; nothing else takes time."""
    asked = []

    def speed(type_name, columns, rows, exact=False, fast=False, threads=1):
        asked.append((type_name, columns, rows))
        return ProductSpeed(1e-6, 1e-9)

    monkeypatch.setattr(timing, "product_speed", speed)
    for none in ("_making", "_scoring", "_read_seconds"):
        monkeypatch.setattr(timing, none, lambda *_: 0.0)
    monkeypatch.setattr(timing, "attention_seconds", lambda model, n_ctx, is_observed: 0.0)
    monkeypatch.setattr(timing, "_first_writes", lambda: (0.0, 0.0))
    monkeypatch.setattr(timing, "_timed", [])
    return asked


def matrices_of(model):
    names = {op.weights[0].name for op in model.graph.ops if isinstance(op, ops.Linear | ops.ExpertLinear)}
    return {name: model.source.tensors[name] for name in names}


@pytest.mark.parametrize("experts", [0, 8])
def test_rows_that_are_looked_up_are_no_products(experts, speeds):
    model = load_model(llama(experts=experts))
    weights, per_token = 0, 0
    for name, tensor in matrices_of(model).items():
        weights += tensor.n_elements
        per_token += tensor.n_elements * (4 / experts if "exps" in name else 1)
    assert "token_embd.weight" not in {one.weight.name for one in products(model.graph.ops)}
    assert sum(one.per_token for one in products(model.graph.ops)) == per_token
    expected = weights * 1e-6 + 1024 * per_token * 1e-9
    assert layers_seconds(model, 1024, 512) == pytest.approx(expected)
    twice = replace(model.settings, batch=512)
    model.settings = twice
    assert layers_seconds(model, 1024, 512) == pytest.approx(expected + weights * 1e-6)
    assert {name for name, *_ in speeds} == {"f32"}


def test_a_token_touches_no_more_experts_than_it_is_sent_to(speeds):
    model = load_model(llama(experts=8))
    one = layers_seconds(model, 1, 512)
    touched = sum(t.n_elements / (2 if "exps" in name else 1) for name, t in matrices_of(model).items())
    assert one == pytest.approx(touched * (1e-6 + 1e-9))


def test_a_baselines_predictions_are_made_beside_those_of_each_model(speeds):
    model = load_model(llama("q8_0"))
    alone, both = head_seconds(model, 100), head_seconds(model, 100, model)
    assert both == pytest.approx(2 * alone)
    assert alone > 0


def test_weights_that_no_file_has_are_read_once_where_they_fit(monkeypatch):
    """Those of a simulated quantisation are encoded for it."""
    monkeypatch.setattr(timing, "_read_speed", lambda tensor, read: 1.0)
    tensor = SourceTensor("a", (64, 32), "f8_e4m3", lambda start, stop: np.zeros((stop - start, 64), np.float32))
    assert timing._read_seconds("", [tensor], 4 * 64 * 32, 3, False) == 64 * 32
    assert timing._read_seconds("", [tensor], 0, 3, False) == 3 * 64 * 32


def test_latents_that_are_observed_are_weighted_beside_the_values(monkeypatch):
    monkeypatch.setattr(timing, "_pair_seconds", lambda width, v_width, latent, n, threads: float(width + v_width + latent))
    monkeypatch.setattr(timing, "_timed", [])
    for model, weighted in ((latent(), N_HEAD * RANK), (llama(), 0)):
        loaded = load_model(model)
        more = timing.attention_seconds(loaded, 64, True) - timing.attention_seconds(loaded, 64)
        layers = sum(isinstance(op, ops.Attention | ops.LatentAttention) for op in loaded.graph.ops)
        assert more == layers * weighted * 64 / 2


@pytest.mark.parametrize("mla", [1, 3])
def test_latent_attention_multiplies_decoded_matrices_and_absorbed_queries_are_as_wide_as_latents(mla, speeds, monkeypatch):
    model = load_model(latent(rank=160, type_name="q8_0"), mla=mla)
    layers_seconds(model, 64, 64)
    op = next(op for op in model.graph.ops if isinstance(op, ops.LatentAttention))
    types = {columns == op.latent.shape[0]: name for name, columns, _ in speeds}
    assert types == {True: "bf16", False: "q8_0"}
    monkeypatch.undo()
    asked = []
    monkeypatch.setattr(timing, "_pair_seconds", lambda *sizes: asked.append(sizes) or 0.0)
    timing.attention_seconds(model, 64, True)
    rank, heads = op.latent.shape[0], (op.q.shape[1], op.out.shape[1], op.latent.shape[0])
    assert asked[0][:3] == ((rank + op.k_pe.shape[0], rank, 0) if mla == 1 else heads)


def test_memory_is_written_for_the_first_time_and_again_in_each_pass(speeds, monkeypatch):
    model = load_model(llama())
    model.settings = replace(model.settings, batch=512)
    without = layers_seconds(model, 1024, 256)
    monkeypatch.setattr(timing, "_first_writes", lambda: (1.0, 0.25))
    assert layers_seconds(model, 1024, 256) - without == pytest.approx(1.25 * model.windows_bytes(2, 256), rel=1e-6)
    monkeypatch.undo()
    assert all(seconds > 0 for seconds in timing._first_writes())


def test_attention_is_measured_with_values_of_all_heads():
    assert timing._pair_seconds(48, 32, 32, 32, 2) > 0
    assert timing._pair_seconds(24, 20, 0, 32, 1) > 0


def test_what_threads_wait_for_each_other_is_an_average_of_all_that_is_timed(speeds, monkeypatch):
    """Of 20 ms of one product there is a call that takes twenty times as long, or none: perplexity was said 4.9 and 9.2 s."""
    seconds = [0.5, 1.0, 20.0, 1.0, 1.0, 0.5, 1.0]
    monkeypatch.setattr(timing, "_each_call", lambda call, clock: seconds)
    assert timing.seconds_of_threads(lambda: None, ALONE) == 1.0
    monkeypatch.setattr(timing, "_each_call", lambda call, clock: [3.0] * 6)
    assert timing.seconds_of_threads(lambda: None, ALONE) == 3.0
    assert timing.waiting() == (25 + 18) / (7 + 18)
    model = load_model(llama())
    with_waiting = layers_seconds(model, 64, 64)
    timing._timed.clear()
    assert timing.waiting() == 1.0
    assert with_waiting / layers_seconds(model, 64, 64) == pytest.approx(43 / 25)


@pytest.mark.parametrize("offset", [0, 32, PAGESIZE - 1])
def test_pages_that_are_not_in_memory_take_time(offset, tmp_path, monkeypatch):
    """Of two tensors the first is all in memory: a slice of 11 GB that was just written was said 26 s of 12."""
    file = np.memmap(tmp_path / "file", np.uint8, "w+", shape=(64 << 20) + PAGESIZE)[offset:]
    rows = [file[i << 25 : (i + 1) << 25].reshape(-1, 1 << 15) for i in range(2)]
    tensors = [SourceTensor(str(i), (1 << 15, 1 << 10), "i8", lambda *_: rows[0], mapped=x) for i, x in enumerate(rows)]
    monkeypatch.setattr(timing, "cached_pages", lambda address, nbytes: b"\1" * (nbytes // PAGESIZE))
    assert timing._touching(tensors) == 0
    second = rows[1].ctypes.data
    monkeypatch.setattr(timing, "cached_pages", lambda address, nbytes: bytes([address < second]) * (nbytes // PAGESIZE))
    monkeypatch.setattr(timing.time, "thread_time", iter([0.0, 1.0]).__next__)
    assert timing._touching(tensors) == pytest.approx(2)  # a run is half of the second


def test_tensors_that_are_not_mapped_or_small_are_not_touched(tmp_path):
    small = np.memmap(tmp_path / "file", np.uint8, "w+", shape=(1, 100))
    for mapped in (small, small[:0], None):
        tensor = SourceTensor("a", (100, 1), "i8", lambda *_: small, mapped=mapped, files=(tmp_path / "gone",))
        assert timing._touching([tensor]) == 0
    assert timing._touching([]) == 0


def test_speeds_are_measured_for_every_kind_of_type():
    for name, threads in (("f32", 1), ("bf16", 2), ("q8_0", 2), ("q4_0_r8", 1), ("iq3_k", 1), ("iq2_kt", 1)):
        speed = timing.product_speed(name, 256, 20, threads=threads)
        assert speed.seconds(1e6, 1e9) > 0, name
