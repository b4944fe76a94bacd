"""Speculative decoding with the draft layer: the same texts as without it, acceptance, rewinding, forks, the engine."""

import threading

import numpy as np
import pytest
from draft_cases import convert_draft_case

from ggufmill.runtime import load_model
from ggufmill.runtime.generation.drafter import Drafter
from ggufmill.runtime.serve.engine import Engine
from ggufmill.runtime.serve.tasks import EndEvent, Task

CASES = ["glm4moe", "v3", "qwen35", "bailingmoe2"]  # grouped and latent attention, recurrent layers, one matrix for q, k and v
SEVERAL = [
    "glm4moe-three",
    "v3-two",
    "mimo2",
    "step35",
]  # draft layers; of mimo2 all read the model's hidden states; the last cannot be copies
PROMPT = [5, 80, 17, 200, 33, 9, 41, 122, 87, 6, 77]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """case -> models with a draft layer: random, and one that repeats the model's only layer."""
    made = {}

    def load(case, copies=False):
        if (case, copies) not in made:
            folder = tmp_path_factory.mktemp(case)
            path = convert_draft_case(case, folder, copies_first_layer=copies, mtp=True).path
            made[case, copies] = load_model(path)
        return made[case, copies]

    return load


@pytest.mark.parametrize(("case", "copies"), [(case, each) for case in CASES + SEVERAL for each in (False, True)][:-1])
def test_texts_are_the_same_with_drafts(models, case, copies):
    model = models(case, copies)
    for options in ({"temp": 0}, {"temp": 1.0, "seed": 11, "repeat_penalty": 1.2, "n_probs": 0}):
        plain = model.generate(PROMPT, 40, ignore_eos=True, **options)
        plain.text()
        for draft_max in (1, 3, 16):
            drafted = model.generate(PROMPT, 40, ignore_eos=True, draft_max=draft_max, **options)
            assert drafted.text() is not None
            assert drafted.tokens == plain.tokens
            assert [s.logprob for s in drafted.sampled] == [s.logprob for s in plain.sampled]
            assert drafted.session.tokens == plain.session.tokens
            assert drafted.timings.drafted_tokens > 0
            assert drafted.timings.generated_passes + drafted.timings.accepted_tokens == 39


def test_drafts_over_a_rotated_cache(models):
    """The draft layer's cache has the types and the rotation of the last layers."""
    settings = {"k_cache_hadamard": True, "cache_k_first": ("f32", 1), "cache_v_last": ("bf16", 1)}
    model = load_model(models("v3", True).source, mla=1, **settings)
    (part,) = (layer.rows["v"] for layer in model.draft_heads[0].new_cache(4).layers if layer.rows)
    assert part.type == "bf16"
    plain = model.generate(PROMPT, 40, ignore_eos=True, temp=0)
    drafted = model.generate(PROMPT, 40, ignore_eos=True, temp=0, draft_max=3)
    assert (plain.text(), plain.tokens) == (drafted.text(), drafted.tokens)
    assert drafted.timings.acceptance_rate > 0.8


@pytest.mark.parametrize("case", CASES)
def test_a_draft_layer_that_predicts_as_the_model_is_accepted(models, case):
    drafted = models(case, True).generate(PROMPT, 60, ignore_eos=True, temp=0, draft_max=3)
    drafted.text()
    assert drafted.timings.acceptance_rate > 0.8
    assert drafted.timings.generated_passes < 30
    random = models(case).generate(PROMPT, 60, ignore_eos=True, temp=0, draft_max=3)
    random.text()
    assert random.timings.acceptance_rate < 0.5


@pytest.mark.parametrize("case", SEVERAL)
def test_each_layer_drafts_the_token_behind_that_of_the_one_before(models, case):
    """As layers run over the whole text with the drafts so far: greedy drafts, then the last layer's of its own output."""
    model = models(case)
    text, token, count = PROMPT, 50, len(model.draft_heads)
    drafter = Drafter(model, 60, 9)
    session = model.session(60)
    session.drafter = drafter
    session.feed(text[:1])
    assert len(drafter.propose(text[:1], text[1], 1)) == 1  # the other layers have no row yet
    session.feed(text[1:4])
    assert len(drafter.propose(text[:4], text[4], 1)) == 1  # fewer than there are layers: the others keep up
    session.feed(text[4:])
    drafts = drafter.propose(text, token, count + 1)
    outputs = hidden = model.hidden([(model.new_cache(60), text)])[0]
    known = [*text, token]
    for depth, head in enumerate(model.draft_heads):
        states, cache = outputs if head.is_chained else hidden, head.new_cache(60)
        outputs = head.hidden(cache, np.array(known[depth + 1 :]), states)
        known.append(int(head.logits(outputs[-1:])[0].argmax()))
    outputs = head.hidden(cache, np.array(known[-1:]), outputs[-1:])
    known.append(int(head.logits(outputs)[0].argmax()))
    assert drafts == known[len(text) + 1 :]
    session.feed([token])
    assert drafter.propose([*text, token, 7], 8, count) == []  # the hidden state of one of these is not known


@pytest.mark.parametrize("case", ["qwen35", "glm4moe-three", "mimo2"])
def test_a_conversation_goes_on_after_rewinding(models, case):
    model = models(case, True)
    session, plain = model.session(), model.session()
    for prompt in (PROMPT, [*PROMPT, 9, 8, 7], PROMPT[:6], [*PROMPT[:6], 4, 4, 90, 7, 30]):
        with_drafts = model.generate(prompt, 12, ignore_eos=True, temp=0, draft_max=2, session=session)
        without = model.generate(prompt, 12, ignore_eos=True, temp=0, session=plain)
        with_drafts.text(), without.text()
        assert with_drafts.tokens == without.tokens
        assert with_drafts.timings.drafted_tokens > 0


@pytest.mark.parametrize("case", ["glm4moe", *SEVERAL])
def test_drafts_of_a_rewound_or_forked_session_are_those_of_a_new_one(models, case):
    model = models(case)

    def session_of(tokens):
        session = model.session(100)
        session.drafter = Drafter(model, 100, 3)
        session.feed(tokens)
        return session

    expected = session_of([*PROMPT[:7], 50]).drafter.propose([*PROMPT[:7], 50], 60, 3)
    rewound = session_of(PROMPT)
    assert rewound.drafter.propose(PROMPT, 60, 2)  # its rows have been read
    fork, more = rewound.fork(7), rewound.fork()
    rewound.rewind(9)
    rewound.rewind(7)
    for session in (rewound, fork):
        assert session.uncomputed == len(model.draft_heads)  # their hidden states have been used up
        session.feed([50])
        assert session.drafter.propose([*PROMPT[:7], 50], 60, 3) == expected
    assert more.drafter.propose(PROMPT, 60, 2) == []  # computed with the next tokens


def test_stop_texts_and_ends_come_at_the_same_place(models):
    model = models("glm4moe", True)
    plain = model.generate(PROMPT, 40, temp=0)
    text = plain.text()
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    expected = model.generate(PROMPT, 40, temp=0, stop=[stop])
    drafted = model.generate(PROMPT, 40, temp=0, stop=[stop], draft_max=3)
    assert drafted.text() == expected.text()
    assert (drafted.reason, drafted.tokens) == (expected.reason, expected.tokens)
    short = model.generate(PROMPT, -1, temp=0, ignore_eos=True, draft_max=3, session=model.session(len(PROMPT) + 9))
    short.text()
    assert (short.reason, len(short.tokens)) == ("context", 10)


def test_engine_drafts_for_several_tasks(models):
    model = models("qwen35", True)
    engine, done = Engine(load_model(model.source.path, parallel=3)), []
    try:
        for number in range(3):
            end, tokens = threading.Event(), []
            prompt = [*PROMPT, 10 + number]

            def notify(event, end=end, tokens=tokens):
                tokens += [sampled.token for sampled in event.sampled]
                if isinstance(event, EndEvent):
                    end.event = event
                    end.set()

            options = {"n_predict": 20, "temp": 0, "ignore_eos": True, "draft_max": 2, "n_probs": 0}
            engine.submit(Task(prompt, options, notify))
            done.append((prompt, end, tokens))
        for prompt, end, tokens in done:
            assert end.wait(60)
            assert end.event.error is None
            expected = model.generate(prompt, 20, temp=0, ignore_eos=True)
            expected.text()
            assert end.event.timings.generated_tokens == 20
            assert end.event.timings.accepted_tokens > 8
            assert tokens == expected.tokens
    finally:
        engine.close()


def test_sampled_tokens_have_the_models_distribution(models):
    model = models("glm4moe", True)
    logits = model.logits([*PROMPT, 60])[-1].astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    counts = np.zeros(len(p))
    session = model.session(40)
    for seed in range(600):
        options = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
        generation = model.generate([*PROMPT, 60], 2, ignore_eos=True, draft_max=1, session=session, **options)
        generation.text()
        counts[generation.tokens[0]] += 1
    top = p.argsort()[-5:]
    assert np.abs(counts[top] / 600 - p[top]).max() < 4 * np.sqrt(p[top].max() / 600)
