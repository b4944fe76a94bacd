"""Questions that are answered in the model's own words: files, results in answers, answers, and the paired test."""

import json
import math

import pytest

from ggufmill.formats import FormatError, PlanError
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.paired import mcnemar_p
from ggufmill.runtime.evaluate.tasks.answers import answer_questions
from ggufmill.runtime.evaluate.tasks.questions import Question, compile_answer, is_right, read_questions, result_of
from ggufmill.runtime.generation.generate import generate
from ggufmill.runtime.text.chat import find_template, prompt_tokens


def test_files(tmp_path):
    path = tmp_path / "questions"
    gsm8k = {"question": "How many?\nSay.", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    lines = [gsm8k, {"problem": "One?", "solution": "1", "id": 7}, {"prompt": "Two?", "target": 2}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\nCapital of\tFrance?\tParis\r\n")
    assert read_questions(path) == [
        Question("How many?\nSay.", "5"),
        Question("One?", "1"),
        Question("Two?", "2"),
        Question("Capital of\tFrance?", "Paris"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no questions"),
        ("What?", "line 1: neither JSON nor a question, a tab"),
        ('{"question": "x"}', "line 1: an object with the fields question and answer"),
        ('{"question": "x", "answer": true}', "both texts"),
        ('a\tb\n{"question": ', "line 2: not JSON"),
        ("x\t ", "line 1: the question or its answer is empty"),
        ('{"question": "x", "answer": "see ####"}', "is empty"),
        ("{" * 100_000, "not JSON"),
    ],
)
def test_damaged_files(tmp_path, text, words):
    path = tmp_path / "questions"
    path.write_text(text)
    with pytest.raises(FormatError, match=words):
        read_questions(path)


@pytest.mark.parametrize(
    ("answer", "text", "result", "right"),
    [
        ("5", "2 + 3 is 5.", "5", True),
        ("5", "It is 5, not 6", "6", False),
        ("1234", "So $1,234.00!", "1,234.00", True),
        ("1,234", "#### 1234", "1234", True),
        ("-5", "x = -5", "-5", True),
        ("5", "10-5", "5", True),
        ("50", "about 50%", "50", True),
        ("3.5", "\\boxed{3.50}", "3.50", True),
        ("5", "none", "", False),
        ("5", "<think>6 or 7</think> 5", "5", True),
        ("5", "5 <think>6", "6", False),
        ("42", "answer42", "", False),
        ("Paris", " paris.\n", "paris.", True),
        ("Paris", "It is Paris", "It is Paris", False),
    ],
)
def test_results(answer, text, result, right):
    question = Question("?", answer)
    assert result_of(text, question, None) == result
    assert is_right(result, question) is right


def test_a_pattern_finds_the_result():
    question = Question("?", "Paris")
    text = "The answer is (Rome). No: the answer is (Paris)."
    assert result_of(text, question, compile_answer(r"answer is \((\w+)\)")) == "Paris"
    assert result_of(text, question, compile_answer(r"R\w+")) == "Rome"
    assert result_of(text, question, compile_answer(r"(x)?Rome")) == ""
    assert result_of("nothing", question, compile_answer("x")) == ""
    with pytest.raises(PlanError, match="no regular expression"):
        compile_answer("(")


def test_answers_are_those_of_one_question_at_a_time():
    model = load_model(FOLDER / "demo", n_ctx=256)
    template = find_template(model.metadata, "chatml")
    questions = ["The list of names", "Once", "Say " * 30, "def f(x):", "1 + 1 =", "Why?", "A", "B", "C", "D"]
    found = list(answer_questions(model, list(enumerate(questions)), template, 12))
    assert sorted(answer.number for answer in found) == list(range(len(questions)))
    for answer in found:
        ids = prompt_tokens(model.tokenizer, template.render([{"role": "user", "content": questions[answer.number]}]))
        alone = generate(model, ids, 12, temp=0)
        assert answer.text == alone.text()
        assert (answer.tokens, answer.reason) == (alone.timings.generated_tokens, alone.reason)
    assert any(answer.text for answer in found)
    [plain] = answer_questions(model, [(3, "Why?")], None, 5)
    assert plain.number == 3
    assert plain.text == generate(model, "Question: Why?\nAnswer:", 5, temp=0, stop=["\nQuestion:"]).text()


def test_mcnemar():
    assert mcnemar_p(0, 0) == mcnemar_p(3, 3) == 1
    assert mcnemar_p(1, 0) == 1
    assert mcnemar_p(0, 10) == mcnemar_p(10, 0) == pytest.approx(2 / 2**10)
    assert mcnemar_p(5, 15) == pytest.approx(0.04138946533203125)  # scipy.stats.binomtest(5, 20).pvalue
    assert 0 < mcnemar_p(900, 1100) < 1e-5
    assert math.isfinite(mcnemar_p(3000, 3000))
