import json

import numpy as np
import pytest

from ggufmill.formats import TYPES, open_gguf
from ggufmill.jobs.execute import execute
from ggufmill.quantize import gguf_source
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.rules import parse_rules
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.perplexity import perplexity
from ggufmill.runtime.evaluate.provenance import (
    HEAD_BYTES,
    SAMPLE_BYTES,
    SAMPLES,
    compare_results,
    describe_model,
    describe_program,
    describe_settings,
    describe_text,
    file_digest,
)


def test_a_small_file_is_hashed_completely(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100_000)
    first = file_digest(path)
    assert first.startswith("xxh3:")
    path.write_bytes(b"x" * 99_999 + b"y")
    assert file_digest(path) != first


def test_a_large_file_is_sampled(tmp_path):
    path, size = tmp_path / "a", HEAD_BYTES + 4 * SAMPLES * SAMPLE_BYTES

    def changed(at):
        with path.open("wb") as file:
            file.truncate(size)  # a sparse file
            file.seek(at)
            file.write(b"y")
        return file_digest(path)

    n_read = []
    path.write_bytes(b"")
    with path.open("wb") as file:
        file.truncate(size)
    original = file_digest(path, progress=lambda n, name: n_read.append(n))
    assert original.startswith("sampled:")
    assert sum(n_read) == HEAD_BYTES + SAMPLES * SAMPLE_BYTES
    assert changed(5) != original  # the header
    assert changed(size - 1) != original
    assert changed(HEAD_BYTES + 3 * SAMPLE_BYTES) == original  # between the samples: only --full-hash finds it
    assert file_digest(path, full=True).startswith("xxh3:")


@pytest.fixture(scope="module")
def quantised(tiny, tmp_path_factory):
    """A file with a recipe and imatrix data in its metadata."""
    path, rule = tmp_path_factory.mktemp("q") / "q.gguf", "ffn_down=bf16\nffn=q8_0\n"
    means = {name: np.ones((1, t.shape[0]), np.float32) for name, t in tiny.tensors.items() if name.startswith("blk.")}
    importance = Importance(
        means, {"quantize.imatrix.dataset": "calibration.txt", "quantize.imatrix.chunks_count": np.int32(7)}
    )
    plan = plan_quantize(
        tiny,
        path,
        type=TYPES["q4_0"],
        rules=parse_rules(rule, "recipe"),
        recipe_text=rule,
        importance=importance,
        version="9.9",
    )
    execute(plan)
    return path


def test_description_of_a_quantised_file(quantised):
    model = load_model(gguf_source(quantised), exact=True, threads=1, cache_k="f32")
    about = describe_model(model)
    assert about["recipe"].splitlines()[0] == "ffn_down=bf16"
    assert about["imatrix"] == {"dataset": "calibration.txt", "chunks_count": 7}
    assert about["made_by"] == "9.9"
    assert about["files"] == [
        {"name": "q.gguf", "nbytes": quantised.stat().st_size, "digest": file_digest(quantised, full=True)}
    ]
    opened = open_gguf(quantised)
    assert about["nbytes"] == sum(t.nbytes for t in opened.tensors.values()) == sum(about["types"].values())
    assert about["types"].keys() == {t.type.name for t in opened.tensors.values()}
    settings = describe_settings(model)
    assert (settings["threads"], settings["exact"], settings["cache_k"], settings["cache_v"]) == (1, True, "f32", "f32")
    assert not {"k_cache_hadamard", "v_cache_hadamard", "cache_k_first"} & settings.keys()
    rotated = describe_settings(load_model(gguf_source(quantised), cache_k_first=("bf16", 1), v_cache_hadamard=True))
    assert (rotated["cache_k_first"], rotated["v_cache_hadamard"]) == (("bf16", 1), True)
    json.dumps([about, settings, describe_program(), describe_text(b"abc", "t")])


def test_weights_interleaved_on_loading_do_not_change_the_description(quantised):
    plain, packed = (load_model(gguf_source(quantised), repack=repack) for repack in (False, True))
    assert any(t.source_type == "q4_0_r8" for t in packed.source.tensors.values())
    assert describe_model(packed) == describe_model(plain)
    assert [describe_settings(model)["repack"] for model in (plain, packed)] == [False, True]


def test_mla_is_recorded_only_for_latent_attention(tiny, build):
    assert "mla" not in describe_settings(load_model(tiny))
    assert describe_settings(load_model(build("v3", "ik"), mla=1))["mla"] == 1


def test_description_without_recipe_and_imatrix(tiny):
    about = describe_model(load_model(tiny))
    assert about["recipe"] is None
    assert about["imatrix"] is None
    assert about["files"] == []


def test_results_are_comparable_if_they_scored_the_same_tokens(tiny, quantised, tokens):
    def result(source, ids, **settings):
        model = load_model(source, **settings)
        about = {"about": describe_model(model), "settings": describe_settings(model)}
        return json.loads(json.dumps(perplexity(model, ids, 20).as_json() | about))

    ours, other = result(gguf_source(quantised), tokens), result(tiny, tokens, cache_k="f32")
    comparison = compare_results(ours, other)
    assert comparison["comparable"]
    assert comparison["ratio"] == pytest.approx(ours["perplexity"] / other["perplexity"], rel=1e-9)
    assert comparison["ratio_error"] > 0
    assert comparison["differences"]["settings.cache_k"] == ("f16", "f32")
    assert "about.recipe" in comparison["differences"]
    assert "settings.batch" not in comparison["differences"]
    changed = tokens.copy()
    changed[33] += 1
    comparison = compare_results(ours, result(tiny, changed))
    assert not comparison["comparable"]
    assert [o.partition(":")[0] for o in comparison["obstacles"]] == ["tokens"]
    assert "ratio" not in comparison
    assert not compare_results(ours, result(tiny, tokens[:100]))["comparable"]
