"""Recipes for a size, from the command line."""

import errno
import json
import os
import re
import shlex

import pytest

from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
TYPES = ("--types", "q4_0,q5_0,q8_0")


@pytest.fixture
def llama(tiny_llama, write_checkpoint, tmp_path):
    return write_checkpoint(tmp_path / "m", *tiny_llama(hidden_size=64, intermediate_size=96, vocab_size=64))


def test_the_recipe_meets_the_size_and_quantizes_as_reported(mill, llama, tmp_path):
    out = tmp_path / "r.txt"
    code, text, _ = mill("search", llama, out, "--target-bpw", 6.5, *TYPES, "--json")
    result = json.loads(text)
    assert code == 0
    assert 6.3 < result["bits_per_weight"] <= 6.5  # tensors of a tiny model are few and differ by kilobytes
    assert load_recipe(out).text == result["recipe"]
    plan = json.loads(mill("quantize", llama, tmp_path / "q.gguf", "--recipe", out, "--dry-run", "--no-timing", "--json")[1])
    assert plan["total_bytes"] == result["total_bytes"]
    assert {t["name"]: t["type"] for t in plan["tensors"] if t["name"] in result["tensors"]} == result["tensors"]
    assert plan["warnings"] == []
    again = tmp_path / "again.txt"
    assert mill("search", llama, again, "--target-bpw", 6.5, *TYPES)[0] == 0
    same = [re.sub("again.txt|r.txt| --json", "", p.read_text()) for p in (out, again)]
    assert same[0] == same[1]


def test_measured_sensitivity_is_saved_and_reused(mill, tmp_path, monkeypatch):
    out = tmp_path / "r.txt"
    text = ("-f", DEMO / "calibration.txt", "-c", 32, "--chunks", 2, "--measurements", 3, "-t", 1, "--rows", 8)
    arguments = ("search", DEMO, out, *TYPES, *text)
    code, first, _ = mill(*arguments, "--target-bpw", 5.5, "--json")
    result = json.loads(first)
    assert code == 0
    assert 0.995 * 5.5 < result["bits_per_weight"] <= 5.5
    assert 0 < result["kld_mean"] < 1
    assert "measured" in out.read_text()
    state = json.loads((tmp_path / "r.txt.state.json").read_text())
    assert len(state["errors"]) == 51

    from ggufmill.quantize.search.row_sample import RowSample

    monkeypatch.setattr(RowSample, "errors", lambda *_: pytest.fail("errors were known"))
    assert "exists" in mill(*arguments, "--target-bpw", 5.5)[2]
    assert json.loads(mill(*arguments, "--target-bpw", 5.5, "--json", "--force")[1])["tensors"] == result["tensors"]
    smaller = json.loads(mill(*arguments, "--target-bpw", 5.2, "--json", "--force")[1])
    assert smaller["predicted_damage"] > result["predicted_damage"]
    reached = json.loads(mill(*arguments, "--max-kld", 2 * result["kld_mean"], "--json", "--force")[1])
    assert reached["kld_mean"] <= 2 * result["kld_mean"]
    assert reached["total_bytes"] <= result["total_bytes"]


def test_fewer_types_use_what_was_measured_with_more(mill, tmp_path, monkeypatch):
    """Sensitivities measured with types that are not allowed any more are sensitivities still."""
    from ggufmill.pipeline.recipe_search import search_job

    text = ("-f", DEMO / "calibration.txt", "-c", 32, "--chunks", 1, "--measurements", 3, "-t", 1, "--rows", 8)
    arguments = ("search", DEMO, tmp_path / "r.txt", *text, "--target-bpw", 5.5, "--force", "--json")
    wide = "q8_0,q6_K,q5_K,q4_K,q3_K,q2_K"
    code, _, err = mill(*arguments, "--types", wide)
    assert code == 0, err
    probed = []
    divergences = search_job.SearchJob._divergences
    monkeypatch.setattr(search_job.SearchJob, "_divergences", lambda self, c, s: probed.extend(c) or divergences(self, c, s))
    known = {key for kept in json.loads((tmp_path / "r.txt.state.json").read_text())["divergences"].values() for key in kept}
    assert mill(*arguments, "--types", "q6_K,q4_K,q3_K")[0] == 0
    assert probed
    assert {search_job.types_key(types) for types in probed} <= known
    widened = mill(*arguments, "--types", wide + ",iq4_xs")
    assert widened[0] == 0


def test_measurements_are_shared_by_outputs(mill, llama, tmp_path, monkeypatch):
    arguments = ("--target-bpw", 6, *TYPES, "--state", tmp_path / "m.json")
    assert mill("search", llama, tmp_path / "a.txt", *arguments)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "m", "m.json"]
    kept = (tmp_path / "m.json").read_bytes()

    from ggufmill.quantize.search.row_sample import RowSample

    monkeypatch.setattr(RowSample, "errors", lambda *_: pytest.fail("errors were known"))
    assert mill("search", llama, tmp_path / "b.txt", *arguments)[0] == 0
    code, _, err = mill("search", llama, tmp_path / "c.txt", *arguments, "--seed", 3)
    assert code == 1
    assert "m.json is of another model, --mla-layout, imatrix, covariance, --effort, --rows, --seed or version; give" in err
    assert "is an input of this job" in mill("search", llama, tmp_path / "c.txt", *arguments, "-f", tmp_path / "m.json")[2]
    assert "is the output" in mill("search", llama, tmp_path / "c.txt", *arguments[:-1], tmp_path / "c.txt")[2]
    assert (tmp_path / "m.json").read_bytes() == kept


def test_layouts_of_latent_attention_have_measurements_of_their_own(mill, tmp_path):
    arguments = ("search", DEMO, tmp_path / "r.txt", "--target-bpw", 6, *TYPES, "--rows", 8, "--force")
    assert mill(*arguments)[0] == 0
    assert "measured again" in mill(*arguments, "--mla-layout", "mainline")[2]


def test_a_full_disk_is_named_and_nothing_is_left(mill, llama, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    code, _, err = mill("search", llama, tmp_path / "r.txt", "--target-bpw", 6, *TYPES)
    assert code == 1
    assert err.splitlines()[-1] == f"ggufmill: {tmp_path}/r.txt.state.json cannot be written: No space left on device"
    assert os.listdir(tmp_path) == ["m"]


def test_an_unreachable_target_is_reported_in_its_own_unit(mill, llama, tmp_path):
    search = ("search", llama, tmp_path / "r.txt", *TYPES)
    sizes = re.compile(r"([\d,]+) bytes cannot be reached: with the smallest types allowed it takes ([\d,]+) bytes")
    asked, least = (int(n.replace(",", "")) for n in sizes.search(mill(*search, "--target-size", "20K")[2]).groups())
    assert asked == 20_000
    assert mill(*search, "--target-size", f"{least}B")[0] == 0
    bits = re.compile("4 bits per weight cannot be reached: with the smallest types allowed it takes (.+) bits per weight")
    assert mill(*search, "--target-bpw", bits.search(mill(*search, "--target-bpw", 4, "--force")[2])[1], "--force")[0] == 0


def test_a_text_too_short_for_a_window_is_refused_first(mill, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("a few words")
    code, _, err = mill("search", DEMO, tmp_path / "r.txt", "--target-bpw", 6, "-f", text)
    assert code == 1
    assert re.fullmatch(r"ggufmill: .*words.txt has \d tokens, a window takes 512: give a longer text or a smaller window "
                        r"\(search: -c, a recipe: \[search\] ctx\)\n", err)  # fmt: skip
    assert "has 1 tokens" not in err
    assert os.listdir(tmp_path) == ["words.txt"]


def test_the_suggested_command_works(mill, llama, tmp_path):
    def offered(*arguments):
        code, text, err = mill("search", *arguments, *TYPES, "--force")
        assert code == 0, err
        command = shlex.split(text.splitlines()[-1].partition(": ggufmill ")[2])
        assert mill(*[str(tmp_path / "q.gguf") if a == "OUT.gguf" else a for a in command], "--force")[0] == 0
        return command

    out, plain, small = tmp_path / "r.txt", tmp_path / "f16.gguf", tmp_path / "q5.gguf"
    assert mill("convert", llama, plain, "--outtype", "f16")[0] == 0
    assert mill("quantize", llama, small, "q5_0", "--pure")[0] == 0
    assert "--allow-requantize" not in offered(plain, out, "--target-bpw", 6)
    assert "--allow-requantize" in offered(small, out, "--target-bpw", 5)
    assert "--allow-requantize" not in offered(small, out, "--target-bpw", 5.9, "--types", "q5_0")
    importance = tmp_path / "i.dat"
    assert mill("imatrix", DEMO, "-f", DEMO / "calibration.txt", "-c", 32, "--chunks", 1, "-o", importance)[0] == 0
    more = ("--imatrix", importance, "--mla-layout", "mainline", "--rows", 8)
    assert {"--imatrix", "--mla-layout"} <= set(offered(DEMO, out, "--target-bpw", 6, *more))


def test_quantize_to_a_file_size_with_rules_that_stay(mill, llama, tmp_path):
    out = tmp_path / "q.gguf"
    given = ("--custom-q", "attn_v=q8_0", "--target-size", "70K", *TYPES)
    dry = json.loads(mill("quantize", llama, out, *given, "--dry-run", "--no-timing", "--json")[1])
    assert not list(tmp_path.glob("q.*"))
    code, text, _ = mill("quantize", llama, out, *given, "--json")
    assert code == 0
    assert out.stat().st_size == json.loads(text)["file_bytes"] == dry["file_bytes"] <= 70_000
    assert out.stat().st_size > 0.9 * 70_000
    types = {t["name"]: (t["type"], t["rule"]) for t in json.loads(text)["tensors"]}
    assert types["blk.0.attn_v.weight"] == ("q8_0", "attn_v=q8_0")
    assert (tmp_path / "q.gguf.recipe.txt").exists()
    recipe = tmp_path / "r.toml"
    recipe.write_text("[quantize]\ntarget_size = '70K'\nrules = 'attn_v=q8_0'\n")
    by_recipe = json.loads(mill("quantize", llama, out, "--recipe", recipe, *TYPES, "--dry-run", "--no-timing", "--json")[1])
    assert [t["type"] for t in by_recipe["tensors"]] == [t["type"] for t in dry["tensors"]]


def test_a_recipe_that_grows_with_each_attempt_is_found(mill, llama, tmp_path, monkeypatch):
    """The header has the recipe: other types make it longer, and the file larger than the weights were chosen for."""
    from ggufmill.pipeline.recipe_search import search_job

    text, calls = search_job.SearchJob._recipe_text, []

    def longer(self, *arguments, **named):
        calls.append(1)
        return f"{text(self, *arguments, **named)}#{'#' * 400 * len(calls)}\n"

    monkeypatch.setattr(search_job.SearchJob, "_recipe_text", longer)
    small = mill("search", llama, "-o", tmp_path / "r.txt", "--target-size", "52k", "--types", "q4_0,q5_0,q8_0", "--rows", 8)
    assert small[0] == 0, small[2]
    assert len(calls) > 8


def test_resume_of_a_finished_search_and_quantize(mill, llama, tmp_path):
    job = ("quantize", llama, tmp_path / "q.gguf", *TYPES, "--target-size")
    assert mill(*job, "70K")[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("q.gguf*")}
    code, text, err = mill(*job, "70K", "--resume")
    assert (code, "q.gguf: finished already" in text) == (0, True), err
    code, _, err = mill(*job, "60K", "--resume")
    assert (code, "exists; use --force" in err) == (1, True)
    (tmp_path / "q.gguf.state.json").unlink()
    assert "exists; use --force" in mill(*job, "70K", "--resume")[2]
    del before["q.gguf.state.json"]
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("q.gguf*")}


def test_a_budget_for_the_gpu(mill, llama, tmp_path):
    arguments = ("search", llama, tmp_path / "r.txt", "--target-bpw", 7, "--gpu", "attn", "--gpu-size", "20K", *TYPES, "--json")
    result = json.loads(mill(*arguments, "--repacked")[1])
    assert {kind for name, kind in result["tensors"].items() if "attn" in name} <= {"q4_0", "q5_0", "q8_0"}
    assert any(kind.endswith(("_r4", "_r8")) for kind in result["tensors"].values())
    code, _, err = mill(*arguments[:-1], "--gpu-size", "2K", "--force")
    assert code == 1
    assert "--gpu-size" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "one target"),
        (("--target-bpw", 4, "--target-size", "1G"), "one target"),
        (("--target-bpw", 1), "cannot be reached"),
        (("--max-kld", 0.1), "needs a text"),
        (("--target-bpw", 5, "--gpu-size", "1G"), "--gpu REGEX"),
        (("--target-bpw", 5, "--types", "iq9_k"), "iq9_k"),
    ],
)
def test_wrong_usage_is_one_line(mill, llama, tmp_path, arguments, reason):
    code, _, err = mill("search", llama, tmp_path / "r.txt", *arguments)
    assert code == 1
    assert reason in err.splitlines()[-1]
    assert not (tmp_path / "r.txt").exists()


def test_a_state_of_another_model_is_not_used(mill, llama, tmp_path):
    out = tmp_path / "r.txt"
    assert mill("search", llama, out, "--target-bpw", 6, *TYPES)[0] == 0
    assert "measured again" in mill("search", llama, out, "--target-bpw", 6, *TYPES, "--seed", 3, "--force")[2]
    (tmp_path / "r.txt.state.json").write_text("[]")
    code, _, err = mill("search", llama, out, "--target-bpw", 6, *TYPES, "--force")
    assert code == 1
    assert "remove it" in err


def test_problems_are_reported_before_any_measuring(mill, llama, tmp_path, monkeypatch):
    from ggufmill.quantize.search.row_sample import RowSample

    monkeypatch.setattr(RowSample, "errors", lambda *_: pytest.fail("measured"))
    out = tmp_path / "q.gguf"
    out.write_bytes(b"of the user")
    quantize = ("quantize", llama, out, *TYPES)
    assert "exists; use --force" in mill(*quantize, "--target-bpw", 6)[2]
    assert "cannot be reached" in mill(*quantize, "--target-bpw", 4, "--force")[2]
    assert "[search] text" in mill(*quantize, "--max-kld", 0.1, "--force")[2]
    text = tmp_path / "q.gguf.recipe.txt"
    text.write_text("attn=q8_0")
    assert "is an input of this job" in mill(*quantize, "--recipe", text, "--target-bpw", 6, "--force")[2]
    assert "--gpu-size" in mill("search", llama, tmp_path / "r.txt", "--target-bpw", 6, "--gpu", "attn", "--gpu-size", "1K")[2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "q.gguf", "q.gguf.recipe.txt"]


def test_quantize_uses_the_search_table_of_a_recipe(mill, llama, tmp_path):
    (tmp_path / "words.txt").write_text("some words of a text " * 20)
    recipe = tmp_path / "r.toml"
    recipe.write_text("[quantize]\ntarget_bpw = 6.5\n[search]\ntypes = 'q4_0,q5_0,q8_0'\nrows = 8\nseed = 3\n")
    arguments = ("quantize", llama, tmp_path / "q.gguf", "--recipe", recipe, "--json")
    result = json.loads(mill(*arguments)[1])
    assert 6.2 < result["bits_per_weight"] <= 6.5
    assert set(result["types"]) <= {"q4_0", "q5_0", "q8_0", "f32"}
    assert "Errors of 8 rows per tensor, seed 3" in (tmp_path / "q.gguf.recipe.txt").read_text()
    result = json.loads(mill(*arguments, "--target-bpw", 8.6, "--types", "q8_0,q4_0", "--force")[1])
    assert result["bits_per_weight"] > 8
    assert set(result["types"]) <= {"q4_0", "q8_0", "f32"}
    recipe.write_text("[quantize]\ntarget_bpw = 6.5\n[search]\ntext = 'nothing.txt'\n")
    assert "nothing.txt does not exist" in mill(*arguments, "--force")[2]


def test_dry_run_predicts_time_and_disk(mill, llama, tmp_path):
    plan = json.loads(mill("quantize", llama, tmp_path / "q.gguf", "q8_0", "--dry-run", "--json")[1])
    assert plan["disk"]["needed"] == plan["file_bytes"]
    assert plan["disk"]["free"] > 0
    assert plan["predicted"]["seconds"] == pytest.approx(sum(plan["predicted"]["seconds_by_part"].values()))
    assert plan["predicted"]["seconds_by_part"]["q8_0"] > 0
    text = mill("quantize", llama, tmp_path / "q.gguf", "q8_0", "--dry-run")[1]
    assert re.search(r"disk: .* needed, .* free\nmemory: .* beside .*\ntime: about .* on this machine", text)
    assert "time:" not in mill("quantize", llama, tmp_path / "q.gguf", "q8_0", "--dry-run", "--no-timing")[1]


def test_rows_kept_for_the_next_measurement_count_as_memory(mill, tmp_path):
    """Up to a quarter of what is free, and a refined search was said to take as much as one that is not."""
    text = ("-f", DEMO / "calibration.txt", "-c", 32, "--chunks", 1, "-t", 1, "--rows", 8, "--measurements", 8)
    arguments = ("search", DEMO, tmp_path / "r.txt", "--types", "q8_0", *text, "--target-bpw", 9, "--dry-run", "--json")
    plain, refined = (json.loads(mill(*arguments, *more)[1])["memory"]["peak"] for more in ((), ("--refine", 1)))
    weights = 8.4e6 * 1.0625 * 7 / 8  # those of seven groups of eight
    assert refined - plain == pytest.approx(weights, rel=0.2)
