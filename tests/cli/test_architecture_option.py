"""--architecture NAME, by which every verb reads a checkpoint of an unknown architecture."""

import json

import pytest

from ggufmill.cli import main
from ggufmill.errors import UsageError
from ggufmill.formats import PlanError
from ggufmill.pipeline.common.models import open_model, settings_of_each
from ggufmill.recipes import FOLDER


@pytest.fixture
def run(capsys):
    def ended(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return ended


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """The demo under a name that is not known."""
    folder = tmp_path_factory.mktemp("renamed") / "demo"
    folder.mkdir()
    for path in (FOLDER / "demo").iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((FOLDER / "demo" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NewForCausalLM"]}))
    return folder, config["architectures"][0]


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
def test_every_verb_that_takes_a_checkpoint_has_it(run, renamed, tmp_path, verb):
    folder, name = renamed
    words = [w.format(model=folder, tmp=tmp_path, text=folder / "heldout.txt") for w in VERBS[verb]]
    code, _, said = run(verb, *words)
    assert code == 1
    assert "unsupported architecture NewForCausalLM" in said
    code, _, said = run(verb, *words, "--architecture", name)
    assert code == 0, said


def test_recipes_have_it(run, renamed, tmp_path):
    folder, name = renamed
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'[convert]\narchitecture = "{name}"\n[quantize]\ntype = "q8_0"\n')
    assert run("recipes", "explain", folder, "--recipe", recipe)[0] == 0
    assert run("recipes", "explain", folder, "--type", "q8_0", "--architecture", name)[0] == 0
    assert "unsupported architecture" in run("recipes", "explain", folder, "--type", "q8_0")[2]


def test_a_file_and_an_open_model_keep_theirs(run, renamed, tmp_path):
    folder, name = renamed
    assert run("convert", folder, tmp_path / "a.gguf", "--architecture", name)[0] == 0
    with pytest.raises(PlanError, match="whose architecture stays"):
        open_model(tmp_path / "a.gguf", {"architecture": name})
    model = open_model(tmp_path / "a.gguf", {})
    with pytest.raises(UsageError, match="is open already"):
        open_model(model.source, {"architecture": name})
    both = settings_of_each((folder, tmp_path / "a.gguf"), {"architecture": name, "threads": 1})
    assert both == [{"architecture": name, "threads": 1}, {"threads": 1}]
    words = (folder, "-f", folder / "heldout.txt", "-c", 64, "--chunks", 1)
    code, out, said = run("perplexity", *words, "--architecture", name, "--kl-divergence", tmp_path / "a.gguf", "--json")
    assert code == 0, said
    assert json.loads(out)["kld_mean"] < 1e-4
