"""`ggufmill evaluate`: many quants in one table, resumed and joined."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from ggufmill import quantize_model
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.generation.generate import generate
from ggufmill.runtime.text.chat import find_template, prompt_tokens

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "heldout.txt"
CUT = ("-f", TEXT, "-c", 64, "--chunks", 3, "--no-plot")


@pytest.fixture(scope="module")
def quants(tmp_path_factory):
    """A folder with the demo model as q4_0 (a stock mix) and, by a recipe, as q8_0 with small feed-forward matrices."""
    folder = tmp_path_factory.mktemp("quants")
    quantize_model(DEMO, folder / "a-q4.gguf", "q4_0")
    quantize_model(DEMO, folder / "b-own.gguf", "q8_0", custom_q="ffn=q4_0")
    return folder


def test_a_folder_is_judged_once(mill, quants, tmp_path):
    out = tmp_path / "judged"
    code, text, _ = mill("evaluate", quants, "--against", DEMO, *CUT, "-o", out)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()[4:6]] == ["a-q4", "b-own"]
    kept = json.loads((out / "results.json").read_text())["results"]
    alone = json.loads(mill("perplexity", quants / "a-q4.gguf", *CUT[:-1], "--kl-divergence", DEMO, "--json")[1])
    assert {name: kept[0][name] for name in ("perplexity", "kld_mean", "kld_error", "top1_agreement", "tokens_xxh3")} == {
        name: pytest.approx(alone[name], rel=1e-9) if isinstance(alone[name], float) else alone[name]
        for name in ("perplexity", "kld_mean", "kld_error", "top1_agreement", "tokens_xxh3")
    }
    assert [result["stock"] for result in kept] == ["Q4_0", None]
    assert "| a-q4 |" in (out / "table.md").read_text()
    again = mill("evaluate", quants, "--against", DEMO, *CUT, "-o", out, "--json")
    assert "measured before" not in again[2]
    assert json.loads(again[1])["results"] == kept
    [outputs] = out.glob("baseline-*.outputs")
    outputs.unlink()
    assert mill("evaluate", quants, "--against", DEMO, *CUT, "-o", out)[0] == 0
    assert not list(out.glob("baseline-*"))  # nothing had to be measured
    copy = shutil.copy(quants / "a-q4.gguf", tmp_path / "copy.gguf")  # the same digest, so that it is not measured either
    code, text, _ = mill("evaluate", quants, copy, "--against", DEMO, *CUT, "-o", out, "--json")
    assert [row["name"] for row in json.loads(text)["rows"]] == ["a-q4", "copy", "b-own"]  # by size
    assert mill("evaluate", quants, "--against", DEMO, *CUT, "-o", out, "-ctk", "q8_0")[0] == 0
    assert len(json.loads((out / "results.json").read_text())["results"]) == 4


@pytest.mark.slow
def test_stock_mixes_and_results_of_another_call(mill, quants, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert mill("evaluate", quants / "a*.gguf", "--against", DEMO, *CUT, "-o", first)[0] == 0
    joined = ("--join", first / "results.json")
    code, out, _ = mill("evaluate", quants, "--against", DEMO, *CUT, "-o", second, *joined, "--stock", "q4_0", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [(row["name"], row["kind"]) for row in rows] == [("Q4_0", "stock"), ("a-q4", "model"), ("b-own", "model")]
    assert rows[0]["nbytes"] == pytest.approx(rows[1]["nbytes"], abs=4096)  # the header of a file says more
    assert rows[0]["kld"] == pytest.approx(rows[1]["kld"], rel=1e-6)
    code, out, _ = mill("evaluate", quants / "b-own.gguf", "--against", DEMO, *CUT, "-o", second, *joined, "--json")
    assert [(row["name"], row["kind"]) for row in json.loads(out)["rows"]] == [("a-q4", "joined"), ("b-own", "model")]
    other = ("-f", TEXT, "-c", 64, "--chunks", 2, "--no-plot")
    code, _, err = mill("evaluate", quants / "b-own.gguf", "--against", DEMO, *other, "-o", tmp_path / "third", *joined)
    assert code == 1
    assert "was measured of another text, or of other windows of it" in err


def test_each_model_shows_what_a_small_file_of_predictions_lacks(mill, quants, tmp_path):
    small, cut = tmp_path / "small.kld", ("-f", TEXT, "-c", 64, "--chunks", 3)
    assert mill("perplexity", DEMO, *cut, "--save-all-logits", small, "--top-logits", 16)[0] == 0
    code, out, _ = mill("evaluate", quants, "--against", small, "--no-plot", "-o", tmp_path / "judged")
    assert code == 0
    results = json.loads((tmp_path / "judged" / "results.json").read_text())["results"]
    lacking = [f"lacks about {result['kld_missing']:.6f}" for result in results]
    assert len(set(lacking)) == 2
    assert all(text in out and text in (tmp_path / "judged" / "table.md").read_text() for text in lacking)


def test_what_cannot_be_judged(mill, quants, tmp_path):
    folder = tmp_path / "quants"
    shutil.copytree(quants, folder)
    (folder / "broken.gguf").write_bytes((quants / "a-q4.gguf").read_bytes()[:5000])
    code, out, err = mill("evaluate", folder, "--against", DEMO, *CUT, "-o", tmp_path / "judged")
    assert code == 1
    assert "1 of 3 models could not be measured" in err.splitlines()[-1]
    assert "b-own" in out
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text('{"results": [{}]}')
    for arguments, ends, words in (
        ((quants / "none.gguf", *CUT), 1, "there is no "),
        ((tmp_path / "empty", *CUT), 1, "has no GGUF file and no config.json"),
        (CUT, 2, "there is nothing to judge but the baseline"),
        ((quants, "--no-plot"), 2, "a text is missing (-f)"),
        ((quants, *CUT, "--stock", "q4_z"), 2, "'q4_z' is no file type"),
        ((quants, *CUT, "--join", tmp_path / "x.json"), 1, "x.json has no results of `ggufmill evaluate`"),
    ):
        code, out, err = mill("evaluate", *arguments, "--against", DEMO, "-o", tmp_path / "other")
        assert (code, out) == (ends, ""), words
        assert words in err.splitlines()[-1]


def test_the_picture(quants, tmp_path, monkeypatch):
    """Labels lie neither on each other nor outside."""
    pytest.importorskip("matplotlib")
    from ggufmill.pipeline.reports import evaluation
    from ggufmill.pipeline.reports.evaluation import EvaluationRow, plot_evaluation

    figures = []
    monkeypatch.setattr(evaluation, "save_figure", lambda figure, path: figures.append(figure))
    names = ("Q2_K", "IQ3_K", "Q4_K_M", "Q4_K_S", "IQ4_K", "IQ4_KS", "Q5_K_M", "Q6_K")
    figures_of = {
        "error": 0.05,
        "ratio": 1.01,
        "ratio_error": 0.001,
        "kld_error": 1e-4,
        "same_top": 90.0,
        "same_top_error": 0.2,
    }
    rows = [
        EvaluationRow(
            name=f"model-{name}",
            kind=("model", "stock")[i % 2],
            nbytes=int((4.2 + 0.03 * i) * 1e9),
            bits=4.2 + 0.03 * i,
            perplexity=6.2,
            kld=0.02 - 0.0005 * i,
            kld_missing=None,
            kld_p999=0.3,
            tokens_per_second=40.0,
            **figures_of,
        )
        for i, name in enumerate(names)
    ]
    plot_evaluation(rows, 6.0, "eight models that lie close together", tmp_path / "plot.png")
    figure = figures[0]
    figure.canvas.draw()
    renderer, panel = figure.canvas.get_renderer(), figure.axes[0]
    boxes = [text.get_window_extent(renderer) for text in panel.texts]
    texts = {text.get_text() for text in panel.texts}
    assert texts == {row.name for row in rows}
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_without_matplotlib_there_is_a_table_and_a_note(mill, quants, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "judged"
    code, text, err = mill("evaluate", quants / "a-q4.gguf", "--against", DEMO, *CUT[:-1], "-o", out)
    assert code == 0, err
    assert "no picture is drawn, which needs matplotlib: pip install 'ggufmill[plot]'" in err
    assert (out / "table.md").exists()
    assert not (out / "plot.png").exists()
    assert "plot.png" not in text


def test_several_texts_are_domains(mill, quants, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text((DEMO / "calibration.txt").read_text("utf-8")[2000:4000], "utf-8")
    texts = "-f", f"prose={TEXT}", "-f", other, "-c", 64, "--chunks", 3, "--no-plot"
    code, out, err = mill("evaluate", quants, "--against", DEMO, *texts, "-o", tmp_path / "judged", "--json")
    assert code == 0, err
    result = json.loads(out)
    alone = json.loads(mill("perplexity", quants / "a-q4.gguf", *CUT[:-1], "--kl-divergence", DEMO, "--json")[1])
    prose, second = result["rows"][0]["domains"]
    assert (prose["name"], second["name"]) == ("prose", "other")
    assert prose["kld"] == pytest.approx(alone["kld_mean"], rel=1e-6)
    assert prose["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
    assert result["rows"][0]["kld"] == pytest.approx((prose["kld"] + second["kld"]) / 2, rel=1e-6)
    table = (tmp_path / "judged" / "table.md").read_text()
    assert "| KLD prose | KLD other |" in table
    assert result["verdict"] in table


def test_the_verdict_is_by_windows_and_above_the_noise(mill, quants, tmp_path):
    cut = "-f", TEXT, "-c", 64, "--chunks", 8, "--stock", "q8_0", "--no-plot"
    code, out, _ = mill("evaluate", quants, "--against", DEMO, *cut, "-o", tmp_path / "judged", "--json")
    result = json.loads(out)
    assert code == 0
    klds = {row["name"]: one["window_klds"] for row, one in zip(result["rows"], result["results"], strict=True)}
    first, second = result["paired"]
    assert [first["better"], first["worse"], second["worse"]] == ["Q8_0", "b-own", "a-q4"]
    differences = [a - b for a, b in zip(klds["Q8_0"], klds["b-own"], strict=True)]
    assert first["test"]["difference"] == pytest.approx(sum(differences) / 8)
    assert first["test"]["p"] < 0.05 < second["test"]["p"]
    assert 0 < result["noise_floor"]["kld_mean"] < result["rows"][-1]["kld"]
    assert result["verdict"].startswith("Q8_0 has the smallest KL divergence of ")
    assert "times the noise floor; Q8_0 is better than b-own by " in result["verdict"]
    assert "No difference between b-own and a-q4 is certain" in (tmp_path / "judged" / "table.md").read_text()
    kept = json.loads((tmp_path / "judged" / "results.json").read_text())
    assert len(kept["noise_floors"]) == 1
    code, out, _ = mill("evaluate", quants, "--against", DEMO, *cut, "-o", tmp_path / "judged", "--json", "--no-noise-floor")
    assert json.loads(out)["noise_floor"] is None


def test_models_of_one_name_are_told_apart(mill, quants, tmp_path):
    (tmp_path / "c").mkdir()
    shutil.copy(quants / "b-own.gguf", tmp_path / "c" / "a-q4.gguf")
    arguments = quants / "a-q4.gguf", tmp_path / "c", "--against", DEMO, *CUT, "--no-noise-floor"
    rows = json.loads(mill("evaluate", *arguments, "-o", tmp_path / "judged", "--json")[1])["rows"]
    assert [row["name"] for row in rows] == [f"{quants.name}/a-q4", "c/a-q4"]


def test_the_noise_floor_of_perplexity_is_that_of_evaluate(mill, quants, tmp_path):
    out = mill("evaluate", quants / "a-q4.gguf", "--against", DEMO, *CUT, "-o", tmp_path / "judged", "--json")[1]
    models = quants / "a-q4.gguf", quants / "b-own.gguf"
    code, text, err = mill("perplexity", *models, *CUT[:-1], "--kl-divergence", DEMO, "--noise-floor", "--json")
    assert code == 0, err
    table = json.loads(text)
    assert table["results"][0]["noise_floor"]["kld_mean"] == pytest.approx(json.loads(out)["noise_floor"]["kld_mean"], rel=1e-6)
    assert {table["paired"][0][which] for which in ("better", "worse")} == {"a-q4.gguf", "b-own.gguf"}
    assert mill("perplexity", models[0], *CUT[:-1], "--noise-floor")[0] == 2


def test_the_picture_goes_where_it_is_asked_for(mill, tmp_path):
    pytest.importorskip("matplotlib")
    demo, window = FOLDER / "demo", ("-c", "64", "--chunks", "1", "-f", FOLDER / "demo/heldout.txt")
    asked = ("evaluate", "--against", demo, "--stock", "q4_0", "-o", tmp_path / "out", *window)
    code, _, err = mill(*asked, "--plot", tmp_path / "mine.svg")
    assert code == 0, err
    assert (tmp_path / "mine.svg").stat().st_size > 1000
    assert not (tmp_path / "out/plot.png").exists()
    assert mill(*asked, "--plot", tmp_path / "mine.svg", "--no-plot")[0] == 2


@pytest.fixture
def questions(tmp_path):
    """Questions whose right answers are what the demo model answers to every second."""
    model = load_model(DEMO)
    template = find_template(model.metadata)
    texts = [f"The {word}" for word in ("list", "model", "file", "type", "next", "first", "last", "other")]
    lines = []
    for i, text in enumerate(texts):
        ids = prompt_tokens(model.tokenizer, template.render([{"role": "user", "content": text}]))
        answer = generate(model, ids, 6, temp=0).text()
        lines.append(json.dumps({"question": text, "answer": answer.strip() if i % 2 and answer.strip() else "no such answer"}))
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_questions_are_answered_and_answers_kept(mill, quants, questions, tmp_path):
    out = tmp_path / "judged"
    asked = ("evaluate", quants, "--against", DEMO, "--tasks", f"own={questions}", "-n", 6, "-o", out)
    code, text, _ = mill(*asked)
    assert code == 0
    lines = text.splitlines()
    rows = [line.split() for line in lines if line.startswith("own") and " ± " in line]
    assert [row[1] for row in rows] == ["demo", "a-q4", "b-own"]
    assert rows[0][2:6] == ["50.00", "±", "18.90", "%"]  # sqrt(.5 * .5 / 7)
    assert any("is certain" in line or "is better than" in line for line in lines)
    result = json.loads(mill(*asked, "--json")[1])
    assert (result["rows"], result["results"]) == ([], [])
    base, *others = result["answered"]
    assert (base["correct"], base["questions"], base["p"], base["right"]) == (4, 8, None, [False, True] * 4)
    for row in others:
        assert row["lost"] - row["won"] == 4 - row["correct"]
        assert 0 < row["p"] <= 1
    # An interruption costs no answer: of the second model three are there, and half a line.
    kept = Path(others[0]["answers"])
    whole = kept.read_text("utf-8").splitlines()
    kept.write_text("\n".join(whole[:4]) + "\n" + whole[4][:10], "utf-8")
    _, _, err = mill(*asked, "-v")
    assert "3 of 8 questions were answered before" in err
    assert sorted(kept.read_text("utf-8").splitlines()) == sorted(whole)
    # Another pattern looks at the same answers; beside a text there are both.
    code, text, _ = mill(*asked, "--task-answer", "(?s).*", "--task-questions", 2, *CUT)
    assert code == 0
    assert "KL divergence" in text
    assert "own" in text


def test_what_is_wrong_with_questions(mill, quants, questions, tmp_path):
    (tmp_path / "bad").write_text("What?")
    for arguments, ends, words in (
        (("-n", 5, *CUT), 2, "--n-predict does nothing without --tasks"),
        (("--tasks", tmp_path / "bad"), 1, "bad, line 1: neither JSON"),
        (("--tasks", questions, "--task-answer", "("), 1, "no regular expression"),
        (("--tasks", questions, "--tasks", questions), 2, "two files are called questions"),
    ):
        code, out, err = mill("evaluate", quants, "--against", DEMO, "-o", tmp_path / "out", *arguments)
        assert (code, out) == (ends, ""), words
        assert words in err.splitlines()[-1]
