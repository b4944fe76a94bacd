"""Where a model lies and what it takes, against sizes that ik_llama.cpp logged for DeepSeek-V3 and R1 (671 B)."""

import gc
import re
import tracemalloc

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, PlanError
from ggufmill.jobs.patterns import NamePattern
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.placement.compute_buffers import Expansion, Use, compute_bytes, processor_bytes
from ggufmill.runtime.placement.memory import (
    TensorOverride,
    TensorSize,
    cache_state_bytes,
    cache_token_bytes,
    overrides_of,
    parse_overrides,
    place,
)
from ggufmill.runtime.settings import LayerPlacement

MIB = 1 << 20
KEYS = {
    "block_count": 61,
    "embedding_length": 7168,
    "attention.head_count": 128,
    "attention.head_count_kv": 128,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64,
    "vocab_size": 129280,
}
DEEPSEEK = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in KEYS.items()}
MAINLINE = DEEPSEEK | {
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
}
LLAMA = {"general.architecture": "llama"} | {
    f"llama.{key}": value
    for key, value in {
        "block_count": 32,
        "embedding_length": 4096,
        "feed_forward_length": 14336,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "vocab_size": 128256,
    }.items()
}


def use(**changes):
    return Use(**({"n_ctx": 32768} | changes))


@pytest.mark.parametrize(
    ("mla", "k", "v", "per_token"),
    [
        (0, "f16", "f16", 4_997_120),
        (0, "q8_0", "q8_0", 2_654_720),
        (0, "q8_0", "f16", 3_591_680),
        (1, "f16", "f16", 132_736),
        (1, "q8_0", "f16", 99_796),
        (2, "f16", None, 70_272),
        (3, "f16", "f16", 70_272),
        (3, "q8_0", None, 37_332),
    ],
)
@pytest.mark.parametrize("metadata", [DEEPSEEK, MAINLINE])
def test_cache_per_token(metadata, mla, k, v, per_token):
    assert 61 * cache_token_bytes(metadata, use(mla=mla, cache_k=k, cache_v=v)) == per_token


@pytest.mark.parametrize(
    ("metadata", "changes", "message"),
    [
        (DEEPSEEK, {"cache_k": "q8_0", "cache_v": "f16"}, "-ctv f16 has no effect: with -mla 3 only latents"),
        (DEEPSEEK, {"mla": 1, "cache_v": "q8_0", "flash": False}, r"quantised values \(-ctv q8_0\) need flash attention"),
        (LLAMA, {"cache_v": "q8_0", "flash": False}, r"quantised values \(-ctv q8_0\) need flash attention"),
        (LLAMA, {"mla": 3}, "-mla 3 has no effect: the model has no latent attention"),
        (LLAMA | {"llama.attention.key_length": 40}, {"cache_k": "q8_0"}, "-ctk q8_0: keys of this model have 40 numbers"),
    ],
)
def test_what_could_not_be_run_is_not_planned(metadata, changes, message):
    with pytest.raises(PlanError, match=message):
        place([], metadata, use(**changes), [], {"CPU": None})


def test_the_small_deepseek_with_16_heads_has_the_figures_of_the_pull_request():
    small = DEEPSEEK | {"deepseek2.attention.head_count": 16}
    assert 61 * cache_token_bytes(small, use(mla=0)) == 624_640
    assert 61 * cache_token_bytes(small, use(mla=0, cache_k="q8_0", cache_v="q8_0")) == 331_840


@pytest.mark.parametrize(
    ("n_ctx", "k", "mib"),
    [
        (2048, "q8_0", 72.91),
        (20480, "q8_0", 729.14),
        (20480, "f16", 1372.50),
        (32768, "q8_0", 1166.62),
        (32768, "f16", 2196.00),
        (51200, "f16", 3431.25),
        (65536, "q8_0", 2333.25),
        (131072, "q8_0", 4666.50),
        (153600, "q8_0", 5468.55),
        (163840, "q8_0", 5833.12),
        (163840, "f16", 10980.00),
    ],
)
def test_logged_cache_sizes(n_ctx, k, mib):
    placed = place([], DEEPSEEK, use(n_ctx=n_ctx, cache_k=k), [], {"CPU": None, "CUDA0": None})
    assert placed.devices[1].cache / MIB == pytest.approx(mib, abs=0.006)
    assert placed.devices[0].cache == 0


@pytest.mark.parametrize(
    ("n_ctx", "ubatch", "mib", "within"),
    [
        (32768, 512, 3425.00, 0.001),
        (65536, 512, 6081.00, 0.001),
        (32768, 4096, 4104.02, 0.005),
        (32768, 2048, 3677.51, 0.01),
        (32768, 2048, 3588.00, 0.04),
        (20480, 2048, 2552.01, 0.06),  # one of two GPUs
        (163840, 512, 13649.00, 0.03),
        (163840, 1024, 14258.00, 0.005),
    ],
)
def test_logged_buffers_with_flash_attention(n_ctx, ubatch, mib, within):
    asked = use(n_ctx=n_ctx, ubatch=ubatch, attention_bytes=512 * MIB)
    assert compute_bytes(DEEPSEEK, asked) / MIB == pytest.approx(mib, rel=within)


@pytest.mark.parametrize(
    ("n_ctx", "ubatch", "mib"),
    [
        (20480, 512, 5718.01),
        (32768, 256, 4465.00),
        (32768, 512, 8900.01),
        (32768, 1024, 17796.02),
        (51200, 256, 6654.50),
        (163840, 512, 42820.01),
    ],
)
def test_logged_buffers_without_flash_attention(n_ctx, ubatch, mib):
    asked = use(n_ctx=n_ctx, ubatch=ubatch, mla=2, flash=False)
    assert compute_bytes(DEEPSEEK, asked) / MIB == pytest.approx(mib, rel=0.07)
    bounded = use(n_ctx=n_ctx, ubatch=ubatch, mla=2, flash=False, attention_bytes=2048 * MIB)
    assert compute_bytes(DEEPSEEK, bounded) < 3 << 30  # "-amb 2048 keeps compute buffers under 3 GiB at 163k"


def test_grouped_attention():
    assert cache_token_bytes(LLAMA, use()) == 2 * 8 * 128 * 2
    per_layer = LLAMA | {"llama.attention.head_count_kv": [8] * 31 + [2]}
    assert cache_token_bytes(per_layer, use(cache_k="q8_0"), 31) == 2 * (128 * 2 + 136)
    assert compute_bytes(LLAMA, use(flash=False)) - compute_bytes(LLAMA, use()) > 32768 * 32 * 512 * 4 * 0.9


def test_recurrent_states():
    """Qwen3-Next 80B: 36 layers with a matrix of 128 x 128 for each of 32 heads, and three inputs of 8192 channels."""
    keys = {"block_count": 48, "embedding_length": 2048, "feed_forward_length": 5120, "attention.head_count": 16}
    keys |= {"attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256, "vocab_size": 151936}
    keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32}
    keys |= {"ssm.inner_size": 4096, "full_attention_interval": 4}
    metadata = {"general.architecture": "qwen3next"} | {f"qwen3next.{key}": value for key, value in keys.items()}
    state = 4 * (32 * 128 * 128 + 3 * 8192)
    assert [cache_state_bytes(metadata, layer) for layer in range(5)] == [state, state, state, 0, state]
    assert [cache_token_bytes(metadata, use(), layer) for layer in range(4)] == [0, 0, 0, 2 * 2 * 256 * 2]
    cpu, gpu = place([], metadata, use(), [], {"CPU": None, "CUDA0": None}).devices
    assert gpu.cache == 36 * 2 * state + 12 * 32768 * 2048
    assert cpu.cache == 36 * 8 * state  # checkpoints
    assert cache_state_bytes(LLAMA) == 0


def weights(n_layer, kind="q4_0"):
    names = ["token_embd.weight", "output.weight"]
    names += [f"blk.{i}.{role}.weight" for i in range(n_layer) for role in ("attn_q", "ffn_up_exps")]
    return [TensorSize(name, TYPES[kind if "exps" in name else "q8_0"], 1000) for name in names]


def devices(placed):
    return {name: device for name, (device, _) in placed.places.items()}


def test_first_override_wins_and_dead_ones_are_reported():
    rules = parse_overrides(r"blk\.[0-1]\.ffn=CUDA0,exps=CPU,ffn_up_exps=CUDA0,nothing=CPU")
    placed = place(weights(61), DEEPSEEK, use(), rules, {"CPU": 10**12, "CUDA0": 10**12})
    where = devices(placed)
    assert [where[f"blk.{i}.ffn_up_exps.weight"] for i in (0, 1, 2, 60)] == ["CUDA0", "CUDA0", "CPU", "CPU"]
    assert where["token_embd.weight"] == "CPU"
    assert where["output.weight"] == where["blk.60.attn_q.weight"] == "CUDA0"
    assert placed.hits == {
        r"blk\.[0-1]\.ffn=CUDA0": (2, 2000),
        "exps=CPU": (59, 59000),
        "ffn_up_exps=CUDA0": (0, 0),
        "nothing=CPU": (0, 0),
    }
    assert placed.warnings[0] == (
        r"-ot ffn_up_exps=CUDA0 does nothing: blk\.[0-1]\.ffn=CUDA0 comes first and takes blk.0.ffn_up_exps.weight"
    )
    assert placed.warnings[1] == "-ot nothing=CPU does nothing: it matches no tensor"
    assert placed.fits
    assert [d.tensors for d in placed.devices] == [60, 64]


def test_interleaved_rows_on_a_gpu_are_warned_of():
    gpu = place(weights(61, "q4_0_r8"), DEEPSEEK, use(), [], {"CPU": None, "CUDA0": None})
    assert "blk.0.ffn_up_exps.weight (q4_0_r8) and 60 more would lie on CUDA0" in gpu.warnings[0]
    in_ram = overrides_of(LayerPlacement(cpu_moe=True))
    ram = place(weights(61, "q4_0_r8"), DEEPSEEK, use(), in_ram, {"CPU": None, "CUDA0": None})
    assert ram.warnings == []
    assert place(weights(61, "q4_0_r8"), DEEPSEEK, use(), [], {"CPU": None}).warnings == []


def test_layers_on_gpus():
    both = {"CPU": None, "CUDA0": 3 * 10**9, "CUDA1": 10**9}
    where = devices(place(weights(61), DEEPSEEK, use(), [], both))
    on_first = sum(where[f"blk.{i}.attn_q.weight"] == "CUDA0" for i in range(61))
    assert 45 <= on_first <= 48
    assert where["output.weight"] == "CUDA1"
    where = devices(place(weights(61), DEEPSEEK, use(gpu_layers=10), [], {"CPU": None, "CUDA0": None}))
    assert [where[f"blk.{i}.attn_q.weight"] for i in (50, 51, 60)] == ["CPU", "CUDA0", "CUDA0"]
    assert where["output.weight"] == "CPU"
    first = overrides_of(LayerPlacement(n_cpu_moe=3))
    where = devices(place(weights(61), DEEPSEEK, use(), first, {"CPU": None, "CUDA0": None}))
    assert [where[f"blk.{i}.ffn_up_exps.weight"] for i in (0, 2, 3)] == ["CPU", "CPU", "CUDA0"]


def test_what_lacks_memory_says_how_much():
    placed = place(weights(61), DEEPSEEK, use(cache_k="q8_0", attention_bytes=512 * MIB), [], {"CPU": None, "CUDA0": 4 << 30})
    assert not placed.fits
    assert re.fullmatch(r"CUDA0 lacks \d+ MiB", placed.warnings[-1])
    assert 490 < int(re.findall(r"\d+", placed.warnings[-1])[1]) < 500  # 3424 + 1166.6 - 4096
    assert placed.as_json()["devices"][1]["free"] == placed.devices[1].free


def test_overrides_as_people_write_them():
    parsed = parse_overrides("[6-9]\\.*exps=CPU,[1-6][0-9]\\.*exps=cpu,a{1,2}=CUDA1")
    assert [str(rule) for rule in parsed] == ["[6-9]\\.*exps=CPU", "[1-6][0-9]\\.*exps=CPU", "a{1,2}=CUDA1"]
    for wrong in ("exps", "exps=GPU", "=CPU", "(=CPU"):
        with pytest.raises(PlanError, match="-ot"):
            parse_overrides(wrong)
    with pytest.raises(PlanError, match="there is no CUDA1"):
        place([], DEEPSEEK, use(), [TensorOverride(NamePattern("x"), "CUDA1", "-ot")], {"CPU": None, "CUDA0": None})


def test_a_small_model_with_latent_attention():
    """ik_llama.cpp takes 9.1 MiB of the demo at 2048 tokens with -mla 1, and 129.5 MiB at 32768 with -mla 3."""
    metadata = open_source(FOLDER / "demo").metadata
    for n_ctx, mla, measured in ((2048, 1, 9.1), (32768, 3, 129.5)):
        assert measured * 0.9 < compute_bytes(metadata, use(n_ctx=n_ctx, mla=mla)) / MIB < 4 * measured


@pytest.mark.slow
@pytest.mark.parametrize(("n_ctx", "mla", "ubatch"), [(2048, 1, 512), (2048, 3, 512), (2048, 3, 128), (4096, 2, 256)])
def test_buffers_of_the_processor_are_what_a_prompt_takes(n_ctx, mla, ubatch):
    """tracemalloc counts what numpy allocates. Weights are decoded before; cached passes of other sizes are not used again."""
    model = load_model(FOLDER / "demo", n_ctx=n_ctx, mla=mla, ubatch=ubatch, threads=2)
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, n_ctx)
    for size in (ubatch - 1, ubatch - 2):
        model.feed([(model.session(), tokens[:size])])
    gc.collect()
    session = model.session()
    tracemalloc.start()
    try:
        model.feed([(session, tokens)])
        taken = tracemalloc.get_traced_memory()[1] - session.cache.nbytes
    finally:
        tracemalloc.stop()
    asked = use(n_ctx=n_ctx, mla=mla, ubatch=ubatch, threads=2)
    assert processor_bytes(model.metadata, asked) / MIB == pytest.approx(taken / MIB, rel=0.1)
    (device,) = place([], model.metadata, asked, [], {"CPU": None}).devices
    assert device.compute == processor_bytes(model.metadata, asked)


def test_longer_contexts_and_more_threads_take_more():
    metadata = open_source(FOLDER / "demo").metadata
    sizes = [processor_bytes(metadata, use(n_ctx=n_ctx, mla=3, threads=2)) for n_ctx in (512, 8192, 32768)]
    assert sizes == sorted(sizes)
    for threads in (1, 2, 16, 256):
        for tokens in (64, 32768, 163840):
            assert Expansion.of(128, tokens, 192, 128, 512 * MIB, threads).nbytes <= 512 * MIB
    one_head = 4 * 10**6 * (192 + 128)
    assert Expansion.of(128, 10**6, 192, 128, 512 * MIB, 2).nbytes == one_head
