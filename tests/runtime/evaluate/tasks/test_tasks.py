"""Tasks with choices: files of llama-perplexity, which tasks are taken, and scores."""

import math
import struct

import numpy as np
import pytest

from ggufmill.formats import FormatError, PlanError
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.tasks.files import ChoiceTask, read_hellaswag, read_multiple_choice, read_winogrande
from ggufmill.runtime.evaluate.tasks.score import TaskScore, _prepare, _run, score_tasks
from ggufmill.runtime.evaluate.tasks.selection import choose_tasks

HELLASWAG = "Baking: A man opens an oven\n2\nand sings\nand runs away\nand takes out a cake\nand sleeps\n"
WINOGRANDE = (
    '0,"Ann, who is tall, saw Bea and _ waved to her.",Ann,Bea,2\n1,The cup fell off the table so _ broke.,cup,table,1\n'
)


def binary(tasks):
    """tasks: (question, [(answer, label)])."""

    def text(value):
        return struct.pack("<I", len(value.encode())) + value.encode()

    bodies = []
    for question, answers in tasks:
        part = struct.pack("<I", len(answers)) + b"".join(text(answer) for answer, _ in answers)
        part += struct.pack(f"<{len(answers)}i", *(label for _, label in answers))
        bodies.append(text(question) + part + struct.pack("<I", 0))
    starts = np.cumsum([4 + 4 * len(tasks), *map(len, bodies)])[:-1]
    return struct.pack(f"<I{len(tasks)}I", len(tasks), *starts) + b"".join(bodies)


def test_files(tmp_path):
    path = tmp_path / "tasks"
    path.write_text(2 * HELLASWAG)
    tasks = read_hellaswag(path)
    assert len(tasks) == 2
    assert tasks[0].texts[1:3] == (
        "Baking: A man opens an oven and runs away",
        "Baking: A man opens an oven and takes out a cake",
    )
    assert tasks[0].right == {2}
    path.write_text(WINOGRANDE + "\n")
    first, second = read_winogrande(path)
    assert first.texts == ("Ann, who is tall, saw Bea and Ann waved to her.", "Ann, who is tall, saw Bea and Bea waved to her.")
    assert first.bases[1] == "Ann, who is tall, saw Bea and Bea"
    assert (first.right, second.right) == ({1}, {0})
    path.write_bytes(binary([("Who?", [("he", 0), ("she", 1), ("it", 0)]), ("Was", [("it", 1), ("he", 1)])]))
    assert read_multiple_choice(path) == [
        ChoiceTask(("Who? he", "Who? she", "Who? it"), frozenset([1])),
        ChoiceTask(("Was it", "Was he"), frozenset([0, 1])),
    ]


def test_damaged_files(tmp_path):
    path = tmp_path / "tasks"
    for reader, text, words in (
        (read_hellaswag, HELLASWAG + "one more\n", "7 lines are not a multiple of the six"),
        (read_hellaswag, HELLASWAG.replace("\n2\n", "\n4\n"), "line 2: '4' is not the number of an ending"),
        (read_winogrande, WINOGRANDE + "2,no gap,a,b,1\n", "line 3: not NUMBER,SENTENCE"),
        (read_winogrande, WINOGRANDE + "2,one _ gap,a,b,3\n", "line 3: not NUMBER,SENTENCE"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=words):
            reader(path)
    data = binary([("Who?", [("he", 0), ("she", 1)])])
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match="is no file of multiple-choice tasks"):
            read_multiple_choice(path)


def test_the_tasks_that_llama_perplexity_takes():
    """Printed by a C++ program with std::mt19937, and for the first std::uniform_int_distribution, of libstdc++ 12."""
    chosen = choose_tasks("hellaswag", range(10042), 400)
    assert chosen[:8] + chosen[-3:] == [4187, 10013, 7233, 9363, 1, 1286, 3036, 10032, 7603, 9534, 4001]
    chosen = choose_tasks("winogrande", range(1267), 100)
    assert chosen[:8] + chosen[-3:] == [528, 1262, 911, 1178, 0, 161, 381, 1258, 139, 152, 612]
    assert choose_tasks("multiple-choice", range(5), 5) == choose_tasks("multiple-choice", range(5), None) == [0, 1, 2, 3, 4]


def log_probs(model, tokens):
    """float64 [n, n_vocab] of a sequence that runs alone."""
    logits = model.logits(tokens).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_scores_are_those_of_each_choice_alone(tiny, tmp_path):
    model = load_model(tiny, exact=True, batch=40)  # several passes
    path = tmp_path / "tasks"
    path.write_text(HELLASWAG + HELLASWAG.replace("oven", "door").replace("and s", "but s"))
    tasks = [*read_hellaswag(path), ChoiceTask(("so it is", "so it was then"), frozenset([0]))]
    prepared = [_prepare(model, task, 1) for task in tasks]
    means = list(_run(model, prepared))
    right = 0
    for task, choices, scores in zip(tasks, prepared, means, strict=True):
        tokens = [model.tokenizer.encode(text) for text in task.texts]
        assert all(each[: choices.common] == tokens[0][: choices.common] for each in tokens)
        expected = [
            np.mean([log_probs(model, each)[i - 1, each[i]] for i in range(choices.common, len(each))]) for each in tokens
        ]
        assert scores == pytest.approx(expected, abs=1e-4)
        right += int(np.argmax(expected)) in task.right
    seen = []
    score = score_tasks(model, tasks, seen.append)
    assert (score.tasks, score.correct) == (3, right)
    assert [each.tasks for each in seen] == [1, 2, 3]
    assert score.chance == pytest.approx(100 * 3 / 10)


def test_winogrande_rates_what_follows(tiny, tmp_path):
    model = load_model(tiny, exact=True)
    path = tmp_path / "tasks"
    path.write_text(WINOGRANDE)
    first, second = (_prepare(model, task, 1) for task in read_winogrande(path))
    for choices, task in ((first, read_winogrande(path)[0]), (second, read_winogrande(path)[1])):
        bases = [len(model.tokenizer.encode(base)) for base in task.bases]
        starts = [bases[i] if all(len(t) - choices.common > 3 for t in choices.tokens) else choices.common for i in range(2)]
        wanted = [[at for c, at, _ in part] for part in (choices.wanted[: choices.ends[0]], choices.wanted[choices.ends[0] :])]
        assert wanted[0] == list(range(starts[0] - 1, len(choices.tokens[0]) - 2))
        assert wanted[1][1:] == list(range(starts[1], len(choices.tokens[1]) - 2))
    means = next(iter(_run(model, [first])))
    parts = [first.wanted[: first.ends[0]], first.wanted[first.ends[0] :]]
    for mean, part in zip(means, parts, strict=True):
        assert mean == pytest.approx(np.mean([log_probs(model, first.tokens[c])[at, token] for c, at, token in part]), abs=1e-4)


def test_intervals():
    score = TaskScore(400, 300, 25.0)
    assert score.score == 75
    assert score.error == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 399))
    assert score.interval == pytest.approx((70.53, 78.99), abs=0.05)
    assert TaskScore(1, 1, 25.0).error is None


def test_what_cannot_be_scored(tiny):
    model = load_model(tiny)
    with pytest.raises(PlanError, match="there are no tasks"):
        score_tasks(model, [])
