"""Text that a model writes for its own calibration."""

import json

import numpy as np
import pytest

from ggufmill.errors import PlanError
from ggufmill.imatrix.own_text import Beginnings, fingerprint, is_written, write_own_text
from ggufmill.imatrix.texts import CalibrationText, read_segments
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER / "demo", n_ctx=24)


def test_the_text_depends_on_the_seed_alone(model, tmp_path):
    write_own_text(model, tmp_path / "a.jsonl", 200, seed=3, batch=9)
    write_own_text(model, tmp_path / "b.jsonl", 200, seed=3, batch=2)
    write_own_text(model, tmp_path / "c.jsonl", 200, seed=4)
    a, b, c = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert is_written(tmp_path / "a.jsonl", fingerprint(model, 200, 3))
    assert not is_written(tmp_path / "c.jsonl", fingerprint(model, 200, 3))


def test_an_interrupted_text_is_continued(model, tmp_path):
    write_own_text(model, tmp_path / "whole.jsonl", 200)

    def interrupt(done, total):
        if done > 90:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_own_text(model, tmp_path / "a.jsonl", 200, batch=3, on_tokens=interrupt)
    part = tmp_path / "a.jsonl.part"
    kept = part.read_text("utf-8")
    assert kept.count("\n") > 2
    part.write_text(kept + '{"of": "cut', "utf-8")
    write_own_text(model, tmp_path / "a.jsonl", 200)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()


@pytest.mark.slow
def test_what_is_drawn_is_the_models_distribution(model, tmp_path):
    """Tokens at the second place, against the probabilities after the first."""
    probabilities = model.logits([model.tokenizer.bos])[0].astype(np.float64)
    probabilities = np.exp(probabilities - probabilities.max())
    probabilities /= probabilities.sum()
    small = load_model(FOLDER / "demo", n_ctx=4)
    write_own_text(small, tmp_path / "a.jsonl", 4000, batch=64)
    drawn = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()]
    first = [model.tokenizer.encode(row["generated"], False, True) for row in drawn]
    kinds = 4 if Beginnings(model).turn is not None else 3
    seconds = [tokens[1] for tokens in first[::kinds] if len(tokens) > 1]
    top = int(probabilities.argmax())
    share, expected = np.mean(np.array(seconds) == top), probabilities[top]
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / len(seconds))


def test_control_tokens_are_read_as_such(model, tmp_path):
    write_own_text(model, tmp_path / "a.jsonl", 100)
    (segment,) = read_segments(model, [CalibrationText(tmp_path / "a.jsonl")])
    tokens = np.array(segment.tokens)
    documents = (tmp_path / "a.jsonl").read_text("utf-8").count("\n")
    assert (tokens == model.tokenizer.bos).sum() >= documents


def test_another_file_is_not_overwritten(model, tmp_path):
    (tmp_path / "a.jsonl").write_text("mine", "utf-8")
    with pytest.raises(PlanError, match="remove it"):
        is_written(tmp_path / "a.jsonl", "x")
