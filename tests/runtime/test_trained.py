"""Trained checkpoints through the convert command and the runtime: perplexity and greedy text are transformers'.

Random weights would not tell a wrong scale of the logits or a lost merge of the tokenizer from a right one; a model that learnt
something does. The demo's fp8 is decoded by torch for the reference, not by us.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from commands import exit_code

from ggufmill.runtime import generate, load_model
from ggufmill.runtime.evaluate.perplexity import perplexity

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.oracle

SHARED = Path(os.environ.get("GGUFMILL_SHARED", "/nowhere")) / "data"
DEMO = Path(__file__).parents[2] / "recipes" / "demo"
STORY = (
    "Once upon a time, there was a little {who} named {name}. {name} loved to play outside in the {place}. "
    "One day, {name} saw a big {animal}. The {animal} was very sad. It had lost its {thing}. "
    '{name} said, "Do not cry. I can help you find your {thing}." They looked and looked. '
    "Then they found it under a tree. The {animal} was happy and said thank you. They became good friends. "
)
WORDS = {
    "who": ("girl", "boy", "cat", "bear"),
    "name": ("Lily", "Tim", "Sue", "Max", "Tom"),
    "place": ("park", "garden", "snow", "forest", "sand", "rain"),
    "animal": ("dog", "bird", "frog", "bunny", "lion", "duck", "fish"),
    "thing": ("ball", "hat", "toy", "mom", "shoe", "cake", "book", "red car"),
}


def stories(count):
    return "".join(STORY.format(**{key: words[i % len(words)] for key, words in WORDS.items()}) for i in range(count))


CHECKPOINTS = {  # folder, text to score, beginning of the greedy text
    "demo": (DEMO, lambda: (DEMO / "heldout.txt").read_text("utf-8")[:12_000], "Return the number of"),
    "story": (SHARED / "story", lambda: stories(40), "Once upon a time"),
}
WINDOW, BATCH = 256, 4


def reference(folder):
    """The model of transformers in float32; fp8 with scales per block decoded by torch."""
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= safetensors.load_file(path)
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        rows, columns = config.quantization_config["weight_block_size"]
        for name in [n for n in state if n.endswith("_scale_inv")]:
            weight, scale = name.removesuffix("_scale_inv"), state.pop(name)
            spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            values = state[weight].to(torch.float32)
            state[weight] = values * spread[: values.shape[0], : values.shape[1]]
        del config.quantization_config
    state = {name: tensor.to(torch.float32) for name, tensor in state.items()}
    stacked(state)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight", "model.embed_tokens.weight"} if config.tie_word_embeddings else set()
    assert set(missing) < tied or not missing
    assert not unexpected
    return model.eval()


def stacked(state):
    """Experts one by one, as checkpoints hold them, to the stacks that transformers has in memory."""
    experts = {}
    for name in [n for n in state if ".experts." in n]:
        before, after = name.split(".experts.")
        number, part, _ = after.split(".")
        experts.setdefault(before, {})[int(number), part] = state.pop(name)
    for before, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        fused = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        state[before + ".experts.gate_up_proj"] = torch.stack(fused)
        state[before + ".experts.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])


@pytest.fixture(scope="module", params=CHECKPOINTS)
def trained(request, tmp_path_factory):
    """(our model, theirs, their tokenizer, the text to score, the prompt)."""
    folder, text, prompt = CHECKPOINTS[request.param]
    if not folder.exists():
        pytest.skip("GGUFMILL_SHARED does not hold data/story")
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    assert exit_code("convert", folder, path, "--outtype", "f32") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return load_model(path, exact=True), reference(folder), tokenizer, text(), prompt


def test_perplexity_is_that_of_the_reference(trained):
    ours, theirs, tokenizer, text, _ = trained
    tokens = tokenizer(text)["input_ids"]
    assert ours.tokenizer.encode(text) == tokens
    windows = torch.tensor(tokens[: len(tokens) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    if ours.tokenizer.add_bos:
        windows[:, 0] = ours.tokenizer.bos
    with torch.no_grad():
        logits = torch.cat([theirs(part).logits[:, WINDOW // 2 : -1] for part in windows.split(BATCH)])
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), windows[:, WINDOW // 2 + 1 :].flatten())
    result = perplexity(ours, text, WINDOW)
    assert (result.chunks, result.tokens_scored) == (len(windows), windows[:, WINDOW // 2 + 1 :].numel())
    print(f"perplexity {result.perplexity:.6f}, transformers {losses.exp():.6f}, {result.tokens_scored} tokens")
    assert result.perplexity == pytest.approx(float(losses.exp()), rel=1e-5)
    scored = ours.logits(windows[0].numpy())[WINDOW // 2 : -1]
    assert np.abs(scored - logits[0].numpy()).max() < 1e-3


def test_greedy_text_is_that_of_the_reference(trained):
    ours, theirs, tokenizer, _, prompt = trained
    given = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        produced = theirs.generate(**given, do_sample=False, max_new_tokens=80, pad_token_id=0)[0]
    expected = tokenizer.decode(produced[given["input_ids"].shape[1] :], skip_special_tokens=True)
    text = "".join(generate(ours, prompt, 80, temp=0))
    print(text)
    assert len(text) > 80
    assert text == expected
