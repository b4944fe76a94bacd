"""--architecture NAME, by which every verb reads a checkpoint of an unknown architecture, and --allow-lossy-config."""

import json

import pytest

from ggufmill.errors import UsageError
from ggufmill.formats import PlanError, open_gguf
from ggufmill.pipeline.common.models import open_model, settings_of_each
from ggufmill.recipes import FOLDER

SCALING = {"type": "dynamic", "factor": 2.0}


def demo_with(folder, changes):
    """A copy of the demo whose config.json has these changes."""
    folder.mkdir()
    for path in (FOLDER / "demo").iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((FOLDER / "demo" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder, config


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """The demo under a name that is not known."""
    folder, config = demo_with(tmp_path_factory.mktemp("renamed") / "demo", {"architectures": ["NewForCausalLM"]})
    return folder, config["architectures"][0]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """The demo with a rotary scaling that a GGUF cannot say."""
    return demo_with(tmp_path_factory.mktemp("scaled") / "demo", {"rope_scaling": SCALING})[0]


VERBS = {
    "convert": ("{model}", "{tmp}/a.gguf"),
    "quantize": ("{model}", "{tmp}/a.gguf", "q8_0", "--dry-run"),
    "plan": ("{model}", "--type", "q8_0"),
    "imatrix": ("{model}", "-f", "{text}", "-o", "{tmp}/a.imatrix", "-c", "64", "--chunks", "1", "--dry-run"),
    "perplexity": ("{model}", "-f", "{text}", "-c", "64", "--chunks", "1"),
    "generate": ("{model}", "-p", "a", "-n", "1"),
    "compare": ("{model}", "{model}", "-f", "{text}", "-c", "64", "--chunks", "1", "--no-weights"),
    "bench": ("{model}", "-p", "8", "-n", "0", "-r", "1"),
    "warm-up": ("{model}",),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_takes_a_checkpoint_has_both(mill, tmp_path, verb):
    folder, known = demo_with(tmp_path / "demo", {"architectures": ["NewForCausalLM"], "rope_scaling": SCALING})
    words = [w.format(model=folder, tmp=tmp_path, text=folder / "heldout.txt") for w in VERBS[verb]]
    code, _, said = mill(verb, *words)
    assert code == 1
    assert "unsupported architecture NewForCausalLM" in said
    words += ["--architecture", *known["architectures"]]
    code, _, said = mill(verb, *words)
    assert code == 1
    assert "dynamic rotary scaling" in said
    assert "--allow-lossy-config" in said
    code, _, said = mill(verb, *words, "--allow-lossy-config")
    assert code == 0, said
    assert "is not all that its config.json says" in said


def test_what_was_left_out_stays_in_the_file(mill, scaled, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[convert]\nallow_lossy_config = true\n[quantize]\ntype = "q8_0"\n')
    assert mill("recipes", "explain", scaled, "--recipe", recipe)[0] == 0
    code, _, said = mill("quantize", scaled, tmp_path / "a.gguf", "--recipe", recipe)
    assert code == 0, said
    (lost,) = open_gguf(tmp_path / "a.gguf").metadata["ggufmill.lost_config"]
    assert "dynamic rotary scaling" in lost
    assert lost in mill("inspect", tmp_path / "a.gguf")[1]
    assert lost in mill("perplexity", tmp_path / "a.gguf", "-f", scaled / "heldout.txt", "-c", 64, "--chunks", 1)[2]


def test_recipes_have_it(mill, renamed, tmp_path):
    folder, name = renamed
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'[convert]\narchitecture = "{name}"\n[quantize]\ntype = "q8_0"\n')
    assert mill("recipes", "explain", folder, "--recipe", recipe)[0] == 0
    assert mill("recipes", "explain", folder, "--type", "q8_0", "--architecture", name)[0] == 0
    assert "unsupported architecture" in mill("recipes", "explain", folder, "--type", "q8_0")[2]


def test_a_file_and_an_open_model_keep_theirs(mill, renamed, tmp_path):
    folder, name = renamed
    assert mill("convert", folder, tmp_path / "a.gguf", "--architecture", name)[0] == 0
    with pytest.raises(PlanError, match="whose architecture stays"):
        open_model(tmp_path / "a.gguf", {"architecture": name})
    model = open_model(tmp_path / "a.gguf", {})
    with pytest.raises(UsageError, match="is open already"):
        open_model(model.source, {"architecture": name})
    both = settings_of_each((folder, tmp_path / "a.gguf"), {"architecture": name, "threads": 1})
    assert both == [{"architecture": name, "threads": 1}, {"threads": 1}]
    words = (folder, "-f", folder / "heldout.txt", "-c", 64, "--chunks", 1)
    code, out, said = mill("perplexity", *words, "--architecture", name, "--kl-divergence", tmp_path / "a.gguf", "--json")
    assert code == 0, said
    assert json.loads(out)["kld_mean"] < 1e-4
