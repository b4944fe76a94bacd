"""What a dry run says of jobs with several parts: each is counted, and as often as it is done."""

import json
from itertools import cycle

import pytest

import ggufmill
from ggufmill.pipeline.common.forecast import Forecast
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
READ = {"text": DEMO / "calibration.txt", "n_ctx": 32, "chunks": 1, "measurements": 3, "threads": 1, "rows": 8}
TYPES = "q4_0,q5_0,q8_0"


@pytest.fixture
def measured(monkeypatch):
    """Models that read a text in place of the original, as they are measured."""
    from ggufmill.runtime.evaluate.sensitivity import Reference

    calls, with_types = [], Reference.with_types
    monkeypatch.setattr(Reference, "with_types", lambda self, *given: calls.append(given[0]) or with_types(self, *given))
    return calls


@pytest.mark.parametrize("refine", [0, 1])
def test_a_search_counts_the_models_that_it_measures(tmp_path, measured, refine, monkeypatch):
    monkeypatch.setattr("ggufmill.pipeline.recipe_search.forecast.encode_speed", lambda *_, **__: 1e8)
    monkeypatch.setattr("ggufmill.runtime.timing.waiting", lambda: 1.0)
    arguments = {**READ, "types": TYPES, "target_bpw": 5.5, "refine": refine}
    planned = ggufmill.search_recipe(DEMO, tmp_path / "r.txt", dry_run=True, **arguments)
    assert not measured
    ggufmill.search_recipe(DEMO, tmp_path / "r.txt", **arguments)
    taken = len(measured) + 1  # the original reads it, too
    assert taken == pytest.approx(planned.work["runs"], rel=0.2 * refine)
    again = ggufmill.search_recipe(DEMO, tmp_path / "r.txt", dry_run=True, force=True, **arguments)
    assert again.work["runs"] <= planned.work["runs"] - 16  # probes of sensitivities are known
    assert again.forecast.total < planned.forecast.total


def test_what_fits_in_its_finest_types_is_not_measured(tmp_path, measured):
    arguments = {**READ, "types": TYPES, "target_bpw": 9}
    found = ggufmill.search_recipe(DEMO, tmp_path / "r.txt", **arguments)
    assert len(measured) == 1  # what is found
    assert {kind.name for kind in found.types.values()} == {"q8_0"}


def test_a_dry_run_of_a_target_measures_nothing_and_says_what_searching_takes(tmp_path, measured):
    out, given = tmp_path / "q.gguf", {"types": TYPES, "target_bpw": 5.5, "dry_run": True, "threads": 1}
    plain = ggufmill.quantize_model(DEMO, out, **given)
    planned = ggufmill.quantize_model(DEMO, out, calibration=DEMO / "calibration.txt", **given)
    assert not measured
    assert 5 < planned.plan.bits_per_weight <= 5.5
    assert planned.forecast.seconds["search"] > 10 * plain.forecast.seconds["search"] > 0
    assert planned.forecast.memory > plain.forecast.memory


def test_comparing_with_the_source_is_counted(tmp_path):
    given = {"type": "iq4_k", "dry_run": True, "threads": 2}
    plain = ggufmill.quantize_model(DEMO, tmp_path / "q.gguf", **given).forecast
    checked = ggufmill.quantize_model(DEMO, tmp_path / "q.gguf", verify=True, **given).forecast
    assert checked.seconds.keys() - plain.seconds.keys() == {"verify"}
    assert 0 < checked.seconds["verify"] < 2 * checked.seconds["iq4_k"] + 0.2
    assert checked.idle == plain.idle + checked.seconds["verify"]


@pytest.mark.slow
def test_a_run_says_seconds_and_memory_of_its_stages(tmp_path):
    recipe = tmp_path / "r.toml"
    text = (FOLDER / "demo.toml").read_text().replace('"demo', f'"{FOLDER}/demo').replace("chunks = 80", "chunks = 2")
    recipe.write_text(text.replace('baseline = "bf16"', 'baseline = "bf16"\nchunks = 2').replace("n = 48", "n = 2"))
    planned = ggufmill.run_recipe(recipe, tmp_path / "out", dry_run=True)
    done = ggufmill.run_recipe(recipe, tmp_path / "out")
    assert set(planned.stages) == set(done.report["seconds"])
    figures = planned.as_json()
    assert figures["predicted"]["processor_seconds"] > sum(stage.total for stage in planned.stages.values()) / 2
    stages = [stage.memory for stage in planned.stages.values() if stage.memory]
    assert max(stages) < figures["memory"]["peak"] < sum(stages)
    again = ggufmill.run_recipe(recipe, tmp_path / "out", dry_run=True)
    assert not set(again.stages) - {"validate", "checksums"}


def test_stages_share_a_program_that_starts_once():
    first = Forecast(0, None, {"start": 1.0, "run": 2.0}, memory=10, threads=2)
    second = Forecast(0, None, {"start": 3.0, "torch": 1.0, "sums": 4.0, "run": 1.0}, memory=20, threads=2, idle=1.5)
    both = Forecast(7, None, threads=2).with_stage("one", first).with_stage("two", second)
    assert both.seconds == {"start": 3.0, "one": 2.0, "torch": 1.0, "two": 5.0}
    assert (both.memory, both.idle, both.disk_needed) == (20, 1.5, 7)
    assert json.loads(json.dumps(both.as_json()))["predicted"]["processor_seconds"] == 2 * 11 - 1.5


def test_a_sum_is_written_when_no_pass_is_in_memory_any_more(tmp_path, monkeypatch):
    from ggufmill.quantize.covariance.matrix.triangles import triangle_size
    from ggufmill.runtime import Model

    def said(running):
        monkeypatch.setattr(Model, "windows_bytes", lambda self, count, n_ctx: running)
        files = tmp_path / "a.imatrix", tmp_path / "a.cov"
        options = {"n_ctx": 64, "chunks": 2, "threads": 1, "dry_run": True}
        return ggufmill.compute_imatrix(DEMO, READ["text"], files[0], covariance=files[1], **options).forecast.memory_bytes

    widest = json.loads((DEMO / "config.json").read_text())["intermediate_size"]
    least = said(0)
    assert said(1 << 30) - least == (1 << 30) - 2 * triangle_size(widest)
    assert said(2 * triangle_size(widest)) == least


def test_a_comparison_has_a_pass_of_each_model_and_keeps_none(tmp_path, monkeypatch):
    """The smaller one was counted twice: 150 MiB were said of the demo, of 137."""
    from ggufmill.runtime import Model

    def said(*passes):
        sizes = cycle(passes)
        monkeypatch.setattr(Model, "windows_bytes", lambda self, count, n_ctx: next(sizes))
        planned = ggufmill.compare_models(DEMO, DEMO, text=READ["text"], n_ctx=64, dry_run=True)
        return planned.forecast.memory

    small, large = 1 << 23, 1 << 24  # a second one of such a size may be kept
    assert said(small, large) - said(small, small) == large - small
    assert said(large, large) - said(small, small) == 2 * (large - small)


def test_a_thread_has_a_chunk_that_is_encoded_and_others_that_wait(tmp_path):
    """It took 9 MiB of the demo where 30 were said, and 20 of whole chunks in float32."""
    from ggufmill.jobs.execute import CHUNK_ELEMENTS, CHUNKS_PER_THREAD
    from ggufmill.pipeline.writing import forecast as written

    def said(source, type_name, threads):
        planned = ggufmill.quantize_model(source, tmp_path / "q.gguf", type_name, threads=threads, dry_run=True)
        return planned.forecast.memory

    largest = 1536 * 256  # weights of the demo's tables
    one, two, floats = (said(DEMO, name, n) for name, n in (("q8_0", 1), ("q8_0", 2), ("f32", 2)))
    waiting = CHUNKS_PER_THREAD * 34 / 32
    assert largest < CHUNK_ELEMENTS
    assert two - one == pytest.approx(largest * (written._ENCODED + waiting), rel=0.01)
    more = written._DECODED + CHUNKS_PER_THREAD * 4 - written._ENCODED - waiting
    assert floats - two == pytest.approx(2 * largest * more, rel=0.01)
    ggufmill.convert_model(DEMO, tmp_path / "m.gguf", outtype="bf16")
    mapped = [said(tmp_path / "m.gguf", "q8_0", n) for n in (1, 2)]
    assert mapped[1] - mapped[0] == two - one
    copied = [said(tmp_path / "m.gguf", "bf16", n) for n in (1, 2)]
    assert copied[1] - copied[0] == pytest.approx(largest * 2 * written._COPIES, rel=0.01)


def test_a_large_file_is_written_from_two_buffers(tmp_path, monkeypatch):
    """Those past the page cache, of 16 MiB together, were not said."""
    from ggufmill.jobs import direct_io, execute

    def said():
        return ggufmill.quantize_model(DEMO, tmp_path / "q.gguf", "q8_0", threads=1, dry_run=True).forecast.memory

    small = said()
    monkeypatch.setattr(execute, "MIN_DIRECT_BYTES", 0)
    assert said() - small == direct_io.MEMORY


def test_files_that_stay_are_compared_with_the_source_too(tmp_path, monkeypatch):
    """What is encoded again for that was said to take as long as if all weights of its type were in the files that are left."""
    from ggufmill.quantize import timing

    monkeypatch.setattr(timing, "seconds_of_a_weight", lambda *_, **__: 1.0)
    ggufmill.split_model(ggufmill.convert_model(DEMO, tmp_path / "m.gguf").files[0], tmp_path / "s", split_max_tensors=20)
    first = sorted(tmp_path.glob("s-*.gguf"))[0]
    given = {"type": "q8_0", "keep_split": True, "verify": True}
    files = ggufmill.quantize_model(first, tmp_path / "q.gguf", **given).files
    whole = ggufmill.quantize_model(first, tmp_path / "q.gguf", **given, force=True, dry_run=True).forecast.seconds
    files[1].unlink()
    left = ggufmill.quantize_model(first, tmp_path / "q.gguf", **given, partial_requant=True, dry_run=True).forecast.seconds
    assert 0 < left["q8_0"] < whole["q8_0"] / 2
    assert left["verify"] == whole["verify"] > 1
