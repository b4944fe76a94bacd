"""The calibration text that comes with the program: what it holds, and that verbs find it by name."""

import json
import re

import pytest

from ggufmill import compute_imatrix
from ggufmill.imatrix.texts import CalibrationText, calibration_tokens, parse_text
from ggufmill.pipeline.recipe_search.options import SearchOptions, search_options
from ggufmill.pipeline.recipe_search.search_job import SearchJob
from ggufmill.pipeline.requests.groups import Measuring
from ggufmill.pipeline.stages.text import read_stage_text
from ggufmill.recipes import BUNDLED, FOLDER, bundled_text, find_text
from ggufmill.runtime import load_model
from ggufmill.runtime.text.chat import ChatTemplate

DEMO = FOLDER / "demo"
ROWS = [json.loads(line) for line in bundled_text().read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def demo():
    return load_model(DEMO)


def test_every_stretch_of_the_text_has_every_kind():
    kinds = [row["kind"] for row in ROWS]
    assert set(kinds) == {"prose", "documentation", "languages", "code", "mathematics", "chat"}
    assert all(set(kinds[i : i + 32]) == set(kinds) for i in range(0, len(kinds) - 32, 16))
    assert 200_000 <= bundled_text().stat().st_size <= 500_000
    texts = [row["text"] if "text" in row else row["messages"][0]["content"] for row in ROWS]
    assert len(set(texts)) == len(texts), "an excerpt is there twice"
    assert [letter for letter in "éжλعשन的다" if letter not in "".join(texts)] == []  # of eight scripts


def test_the_licence_of_every_source_is_there():
    """What is copied says whose it is: make.py names each source, LICENSES.txt has its terms."""
    listed = (bundled_text().parent / "LICENSES.txt").read_text("utf-8")
    made_by = (bundled_text().parent / "make.py").read_text("utf-8")
    sources = re.findall(r'"([^"\s]+\.(?:tgz|tar\.gz|whl|deb))"', made_by)
    assert len(sources) > 10
    assert [name for name in sources if f"{name}: " not in listed] == []


def test_conversations_are_written_by_the_models_own_template(demo):
    conversation = next(row["messages"] for row in ROWS if row["kind"] == "chat")
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with_template = calibration_tokens(bundled_text(), demo.tokenizer, {"tokenizer.chat_template": template.text})
    bare = calibration_tokens(bundled_text(), demo.tokenizer, {})  # of a base model: the turns as plain text
    text, plain = demo.tokenizer.decode(with_template), demo.tokenizer.decode(bare)
    assert f"<user>{conversation[0]['content']}<assistant>{conversation[1]['content']}" in text
    assert "<user>" not in plain
    assert "\n\n".join(turn["content"] for turn in conversation) in plain


def test_a_model_without_a_text_reads_the_bundled_one(mill, tmp_path):
    code, out, err = mill("imatrix", "demo", "-o", tmp_path / "a.imatrix", "-c", "64", "--chunks", "2", "--json")
    assert code == 0, err
    assert "without -f, the bundled calibration text is read" in err
    assert json.loads(out)["chunks"] == 2
    code, out, err = mill(
        "imatrix", "demo", "-f", BUNDLED, "-o", tmp_path / "b.imatrix", "-c", "64", "--chunks", "2", "--quiet"
    )
    assert (code, "bundled" in err) == (0, False)
    assert (tmp_path / "a.imatrix").read_bytes() == (tmp_path / "b.imatrix").read_bytes()
    assert compute_imatrix(DEMO, n_ctx=64, chunks=2).imatrix.datasets == ["bundled.jsonl"]


@pytest.mark.parametrize("given", [BUNDLED, f"{BUNDLED}:3"])
def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch, given):
    assert parse_text(given).path == bundled_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / BUNDLED).write_text("own")
    assert parse_text(given).path.resolve() == tmp_path / BUNDLED


def test_searches_and_runs_read_tables_and_the_bundled_text_as_imatrix_does(mill, tmp_path, demo):
    rows = [{"text": "plain words"}, {"messages": [{"role": "user", "content": "hello"}]}]
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows * 40))
    ids = calibration_tokens(table, demo.tokenizer, demo.metadata)
    assert demo.tokenizer.decode(ids).startswith("plain wordshello")
    assert read_stage_text("[imatrix] text", [CalibrationText(table)], 16, None, demo).tokens.tolist() == ids
    for text, name in ((table, "t.jsonl"), (BUNDLED, "bundled.jsonl")):
        options = SearchOptions((), text=search_options(Measuring(text=text), ()).text, n_ctx=16)
        job = SearchJob.__new__(SearchJob)
        job.options, job.source = options, demo.source
        assert options.text.name == name
        assert job._tokens == calibration_tokens(find_text(text), demo.tokenizer, demo.metadata)
    text = 'text = "bundled"\nctx = 64\nchunks = 1\n'
    stages = f"[quantize]\ntarget_bpw = 6\n[imatrix]\n{text}[search]\n{text}"
    (tmp_path / "r.toml").write_text(f'[source]\nmodel = "{DEMO}"\n{stages}')
    code, _, err = mill("run", tmp_path / "r.toml", "-o", tmp_path / "out", "--dry-run")
    assert code == 0, err
