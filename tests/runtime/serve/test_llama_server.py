"""llama-server's /completion, /slots and /metrics."""

import json
import math

import pytest
from safetensors.numpy import save as safetensors

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

ANSWER = "Hi <b>you!"
# What clients of llama-server read there (its README, "GET /slots" and "POST /completion").
# fmt: off
PARAMS = {
    "seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta",
    "max_tokens", "n_predict", "n_keep", "n_discard", "ignore_eos", "stream", "n_probs", "min_keep", "samplers",
    "timings_per_token", "post_sampling_probs", "lora",
}
# fmt: on
GENERATION_SETTINGS = PARAMS | {"dry_sequence_breakers", "stop", "logit_bias", "grammar"}


@pytest.fixture(scope="module")
def url(served, reciting):
    return served(reciting(ANSWER), alias="reciter", metrics=True, warm_up=False)


def post(url, path="/completion", **fields):
    return httpx.post(url + path, json=fields, timeout=300)


def test_a_completion(url):
    reply = post(url, prompt="a:", n_predict=50, cache_prompt=True, id_slot=0, return_tokens=True).json()
    assert (reply["content"], reply["stop"], reply["stop_type"], reply["model"]) == (ANSWER, True, "eos", "reciter")
    assert reply["tokens"] == [2 + b for b in ANSWER.encode()]
    assert (reply["tokens_evaluated"], reply["tokens_predicted"], reply["truncated"]) == (3, len(ANSWER), False)
    assert (reply["prompt"], reply["has_new_line"], reply["stopping_word"]) == ("<s>a:", False, "")
    assert (reply["tokens_cached"], reply["id_slot"]) == (3 + len(ANSWER) - 1, 0)
    assert reply["timings"]["predicted_n"] == len(ANSWER)
    assert reply["generation_settings"]["n_predict"] == 50
    assert reply["generation_settings"].keys() >= GENERATION_SETTINGS
    assert "completion_probabilities" not in reply
    cut = post(url, prompt="a:", n_predict=2).json()
    assert (cut["content"], cut["stop_type"], cut["tokens"]) == ("Hi", "limit", [])
    stopped = post(url, prompt="a:", stop=["z", "yo"]).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("Hi <b>", "word", "yo")


def test_the_settings_of_a_completion_are_those_of_the_request(url):
    fields = {
        "temperature": 0.5,
        "stop": ["zz"],
        "logit_bias": [[5, 1.5], [6, False]],
        "grammar": 'root ::= "Hi"',
        "n_probs": 1,
    }
    fields |= {"dry_multiplier": 0.5, "dry_sequence_breakers": ["x"], "mirostat_tau": 3}
    shown = post(url, prompt="a:", **fields).json()["generation_settings"]
    assert {name: shown[name] for name in fields if name != "logit_bias"} == {
        k: v for k, v in fields.items() if k != "logit_bias"
    }
    assert shown["logit_bias"] == [{"token": 5, "bias": 1.5}]
    assert shown["seed"] == 0xFFFFFFFF
    defaults = httpx.get(f"{url}/props", timeout=300).json()["default_generation_settings"]
    assert defaults["params"].keys() >= PARAMS
    assert (defaults["params"]["temperature"], defaults["params"]["stream"]) == (0, False)


def test_a_prompt_that_is_only_read(url):
    """n_predict 0: the cache then holds it."""
    prompt = [2 + b for b in b"a new prompt:"]
    reply = post(url, prompt=prompt, n_predict=0).json()
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")
    assert reply["generation_settings"]["n_predict"] == 0
    assert post(url, prompt=prompt).json()["timings"]["cache_n"] == len(prompt) - 1


def test_only_some_fields_of_a_reply(url):
    shown = ["content", "generation_settings/n_predict", "nothing", "content/nothing"]
    assert post(url, prompt="a:", n_predict=3, response_fields=shown).json() == {
        "content": "Hi ",
        "generation_settings/n_predict": 3,
    }
    assert post(url, prompt="a:", response_fields=[5]).json()["error"]["param"] == "response_fields"


def test_probabilities(url):
    entries = post(url, prompt="a:", n_probs=2).json()["completion_probabilities"]
    assert "".join(entry["token"] for entry in entries) == ANSWER
    assert all(len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)


def test_probabilities_that_tokens_are_drawn_by(url):
    """Two candidates are left of all; llama-server shows the same for the same order of samplers."""
    fields = {"prompt": "a:", "n_predict": 1, "n_probs": 5, "temperature": 2, "seed": 1, "top_k": 2}
    model = post(url, **fields).json()["completion_probabilities"][0]["top_logprobs"]
    entry = post(url, **fields, post_sampling_probs=True, samplers=["top_k", "temperature"]).json()["completion_probabilities"][
        0
    ]
    assert [each["id"] for each in entry["top_probs"]] == [each["id"] for each in model[:2]]
    weights = [math.exp(each["logprob"] / 2) for each in model[:2]]
    assert [each["prob"] for each in entry["top_probs"]] == pytest.approx([w / sum(weights) for w in weights])
    assert entry["prob"] in [each["prob"] for each in entry["top_probs"]]
    (sure,) = post(url, **fields | {"temperature": 0}, post_sampling_probs=True).json()["completion_probabilities"]
    assert [each["prob"] for each in sure["top_probs"]] == [1]


def test_samplers_in_an_order(url):
    shown = post(url, prompt="a:", n_predict=1, samplers="kt").json()["generation_settings"]["samplers"]
    assert shown == ["top_k", "temperature"]
    for wrong in (["top_z"], 5, [5]):
        assert post(url, prompt="a:", samplers=wrong).json()["error"]["param"] == "samplers"


def test_prompts_of_tokens_and_texts(url):
    ids = [0, 2 + ord("a"), 2 + ord(":")]
    expected = post(url, prompt=ids, n_probs=1).json()
    for prompt in (["a", ids[-1]], {"prompt_string": "a:"}, [ids[0], "a:"]):
        reply = post(url, prompt=prompt, n_probs=1).json()
        assert (reply["content"], reply["tokens_evaluated"], reply["prompt"]) == (ANSWER, 3, "<s>a:")
        assert reply["completion_probabilities"] == expected["completion_probabilities"]
    many = post(url, prompt=["a:", {"prompt_string": "a:"}, ["a", ids[-1]]]).json()
    assert [each["content"] for each in many] == [ANSWER] * 3
    assert post(url, "/tokenize", content=["a", 5, ":"]).json() == {"tokens": [ids[1], 5, ids[2]]}
    for wrong in ([None], {"prompt_string": 5}, {"prompt": "a"}, [["a", 1.5]], ["a", 5000]):
        assert post(url, prompt=wrong).json()["error"]["param"] == "prompt"


def test_a_prompt_that_is_too_long_is_told_with_its_length(url):
    error = post(url, prompt=[5] * 600).json()["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 600, 512)
    assert error["code"] == "context_length_exceeded"


def test_a_slot_that_the_client_chooses(served, reciting):
    url = served(reciting(ANSWER, parallel=2), warm_up=False)
    assert post(url, prompt="a:", id_slot=1).json()["id_slot"] == 1
    assert [slot["n_tokens"] > 0 for slot in httpx.get(f"{url}/slots", timeout=300).json()] == [False, True]
    assert post(url, prompt="b:", id_slot=0, stream=True).text.count('"id_slot": 0') > len(ANSWER)
    assert post(url, prompt="a:", id_slot=9).json()["id_slot"] == 1  # there is none of that number: where the prompt is cached
    assert post(url, "/v1/completions", prompt="a:", id_slot=-5).json()["error"]["param"] == "id_slot"


def test_lists_of_prompts(url):
    replies = post(url, prompt=["a:", [2 + ord("b"), 2 + ord(":")]]).json()
    assert [(reply["index"], reply["content"]) for reply in replies] == [(0, ANSWER), (1, ANSWER)]
    assert post(url, prompt=[2 + ord(":")]).json()["content"] == ANSWER


def test_a_stream(url):
    lines = [line for line in post(url, prompt="a:", stream=True).text.split("\n") if line]
    assert all(line.startswith("data: {") for line in lines)
    chunks = [json.loads(line[6:]) for line in lines]
    assert "".join(chunk["content"] for chunk in chunks) == ANSWER
    assert [token for chunk in chunks for token in chunk["tokens"]] == [2 + b for b in ANSWER.encode()]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["tokens_predicted"] == len(ANSWER)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "n_probs": 50}, "n_probs"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "temperature": "x"}, "temperature"),
    ],
)
def test_refusals_name_the_field(url, fields, param):
    reply = post(url, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_tokens_with_their_pieces(url):
    reply = post(url, "/tokenize", content="é<", with_pieces=True, add_special=True).json()
    expected = [(0, "<s>"), (2 + 0xC3, [0xC3]), (2 + 0xA9, [0xA9]), (2 + ord("<"), "<")]
    assert [(each["id"], each["piece"]) for each in reply["tokens"]] == expected


def test_paths_without_a_version_are_those_with_one(url):
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, body, read in (
        ("/chat/completions", chat, lambda reply: reply["choices"][0]["message"]["content"]),
        ("/responses", {"input": "Hello"}, lambda reply: reply["output"][0]["content"][0]["text"]),
        ("/chat/completions/input_tokens", chat, lambda reply: reply["input_tokens"]),
        ("/responses/input_tokens", {"input": "Hello"}, lambda reply: reply["input_tokens"]),
    ):
        answers = [read(post(url, version + path, **body).json()) for version in ("", "/v1")]
        assert answers[0] == answers[1] == (len("<u:Hello\na:") if path.endswith("input_tokens") else ANSWER)
    (model,) = httpx.get(f"{url}/models", timeout=300).json()["data"]
    assert [model] == httpx.get(f"{url}/v1/models", timeout=300).json()["data"]
    assert (model["id"], model["meta"]["n_ctx"], model["meta"]["n_embd"]) == ("reciter", 512, 32)
    assert httpx.get(f"{url}/lora-adapters", timeout=300).json() == []
    assert httpx.get(f"{url}/slots", params={"fail_on_no_slot": 1}, timeout=300).status_code == 200


def test_slots_and_metrics(url, served, reciting):
    pytest.importorskip("prometheus_client")
    post(url, prompt="a:")
    (slot,) = httpx.get(f"{url}/slots", timeout=300).json()
    assert (slot["id"], slot["n_ctx"], slot["is_processing"], slot["speculative"]) == (0, 512, False, False)
    assert slot["n_tokens"] > len(ANSWER)
    assert slot["id_task"] >= 1
    assert slot["params"].keys() >= PARAMS
    assert slot["next_token"][0]["n_decoded"] == len(ANSWER)
    assert slot["n_prompt_tokens_processed"] + slot["n_prompt_tokens_cache"] == 3
    reply = httpx.get(f"{url}/metrics", timeout=300)
    assert reply.headers["content-type"].startswith("text/plain")
    values = {k: float(v) for k, v in (line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#"))}
    assert values["llamacpp:tokens_predicted_total"] >= len(ANSWER)
    assert values["llamacpp:requests_processing"] == 0
    assert values["llamacpp:n_decode_total"] >= len(ANSWER)
    assert values["llamacpp:n_busy_slots_per_decode"] == 1
    assert values["llamacpp:n_tokens_max"] >= 2 + len(ANSWER)
    assert httpx.get(served(reciting(ANSWER), warm_up=False) + "/metrics", timeout=300).status_code == 501


def test_prompts_are_kept_across_restarts(served, reciting, tmp_path):
    url = served(reciting(ANSWER), warm_up=False, slot_save_path=tmp_path)
    prompt = "x" * 40 + ":"
    first = post(url, prompt=prompt).json()
    kept = post(url, "/slots/0?action=save", filename="a.bin").json()
    assert kept["n_saved"] >= first["tokens_evaluated"]
    assert kept["n_written"] == (tmp_path / "a.bin").stat().st_size
    again = served(reciting(ANSWER), warm_up=False, slot_save_path=tmp_path)
    assert post(again, "/slots/0?action=restore", filename="a.bin").json()["n_restored"] == kept["n_saved"]
    reply = post(again, prompt=prompt).json()
    assert reply["timings"]["cache_n"] == first["tokens_evaluated"] - 1
    assert reply["content"] == first["content"]
    assert post(again, "/slots/0?action=erase").json()["n_erased"] > 0
    for path, fields, status in (
        ("/slots/9?action=save", {"filename": "a"}, 400),
        ("/slots/0?action=keep", {"filename": "a"}, 400),
        ("/slots/0?action=save", {"filename": "../a"}, 400),
        ("/slots/0?action=restore", {"filename": "nothing"}, 400),
    ):
        assert post(again, path, **fields).status_code == status
    assert post(served(reciting(ANSWER), warm_up=False), "/slots/0?action=save", filename="a").status_code == 501


def test_only_saved_prompts_are_replaced_and_only_so_many_are_kept(served, reciting, tmp_path, monkeypatch):
    monkeypatch.setattr("ggufmill.runtime.serve.routes.slots.MAX_SAVED", 2)
    others = {
        "notes.txt": b"mine",
        "model.gguf": b"GGUF\3\0\0\0" + bytes(32),
        "empty": b"",
        "x.safetensors": safetensors({}, {"format": "x"}),
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("saved")
    url = served(reciting(ANSWER), warm_up=False, slot_save_path=tmp_path)

    def save(name):
        return post(url, "/slots/0?action=save", filename=name)

    post(url, prompt="x:")
    assert [save(name).status_code for name in ("saved", "saved", "second")] == [200] * 3
    for name in (*others, "folder", "link"):
        refused = save(name)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "filename"), name
        assert "is not a saved prompt" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text
    assert "2 prompts are saved" in save("third").json()["error"]["message"]
    assert save("second").status_code == 200
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert len(list(tmp_path.iterdir())) == len(others) + 4
    (tmp_path / "saved").unlink()
    assert save("third").status_code == 200


def test_infill_is_a_completion_between_two_texts(served, random_model):
    """The control tokens of the vocabulary stand around the texts, and what is generated goes on after `prompt`."""
    keys = {f"tokenizer.ggml.fim_{part}_token_id": token for part, token in (("pre", 250), ("suf", 251), ("mid", 252))}
    url = served(random_model(keys), warm_up=False)
    asked = {"n_predict": 4, "temperature": 0, "return_tokens": True}
    reply = post(url, "/infill", input_prefix="ab", input_suffix="y", prompt="c", **asked)
    ids = [0, 250, 2 + ord("a"), 2 + ord("b"), 251, 2 + ord("y"), 252, 2 + ord("c")]
    expected = post(url, "/completion", prompt=ids, **asked).json()
    assert (reply.status_code, reply.json()["tokens"], reply.json()["tokens_evaluated"]) == (200, expected["tokens"], len(ids))
    refused = post(url, "/infill", input_prefix="ab", input_extra=[{"text": "x", "filename": "y"}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_extra")
    assert post(url, "/infill", input_prefix=5).json()["error"]["param"] == "input_prefix"


def test_infill_needs_tokens_for_it(url):
    reply = post(url, "/infill", input_prefix="a", input_suffix="b")
    assert (reply.status_code, "no tokens to fill in the middle" in reply.json()["error"]["message"]) == (501, True)
