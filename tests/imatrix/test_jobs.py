"""Collections that are interrupted, split into parts, or made of several texts: the sums are the same."""

import json

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, FormatError, PlanError
from ggufmill.imatrix.calibration import TextSegment, cut_windows
from ggufmill.imatrix.collect import CollectOptions, collect
from ggufmill.imatrix.collect_state import load_state
from ggufmill.imatrix.texts import CalibrationText, check_texts, parse_text, read_segments
from ggufmill.jobs.execute import execute
from ggufmill.quantize.planning import plan_quantize
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

N_CTX = 64


@pytest.fixture(scope="module")
def model():
    return load_model(open_source(FOLDER / "demo"), batch=128, ubatch=128, threads=2)


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenizer.encode((FOLDER / "demo/calibration.txt").read_text("utf-8")[:3000])[: 9 * N_CTX]


class Killed(Exception):
    pass


def same(a, b):
    return a.entries.keys() == b.entries.keys() and all(
        np.array_equal(a.entries[n][0], b.entries[n][0]) and np.array_equal(a.entries[n][1], b.entries[n][1]) for n in a.entries
    )


def test_a_resumed_run_ends_in_the_same_bytes(model, tokens, tmp_path):
    """Also with another size of micro-batches."""
    later = load_model(open_source(FOLDER / "demo"), batch=128, ubatch=30, threads=2)
    job = cut_windows(
        model, [TextSegment(tokens[: 5 * N_CTX], 1, [("a", 0)]), TextSegment(tokens[5 * N_CTX :], 3, [("b", 0)])], N_CTX
    )
    options = CollectOptions(output=True, embeddings=True)
    expected, result = collect(model, job, options=options)
    expected.save(tmp_path / "expected.imatrix")
    for stop in (3, 5, 7):  # also between the two weights

        def kill(state, stop=stop):
            state.save(tmp_path / "state")
            if state.done >= stop:
                raise Killed

        with pytest.raises(Killed):
            collect(model, job, options=options, state_frequency=1, on_state=kill)
        state = load_state(tmp_path / "state")
        assert stop <= state.done < 9
        reports = []
        resumed, resumed_result = collect(
            later, job, options=options, resume=state, on_chunk=lambda r, n, to=reports: to.append((r.chunks, n))
        )
        resumed.save(tmp_path / "resumed.imatrix")
        assert (tmp_path / "resumed.imatrix").read_bytes() == (tmp_path / "expected.imatrix").read_bytes()
        assert resumed_result.perplexity == result.perplexity
        assert reports[0] == (state.done + 1, 9)
    assert expected.chunk_count == 5 + 3 * 4


def test_a_state_of_another_job_is_refused(model, tokens, tmp_path):
    states = []
    collect(model, tokens, n_ctx=N_CTX, state_frequency=2, on_state=states.append)
    states[0].save(tmp_path / "state")
    for other, options in ((tokens[N_CTX:], {}), (tokens, {"options": CollectOptions(output=True)})):
        with pytest.raises(PlanError, match=r"the interrupted run was of another job .* had done 3 windows"):
            collect(model, other, n_ctx=N_CTX, resume=load_state(tmp_path / "state"), **options)
    data = (tmp_path / "state").read_bytes()
    for damaged in (data[: len(data) // 2], b"something else", b""):
        (tmp_path / "state").write_bytes(damaged)
        with pytest.raises(FormatError, match="not the state of a collection"):
            load_state(tmp_path / "state")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The demo as q8_0: some experts get a few tokens of a pass, for which other kernels may run than for many."""
    path = tmp_path_factory.mktemp("packed") / "demo.gguf"
    execute(plan_quantize(open_source(FOLDER / "demo"), path, type=TYPES["q8_0"], pure=True))
    return load_model(path, threads=2)


@pytest.mark.parametrize("fixture", ["model", "packed"])
def test_merged_parts_equal_one_collection(request, tokens, fixture):
    """Except that sums are rounded to float32 in every part and once more at the end."""
    model = request.getfixturevalue(fixture)
    expected, _ = collect(model, tokens, n_ctx=N_CTX)
    starts = ((0, 2), (2, 4), (6, None))
    parts = [cut_windows(model, [TextSegment(tokens, 1)], N_CTX, from_chunk=start, chunks=chunks) for start, chunks in starts]
    imatrices = [collect(model, part)[0] for part in parts]
    merged = imatrices[0].merge(*imatrices[1:])
    assert merged.chunk_count == expected.chunk_count == 9
    assert merged.entries.keys() == expected.entries.keys()
    for name, (sums, counts) in expected.entries.items():
        assert np.array_equal(merged.entries[name][1], counts), name
        np.testing.assert_allclose(merged.entries[name][0], sums, rtol=1e-6)


def test_weight_multiplies_sums_and_counts(model, tokens):
    once, _ = collect(model, tokens[: 3 * N_CTX], n_ctx=N_CTX, options=CollectOptions(embeddings=True))
    job = cut_windows(model, [TextSegment(tokens[: 3 * N_CTX], 4)], N_CTX)
    four, _ = collect(model, job, options=CollectOptions(embeddings=True))
    assert four.chunk_count == 12
    for name, (sums, counts) in once.entries.items():
        assert np.array_equal(four.entries[name][1], 4 * counts)
        assert np.array_equal(four.entries[name][0], 4 * sums)


def test_threads_do_not_change_the_result(model, tokens):
    one = load_model(open_source(FOLDER / "demo"), batch=128, ubatch=128, threads=1)
    assert same(collect(one, tokens[: 3 * N_CTX], n_ctx=N_CTX)[0], collect(model, tokens[: 3 * N_CTX], n_ctx=N_CTX)[0])


def test_embeddings_count_as_many_times_as_they_are_used(model, tokens):
    imatrix, _ = collect(model, tokens[: 2 * N_CTX], n_ctx=N_CTX, options=CollectOptions(embeddings=True))
    ids = cut_windows(model, [TextSegment(tokens[: 2 * N_CTX], 1)], N_CTX).windows.reshape(-1)
    tensor = model.source.tensors["token_embd.weight"]
    rows = np.concatenate([tensor.read(i, i + 1) for i in ids.tolist()]).astype(np.float64)
    sums, counts = imatrix.entries["token_embd.weight"]
    np.testing.assert_allclose(sums[0], (rows**2).sum(0), rtol=1e-6)
    assert counts.tolist() == [len(ids)]


def test_too_few_tokens(model, tokens):
    with pytest.raises(PlanError, match="the text has 10 tokens, one window needs 64"):
        cut_windows(model, [TextSegment(tokens[:10], 1)], N_CTX)
    with pytest.raises(PlanError, match="--from-chunk 9: the text has only 9 windows of 64 tokens"):
        cut_windows(model, [TextSegment(tokens, 1)], N_CTX, from_chunk=9)


def test_texts_without_a_window(model, tokens):
    """Texts too short for a window of their weight are errors; texts beyond `chunks` are not in `datasets`."""
    long, short = TextSegment(tokens[: 4 * N_CTX], 1, [("a", 0), ("b", 3 * N_CTX)]), TextSegment(tokens[:10], 3, [("c", 0)])
    for segments in ([long, short], [short, long]):
        with pytest.raises(PlanError, match="c has 10 tokens, one window needs 64; texts of another weight do not fill it up"):
            cut_windows(model, segments, N_CTX)
    other = TextSegment(tokens[: 2 * N_CTX], 2, [("d", 0)])
    assert cut_windows(model, [long, short], N_CTX, chunks=4).datasets == ["a", "b"]
    assert cut_windows(model, [long, other], N_CTX, chunks=3).datasets == ["a"]
    assert cut_windows(model, [long, other], N_CTX, from_chunk=3).datasets == ["b", "d"]
    assert cut_windows(model, [long, other], N_CTX, from_chunk=4).datasets == ["d"]
    with pytest.raises(PlanError, match="give smaller weights"):
        cut_windows(model, [TextSegment(tokens, 10**10)], N_CTX)


CHAT = [{"role": "user", "content": "How are lists sorted?"}, {"role": "assistant", "content": "With sort."}]
SHAREGPT = [{"from": "human", "value": "How are lists sorted?"}, {"from": "gpt", "value": "With sort."}]


def test_text_jsonl_and_conversations(model, tmp_path):
    encode = model.tokenizer.encode
    (tmp_path / "plain.txt").write_text("The list is sorted.")
    rows = [{"text": "One."}, {"text": "Two."}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    texts = [parse_text(str(tmp_path / "plain.txt")), parse_text(f"{tmp_path / 'rows.jsonl'}:2")]
    assert [text.weight for text in texts] == [1, 2]
    plain, rows = TextSegment(encode("The list is sorted."), 1, [("plain.txt", 0)]), encode("One.") + encode("Two.")
    assert read_segments(model, texts) == [plain, TextSegment(rows, 2, [("rows.jsonl", 0)])]
    assert read_segments(model, texts, max_tokens=1) == [plain]
    same_weight = [CalibrationText(text.path) for text in texts]
    assert read_segments(model, same_weight) == [
        TextSegment([*plain.tokens, *rows], 1, [*plain.starts, ("rows.jsonl", len(plain.tokens))])
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"id": 1, "messages": CHAT}) + "\n" + json.dumps({"messages": SHAREGPT}))
    ids = list(read_segments(model, [CalibrationText(tmp_path / "chat.jsonl")], template="chatml")[0].tokens)
    half = len(ids) // 2
    assert ids[:half] == ids[half:]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
    (tmp_path / "parts.jsonl").write_text(json.dumps(parts))
    assert read_segments(model, [CalibrationText(tmp_path / "parts.jsonl")], template="chatml")[0].tokens == ids[:half]
    assert "<|im_start|>user\nHow are lists sorted?" in model.tokenizer.decode(ids)


def test_binary_files_are_refused(model, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(PlanError, match=r"model\.gguf is not a text file: it has a zero byte at 5"):
        read_segments(model, [CalibrationText(tmp_path / "model.gguf")])


def test_parquet(model, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [1, 2, 3], "story": ["One.", None, "Two."], "messages": [CHAT, CHAT, CHAT]})
    parquet.write_table(table, tmp_path / "t.parquet")
    text, encode = CalibrationText(tmp_path / "t.parquet"), model.tokenizer.encode
    assert read_segments(model, [text], column="story") == [TextSegment(encode("One.") + encode("Two."), 1, [("t.parquet", 0)])]
    assert "With sort." in model.tokenizer.decode(read_segments(model, [text], template="chatml")[0].tokens)
    with pytest.raises(FormatError, match=r"t\.parquet: no column 'tale'; there are id, story, messages"):
        read_segments(model, [text], column="tale")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(FormatError, match=r"t\.parquet: "):
        read_segments(model, [text])


def test_parquet_without_pyarrow(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(PlanError, match=r"parquet files need pyarrow: pip install 'ggufmill\[parquet\]'"):
        check_texts([CalibrationText(tmp_path / "a.parquet")])


MALFORMED_LINES = {
    "not json": r"a\.jsonl, line 2: not JSON",
    "17": "line 2: neither an object nor a text",
    '{"words": "x"}': r"line 2: none of the columns messages, .*; there are words",
    '{"text": 5}': "line 2: neither a text nor a list of messages",
    '{"messages": [{"role": "user"}]}': "line 2: a message has no role or no content",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "line 2: a message has a part that is no text",
    '{"messages": [{"role": "user", "content": 5}]}': "line 2: the chat template chatml cannot write these messages",
}


@pytest.mark.parametrize("line", MALFORMED_LINES)
def test_malformed_lines_are_named(model, tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(FormatError, match=MALFORMED_LINES[line]):
        read_segments(model, [CalibrationText(tmp_path / "a.jsonl")], template="chatml")


def test_refused_arguments(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(PlanError, match="there is no such file"):
        parse_text(str(tmp_path / "b.txt"))
    with pytest.raises(PlanError, match="the weight '1.5' is no whole number above 0"):
        parse_text(f"{tmp_path / 'a.txt'}:1.5")
    with pytest.raises(PlanError, match="is given twice"):
        check_texts([CalibrationText(tmp_path / "a.txt"), CalibrationText(tmp_path / "a.txt", 2)])
    (tmp_path / "c:2").write_text("a name like this is a file's")
    assert parse_text(str(tmp_path / "c:2")).weight == 1
