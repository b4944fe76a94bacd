"""Each function of the library called as from a notebook: the result is what `--json` prints, progress rises to its total."""

import json
from importlib import import_module

import numpy as np
import pytest
from cpu_products import types_of_several

import ggufmill
from ggufmill import CheckFailed, MillError, UsageError
from ggufmill.formats import TYPES
from ggufmill.pipeline.common.messages import json_pieces, json_text
from ggufmill.quantize import encode
from ggufmill.quantize.codec_kernels import codec_unit, compile_codecs_in_background
from ggufmill.simd.compile import background
from ggufmill.simd.compile.kernel_cache import module_folder

# What differs from one call to the next.
_VOLATILE = {"seconds", "seconds_by_part", "tokens_per_second", "stddev", "samples", "made", "free", "predicted"}
_VOLATILE |= {"t_pp", "t_tg", "speed_pp", "speed_tg", "prompt_per_second", "generated_per_second"}


def steady(value):
    """A result as JSON, without measured times and free disk space."""
    if isinstance(value, dict):
        return {key: steady(v) for key, v in value.items() if key not in _VOLATILE}
    return [steady(v) for v in value] if isinstance(value, list) else value


def same(mill, result, *arguments):
    """Asserts that the command line prints this result."""
    code, out, err = mill(*arguments, "--json")
    assert code == 0, err
    assert steady(json.loads(json_text(result.as_json()))) == steady(json.loads(out))


def test_convert(mill, demo, tmp_path, reports):
    out = tmp_path / "a.gguf"
    result = ggufmill.convert_model(demo.model, out, outtype="q8_0", verify=True, manifest=True, progress=reports)
    assert (result.status, result.files, result.resumed, result.replaced) == ("written", [out], 0, {})
    assert result.manifest.exists()
    assert result.verification.problems == []
    assert reports.stages() == ["convert", "verify"]
    same(mill, result, "convert", demo.model, out, "--outtype", "q8_0", "--verify", "--manifest", "--force")
    again = ggufmill.convert_model(demo.model, out, outtype="q8_0", resume=True)
    assert again.status == "finished before"
    with pytest.raises(ggufmill.PlanError, match="exists; use --force"):
        ggufmill.convert_model(demo.model, out, outtype="q8_0")


def test_quantize(mill, demo, tmp_path, reports):
    out, rules = tmp_path / "q.gguf", "ffn_.*_exps=q4_0"
    plan = ggufmill.quantize_model(demo.model, out, "q8_0", custom_q=rules, attn_output_type="q6_k", dry_run=True)
    assert plan.status == "planned"
    assert plan.forecast.seconds["q4_0"] > 0
    assert not out.exists()
    written = ggufmill.quantize_model(
        demo.model, out, "q8_0", custom_q=rules, attn_output_type="q6_k", override_kv={"general.author": "me"}, progress=reports
    )
    types = {o.name: o.type.name for o in written.plan.outputs}
    assert types["blk.1.ffn_up_exps.weight"] == "q4_0"
    assert types["blk.0.attn_output.weight"] == "q6_K"
    assert reports.stages() == ["quantize"]
    options = ("--custom-q", rules, "--attn-output-type", "q6_k", "--override-kv", "general.author=str:me", "--force")
    same(mill, written, "quantize", demo.model, out, "q8_0", *options)


def test_metadata_alone_is_something_to_write(demo, tmp_path):
    (tmp_path / "keys.json").write_text('{"general.author": "me"}')
    out = tmp_path / "q.gguf"
    result = ggufmill.quantize_model(demo.model, out, metadata=tmp_path / "keys.json", dry_run=True, no_timing=True)
    assert result.plan.metadata["general.author"] == "me"
    with pytest.raises(ggufmill.PlanError, match="nothing to quantise to"):
        ggufmill.quantize_model(demo.model, out, pure=True)


def test_quantize_to_a_size(demo, tmp_path, reports):
    out = tmp_path / "q.gguf"
    result = ggufmill.quantize_model(demo.model, out, target_bpw=6, types=["q4_0", "q8_0"], progress=reports)
    assert 5.9 < result.plan.bits_per_weight <= 6
    assert reports.stages() == ["errors of types", "quantize"]
    assert (tmp_path / "q.gguf.recipe.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"types": "q4_0"}, "--types does nothing without a target"),
        ({"hide_imatrix": True}, "--hide-imatrix does nothing without --imatrix"),
        ({"leave_output_tensor": True, "output_tensor_type": "q6_k"}, "give one of them"),
    ],
)
def test_arguments_that_do_nothing_are_refused(demo, tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        ggufmill.quantize_model(demo.model, tmp_path / "q.gguf", "q8_0", **arguments)


def test_repack_split_merge(mill, models, tmp_path, reports):
    packed = ggufmill.repack_model(models.q4, tmp_path / "r.gguf", pattern="ffn", verify=True, progress=reports)
    assert packed.plan.histogram()["q4_0_r8"][0] > 0
    same(mill, packed, "repack", models.q4, tmp_path / "r.gguf", "--pattern", "ffn", "--verify", "--force")
    split = ggufmill.split_model(models.q4, tmp_path / "part", split_max_tensors=40, progress=reports)
    assert [path.name for path in split.files] == ["part-00001-of-00002.gguf", "part-00002-of-00002.gguf"]
    same(mill, split, "split", models.q4, tmp_path / "part", "--split-max-tensors", 40, "--force")
    merged = ggufmill.merge_model(split.files[1], tmp_path / "m.gguf", progress=reports)
    assert merged.files[0].read_bytes() == ggufmill.merge_model(split.files[0], tmp_path / "n.gguf").files[0].read_bytes()
    same(mill, merged, "merge", split.files[1], tmp_path / "m.gguf", "--force")
    assert reports.stages() == ["repack", "verify", "split", "merge"]


def test_hash_and_inspect(mill, models, tmp_path, reports):
    manifest = tmp_path / "manifest"
    result = ggufmill.hash_model(models.q4, sha256=True, output=manifest, progress=reports)
    same(mill, result, "hash", models.q4, "--sha256")
    checked = ggufmill.hash_model(models.q4, check=manifest)
    assert set(checked.verdicts) == {"Ok"}
    manifest.write_text(manifest.read_text().replace("a", "b", 1))
    with pytest.raises(CheckFailed, match="are not as") as failed:
        ggufmill.hash_model(models.q4, check=manifest)
    assert len(failed.value.result.bad) == 1
    inspected = ggufmill.inspect_model(models.q4, check=True, checksums=True, progress=reports)
    same(mill, inspected, "inspect", models.q4, "--check", "--checksums")
    assert reports.stages() == ["hash", "inspect"]
    same(mill, ggufmill.inspect_processor(), "inspect", "--cpu")


def test_recipes(mill, demo):
    same(mill, ggufmill.list_recipes(), "recipes", "list")
    assert ggufmill.read_recipe("demo") == mill("recipes", "show", "demo")[1]
    same(mill, ggufmill.lint_recipe("demo", demo.model), "recipes", "lint", "demo", demo.model)
    explained = ggufmill.explain_recipe(demo.model, recipe="demo")
    same(mill, explained, "recipes", "explain", demo.model, "--recipe", "demo")
    with pytest.raises(UsageError, match="there is no recipe"):
        ggufmill.read_recipe("none")


def test_plan_memory(mill, demo):
    result = ggufmill.plan_memory(demo.model, ram="1GiB", vram=["1GiB"], override_tensor="exps=CPU", n_ctx=512)
    assert result.fits
    given = ("--ram", "1GiB", "--vram", "1GiB", "-ot", "exps=CPU", "-c", 512)
    same(mill, result, "plan", demo.model, *given)


def test_imatrix(mill, demo, tmp_path, reports):
    one, two, both = (tmp_path / f"{name}.imatrix" for name in ("one", "two", "both"))
    first = ggufmill.compute_imatrix(demo.model, demo.calibration, one, n_ctx=64, chunks=2, threads=1, progress=reports)
    assert reports.stages() == ["imatrix"]
    assert reports[-1].partial.perplexity == first.figures.perplexity
    given = ("-f", demo.calibration, "-o", one, "-c", 64, "--chunks", 2, "-t", 1, "--force")
    same(mill, first, "imatrix", demo.model, *given)
    in_memory = ggufmill.compute_imatrix(demo.model, demo.calibration, n_ctx=64, chunks=2, from_chunk=2, threads=1)
    assert in_memory.path is None
    in_memory.imatrix.save(two)
    merged = ggufmill.merge_imatrix([one, two], both)
    assert merged.imatrix.chunk_count == 4
    same(mill, merged, "imatrix", "merge", one, two, "-o", both, "--force")
    whole = ggufmill.compute_imatrix(demo.model, demo.calibration, n_ctx=64, chunks=4, threads=1).imatrix
    for name, (sums, counts) in whole.entries.items():
        assert np.allclose(merged.imatrix.entries[name][0], sums, rtol=1e-5)
        assert (merged.imatrix.entries[name][1] == counts).all()
    same(mill, ggufmill.show_imatrix(one, two, layer_similarity=True), "imatrix", "show", one, two, "-lsim")
    converted = ggufmill.convert_imatrix(one, tmp_path / "one.dat")
    assert "how many tokens each expert" in converted.lost[0]
    with pytest.raises(UsageError, match="--column does nothing without"):
        ggufmill.compute_imatrix(demo.model, demo.calibration, column="text")


def test_search(mill, demo, tmp_path, reports):
    out, other = tmp_path / "r.txt", tmp_path / "other.txt"
    options = {"types": "q4_0,q8_0", "rows": 8, "threads": 1}
    result = ggufmill.search_recipe(demo.model, out, target_bpw=6, **options, progress=reports)
    assert result.text == out.read_text()
    assert reports.stages() == ["errors of types"]
    given = ("--target-bpw", 6, "--types", "q4_0,q8_0", "--rows", 8, "-t", 1)
    code, text, _ = mill("search", demo.model, other, *given, "--json")
    assert code == 0
    printed = json.loads(text)
    assert printed["tensors"] == result.as_json()["tensors"]
    assert printed.keys() == result.as_json().keys()
    with pytest.raises(UsageError, match="--chunks does nothing without a text"):
        ggufmill.search_recipe(demo.model, tmp_path / "c.txt", target_bpw=6, chunks=8)


def test_perplexity_and_compare(mill, demo, models, reports):
    settings = {"n_ctx": 64, "threads": 1}
    given = ("-f", demo.heldout, "-c", 64, "-t", 1, "--chunks", 2)
    result = ggufmill.perplexity(
        models.q4, demo.heldout, chunks=2, kl_divergence=models.bf16, full_hash=True, progress=reports, **settings
    )
    assert result.kld_mean > 0
    assert result.about["nbytes"] < result.baseline_about["nbytes"]
    assert sorted(reports.stages()) == ["checksum", "checksum", "perplexity"]
    same(mill, result, "perplexity", models.q4, *given, "--kl-divergence", models.bf16, "--full-hash")
    compared = ggufmill.compare_models(models.bf16, models.q4, demo.heldout, chunks=2, progress=reports, **settings)
    assert [layer.layer for layer in compared.layers] == [0, 1, 2, 3]
    same(mill, compared, "compare", models.bf16, models.q4, *given)


def test_speeds(demo, models, reports):
    result = ggufmill.benchmark(models.q4, n_prompt=8, n_gen=2, repetitions=2, threads=[1, 2], progress=reports)
    assert [(row.test, row.n_threads) for row in result.rows] == [("pp8", 1), ("tg2", 1), ("pp8", 2), ("tg2", 2)]
    assert reports[-1].partial is result
    swept = ggufmill.sweep_benchmark(models.q4, n_ctx=32, pp=16, tg=2, threads=1, progress=reports)
    assert [row.n_kv for row in swept.rows] == [0, 16]
    assert reports.stages() == ["bench", "sweep-bench"]
    with pytest.raises(UsageError, match="nothing to measure"):
        ggufmill.benchmark(models.q4, n_prompt=0, n_gen=0)


def test_text(mill, models, reports):
    pieces = []
    result = ggufmill.generate_text(models.q4, "The list", n_predict=6, temp=0, on_text=pieces.append, progress=reports)
    assert "".join(pieces) == result.text
    assert reports.stages() == ["generate"]
    same(mill, result, "generate", models.q4, "-p", "The list", "-n", 6, "--temp", 0)
    chat = ggufmill.start_chat(models.q4, template="chatml", n_predict=4, temp=0)
    assert "".join(chat.answer("Hello")) == chat.messages[-1]["content"]


def test_warm_up(mill, models, reports, monkeypatch):
    asked = types_of_several(monkeypatch)
    result = ggufmill.warm_up(models.q4, types=["q4_0", "Q4_0_R8"], threads=1, progress=reports)
    assert (result.types, result.model) == (("q4_0", "q4_0_r8"), str(models.q4))
    assert reports.stages() == ["codecs", "model"]
    assert "q4_0" in asked
    again = ggufmill.warm_up(models.q4, types=["q4_0", "Q4_0_R8"], threads=1)
    assert again.kernels == 0
    same(mill, again, "warm-up", models.q4, "--types", "q4_0,q4_0_r8", "-t", 1)
    with pytest.raises(UsageError, match="nothing to compile"):
        ggufmill.warm_up()


@pytest.mark.process
def test_codecs_are_compiled_by_another_process(tmp_path, monkeypatch):
    """encode waits for it; then they are there."""
    monkeypatch.setenv("GGUFMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(background, "available_cpus", lambda: 2)
    monkeypatch.setattr(background, "_crews", {})  # of tests before, with another folder of kernels
    module_folder.cache_clear()
    encoding = import_module("ggufmill.quantize.encode")
    encoding._compile.cache_clear()
    monkeypatch.setattr(encoding, "_used", set())
    try:
        types = [(TYPES["q4_0_r8"], False), (TYPES["f32"], False)]
        assert compile_codecs_in_background(types, urgent=False) == 1
        x = np.ones((8, 32), np.float32)
        assert encode(x, "q4_0_r8").shape == (8, 18)
        assert encode(x, "f32").shape == (8, 128)
        assert [codec_unit(each.name).is_marked for each, _ in types] == [True, True]
        assert compile_codecs_in_background(types) == 0
    finally:
        module_folder.cache_clear()


def test_a_loaded_model_serves_several_calls(demo, models):
    from ggufmill.runtime import load_model

    model = load_model(models.q4, threads=1)
    perplexity = ggufmill.perplexity(model, demo.heldout, n_ctx=64, chunks=2)
    assert perplexity.perplexity == ggufmill.perplexity(models.q4, demo.heldout, n_ctx=64, chunks=2, threads=1).perplexity
    text = ggufmill.generate_text(model, "The list", n_predict=4, temp=0).text
    assert model.generate("The list", n_predict=4, temp=0).text() == text
    with pytest.raises(UsageError, match="is loaded already"):
        ggufmill.generate_text(model, "The list", threads=1)


def test_a_checkpoint_folder_is_a_model(demo, models):
    from ggufmill import perplexity
    from ggufmill.convert import open_source
    from ggufmill.runtime import load_model

    assert perplexity is ggufmill.perplexity
    tokens = [1, 17, 40, 5]
    logits = load_model(open_source(demo.model)).logits(tokens)
    np.testing.assert_array_equal(load_model(demo.model).logits(tokens), logits)
    np.testing.assert_array_equal(load_model(str(demo.model)).logits(tokens), logits)
    assert load_model(models.bf16).logits(tokens).argmax(-1).tolist() == logits.argmax(-1).tolist()
    with pytest.raises(MillError, match="is no checkpoint: it has no config.json"):
        load_model(models.bf16.parent)


def test_run(mill, tmp_path, reports):
    recipe = tmp_path / "small.toml"
    demo = ggufmill.recipes.FOLDER / "demo"
    recipe.write_text(
        f"[source]\nmodel = '{demo}'\n[quantize]\ntype = 'q8_0'\n"
        f"[validate]\ntext = '{demo}/heldout.txt'\nctx = 64\nchunks = 2\nmax_kld = 1\n"
    )
    planned = ggufmill.run_recipe(recipe, tmp_path / "out", dry_run=True)
    [file] = planned.quants
    assert planned.forecast.disk_needed == file.plan.file_bytes
    same(mill, planned, "run", recipe, "-o", tmp_path / "out", "--dry-run")
    result = ggufmill.run_recipe(recipe, tmp_path / "out", progress=reports)
    stages = ["quantize", "verify", "validate", "noise floor", "layers"]
    assert [stage for stage in reports.stages() if stage != "checksum"] == stages
    assert result.report["validation"]["kld_mean"] < 0.1
    assert all(path.exists() for path in result.reports)
    same(mill, result, "run", recipe, "-o", tmp_path / "out")
    recipe.write_text(recipe.read_text().replace("max_kld = 1", "max_kld = 1e-9"))
    with pytest.raises(CheckFailed, match="the recipe allows max_kld") as failed:
        ggufmill.run_recipe(recipe, tmp_path / "out")
    assert failed.value.result.report["failures"]


def test_serve(demo):
    import threading

    pytest.importorskip("uvicorn")
    stop, addresses = threading.Event(), []

    def ready(address):
        addresses.append(address)
        stop.set()

    ggufmill.serve_model(demo.model, port=0, no_warmup=True, on_ready=ready, stop=stop)
    assert addresses[0].startswith("http://127.0.0.1:")


def test_what_fails_raises(demo, tmp_path):
    with pytest.raises(MillError, match="is no checkpoint"):
        ggufmill.convert_model(tmp_path, tmp_path / "a.gguf")


def test_json_in_pieces_is_the_json_of_the_whole():
    items = [{"name": f"t{i}", "shape": [i, 2], "error": float("nan") if i == 1500 else i / 3} for i in range(2500)]
    whole = {"files": ["a"], "tensors": items, "none": [], "types": {"f32": {"tensors": 1}}, "total": 3, "ratio": float("inf")}
    pieces = list(json_pieces(whole | {"tensors": iter(items), "none": iter([])}))
    assert "".join(pieces) == json_text(whole)
    assert len(pieces) > 10
    assert "".join(json_pieces({})) == "{}"
