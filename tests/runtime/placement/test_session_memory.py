"""What caches and states take as planned, against what sessions of such models keep."""

import pytest
from checkpoint_cases import convert_case
from encoder_cases import convert_encoder

from ggufmill.formats import TYPES
from ggufmill.runtime import load_model
from ggufmill.runtime.placement.compute_buffers import Use, compute_bytes
from ggufmill.runtime.placement.memory import (
    TensorSize,
    cache_state_bytes,
    cache_token_bytes,
    place,
)


def use(**changes):
    return Use(**({"n_ctx": 32768} | changes))


def test_states_beside_keys_and_values():
    """Falcon-H1 has both in every layer; of Nemotron-H's layers each has one of them, or is a feed-forward block."""
    keys = {"block_count": 3, "embedding_length": 1024, "feed_forward_length": 4096, "attention.head_count": 8}
    keys |= {"attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64, "vocab_size": 32000}
    keys |= {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 24,
        "ssm.inner_size": 1536,
    }
    falcon = {"general.architecture": "falcon-h1"} | {f"falcon-h1.{key}": value for key, value in keys.items()}
    state = 4 * (24 * 128 * 64 + 3 * (1536 + 2 * 128))
    assert (cache_state_bytes(falcon), cache_token_bytes(falcon, use())) == (state, 2 * 2 * 64 * 2)
    keys |= {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 4096]}
    nemotron = {"general.architecture": "nemotron_h"} | {f"nemotron_h.{key}": value for key, value in keys.items()}
    assert [cache_state_bytes(nemotron, layer) for layer in range(3)] == [state, 0, 0]
    assert [cache_token_bytes(nemotron, use(), layer) for layer in range(3)] == [0, 2 * 2 * 64 * 2, 0]
    lfm2 = {"general.architecture": "lfm2", "lfm2.attention.head_count_kv": [0, 2], "lfm2.shortconv.l_cache": 3}
    assert cache_state_bytes(lfm2 | {"lfm2.embedding_length": 1000}) == 4 * 2 * 1008  # rows are filled up


@pytest.mark.parametrize(
    "case",
    [
        "lfm2",
        "mamba",
        "mamba2-odd",
        "granitehybrid",
        "nemotron-h",
        "falcon-h1",
        "jamba",
        "kimi-linear",
        "deepseek4",
        "deepseek4-odd",
        "qwen4exp",
        "qwen4exp-odd",
        "qwen4exp-plain",
    ],
)
def test_planned_states_are_those_of_a_session(tmp_path, case):
    path = convert_case(case, tmp_path)[2]
    model = load_model(path)
    cache = model.session(n_ctx=32).cache
    layers = range(model.n_layers)
    metadata, names = model.source.metadata, model.source.tensors.keys()
    settings = use(n_ctx=32)
    assert sum(cache_state_bytes(metadata, layer, names) for layer in layers) == cache.state.size
    assert sum(cache_token_bytes(metadata, settings, layer, names) for layer in layers) == cache.token_bytes


def test_deepseek_v4_flash():
    """Of 43 layers 20 keep an entry of 512 numbers for each 128 tokens, 21 one for each 4 tokens with a key of an indexer."""
    ratios = [0, 0] + [4 if i % 2 == 0 else 128 for i in range(41)]
    keys = {"attention.key_length": 512, "attention.sliding_window": 128, "attention.compress_ratios": ratios}
    keys |= {"attention.indexer.key_length": 128, "block_count": 43}
    metadata = {"general.architecture": "deepseek4"} | {f"deepseek4.{key}": value for key, value in keys.items()}
    names = {f"blk.{i}.indexer.proj.weight" for i, ratio in enumerate(ratios) if ratio == 4}
    rows = [cache_token_bytes(metadata, use(), layer, names) for layer in range(43)]
    assert rows == [{0: 0, 4: (2 * 512 + 4 * 128) // 4, 128: 2 * 512 // 128}[ratio] for ratio in ratios]
    window, open_runs = 4 * 128 * 512, {0: 0, 4: 4 * 8 * 4 * (512 + 128), 128: 4 * 128 * 2 * 512}
    states = [cache_state_bytes(metadata, layer, names) for layer in range(43)]
    assert states == [window + open_runs[ratio] for ratio in ratios]


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "gemma4",
        "gemma4-moe-per-layer",
        "gemma3n",
        "gemma3n-odd",
        "deepseek32",
        "glm-dsa-shared",
        "minimax-m3",
        "mimo2",
    ],
)
def test_planned_keys_and_values_are_those_of_a_session(tmp_path, case):
    """Layers that use those of others keep none; local layers may have other heads; indexers keep keys of their own."""
    model = load_model(convert_case(case, tmp_path)[2])
    cache, metadata = model.session(n_ctx=32).cache, model.source.metadata
    planned = [cache_token_bytes(metadata, use(), layer, model.source.tensors.keys()) for layer in range(model.n_layers)]
    assert sum(planned) == cache.token_bytes
    outputs = [TensorSize(name, TYPES["f32"], 0) for name in model.source.tensors]
    (device,) = place(outputs, metadata, use(n_ctx=100), [], {"CPU": None}).devices
    assert device.cache == 100 * cache.token_bytes


def test_gemma_4_31b():
    """50 local layers with 16 key-value heads of 256 numbers, 10 global ones with 4 of 512."""
    local = [(i + 1) % 6 != 0 for i in range(60)]
    keys = {"block_count": 60, "embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 512}
    keys |= {"attention.value_length": 512, "attention.key_length_swa": 256, "attention.value_length_swa": 256}
    keys |= {"attention.head_count_kv": [16 if one else 4 for one in local], "attention.sliding_window_pattern": local}
    metadata = {"general.architecture": "gemma4"} | {f"gemma4.{key}": value for key, value in keys.items()}
    rows = [cache_token_bytes(metadata, use(), layer) for layer in range(60)]
    assert rows == [2 * 2 * (16 * 256 if one else 4 * 512) for one in local]
    shared = metadata | {"gemma4.attention.shared_kv_layers": 20}
    assert [cache_token_bytes(shared, use(), layer) for layer in range(60)] == rows[:40] + [0] * 20


@pytest.mark.parametrize("case", ["bert", "modern-bert", "gemma-embedding", "qwen3-embedding"])
def test_models_without_a_head(tmp_path, case):
    """Texts are no longer than what they were trained with, unless tokens see only earlier ones; no logits are computed."""
    model = load_model(convert_encoder(case, tmp_path / "model")[3])
    metadata, trained = model.source.metadata, model.graph.n_ctx_train
    planned = [TensorSize(name, TYPES["f32"], 0) for name in model.source.tensors]
    kept = model.new_cache(16).token_bytes
    for asked in (64, 32768):
        (device,) = place(planned, metadata, use(n_ctx=asked), [], {"CPU": None}).devices
        assert device.cache == kept * (asked if case.startswith("qwen3") else min(asked, trained))
    name = metadata["general.architecture"]
    assert compute_bytes(metadata, use()) == compute_bytes(metadata | {f"{name}.vocab_size": 10**9}, use())
