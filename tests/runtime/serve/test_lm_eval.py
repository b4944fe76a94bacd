"""lm-evaluation-harness scores a served model over HTTP, with the tokenizer of the server, on tasks of its own."""

import json

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("aiohttp")
pytest.importorskip("tenacity")
pytest.importorskip("datasets")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from ggufmill.runtime import load_model  # noqa: E402

QUESTIONS = [
    {"question": "A bird can", "choices": [" fly", " read", " sing a song"], "answer": 0},
    {"question": "Water is", "choices": [" wet", " a number"], "answer": 1},
    {"question": "é", "choices": [" x", " yz"], "answer": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: {target}
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
GENERATE = 'generation_kwargs: {until: ["!"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]'


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, n_ctx=128, parallel=2)


@pytest.fixture(scope="module")
def url(served, model):
    return served(model, warm_up=False, alias="tiny")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def harness(url, **options):
    """The harness' model of a server, which finds out by itself that the server has a tokenizer."""
    return LocalCompletionsAPI(base_url=f"{url}/v1/completions", model="tiny", max_length=128, max_retries=1, **options)


def loglikelihood(model, context, continuation):
    """(sum of the log probabilities of continuation's tokens, whether each is the most probable one), by the model itself."""
    ids, n = [*context, *continuation], len(context)
    logits = model.logits(ids)[n - 1 : -1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(continuation)), continuation].sum(), bool((logits.argmax(-1) == continuation).all())


def requests(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"num_concurrent": 3, "batch_size": 2}])
def test_loglikelihoods(url, model, options):
    pairs = [("A bird can", " fly"), ("A bird can", " sing"), ("x", "y"), ("ab cd", " ef")]
    encode = model.tokenizer.encode
    results = harness(url, **options).loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (score, greedy) in zip(pairs, results, strict=True):
        expected = loglikelihood(model, encode(context, False), encode(continuation, False))
        assert score == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]


def test_rolling_loglikelihoods(url, model):
    texts = [("once upon a time",), ("z" * 300,)]  # the second one longer than the context
    remote = harness(url)
    results = remote.loglikelihood_rolling(requests("loglikelihood_rolling", *texts))
    ids = model.tokenizer.encode(texts[0][0], False)
    assert results[0] == pytest.approx(loglikelihood(model, [remote.prefix_token_id], ids)[0], abs=1e-3)
    assert results[1] < -300


def test_generate_until(url, model):
    arguments = [("A bird", {"until": ["q"], "max_gen_toks": 6}), ("Water", {"until": ["q"], "max_gen_toks": 6})]
    results = harness(url, batch_size=2).generate_until(requests("generate_until", *arguments))
    for (prompt, options), text in zip(arguments, results, strict=True):
        expected = model.generate(model.tokenizer.encode(prompt, False), 6, temp=0, stop=options["until"]).text()
        assert text == expected


def test_local_tasks(url, model, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    common = {"data": data, "text": "{{question}}"}
    (tmp_path / "choose.yaml").write_text(
        TASK.format(name="choose", kind="multiple_choice", target="answer", more=CHOICES, **common)
    )
    (tmp_path / "write.yaml").write_text(
        TASK.format(name="write", kind="generate_until", target="question", more=GENERATE, **common)
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=harness(url, batch_size=4), tasks=["choose", "write"], task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    right = 0
    encode = model.tokenizer.encode
    for question in QUESTIONS:
        context = encode(question["question"], False)
        scores = [loglikelihood(model, context, encode(choice, False))[0] for choice in question["choices"]]
        right += int(np.argmax(scores)) == question["answer"]
    assert results["results"]["choose"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    assert len(results["samples"]["write"]) == len(QUESTIONS)


def test_chats(served, reciting, tmp_path):
    url = served(reciting("Hi you"), warm_up=False)
    chat = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model="x", max_retries=1)
    message = chat.apply_chat_template([{"role": "user", "content": "Hello"}])
    results = chat.generate_until(requests("generate_until", (message, {"until": ["y"], "max_gen_toks": 8})))
    assert results == ["Hi "]
