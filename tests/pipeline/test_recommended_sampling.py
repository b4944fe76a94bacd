"""generate, chat and serve sample as the model's file recommends, unless an argument or an option says otherwise."""

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

from ggufmill import generate_text, serve_model, start_chat
from ggufmill.cli.generate import command
from ggufmill.convert import open_source
from ggufmill.pipeline.requests.generate import GenerateRequest, sampling_of
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Sampling, load_model

RECOMMENDED = {"general.sampling.temp": np.float32(0.6), "general.sampling.top_k": np.int32(20)}


@pytest.fixture(scope="module")
def demo():
    return open_source(FOLDER / "demo")


@pytest.fixture(scope="module")
def model(demo):
    return load_model(dataclasses.replace(demo, metadata=demo.metadata | RECOMMENDED))


@pytest.fixture
def sampled(monkeypatch):
    """The settings with which texts are sampled."""
    from ggufmill.runtime.generation import generate as module

    made = []

    class Spy(module.Sampler):
        def __init__(self, settings, *more):
            made.append(settings)
            super().__init__(settings, *more)

    monkeypatch.setattr(module, "Sampler", Spy)
    return made


def test_arguments_win_over_the_file_and_the_file_over_defaults(model, demo, sampled):
    generate_text(model, "a", n_predict=1)
    generate_text(model, "a", n_predict=1, temp=0.8, top_p=0.5)  # 0.8 is the default: it was asked for all the same
    generate_text(load_model(demo), "a", n_predict=1)
    model.generate("a", 1, temp=0.0).text()
    assert sampled[0] == dataclasses.replace(Sampling(), temp=0.6, top_k=20)
    assert sampled[1] == dataclasses.replace(Sampling(), temp=0.8, top_k=20, top_p=0.5)
    assert sampled[2] == Sampling()
    assert sampled[3] == dataclasses.replace(Sampling(), temp=0.0, top_k=20)


def test_chats(model, sampled):
    chat = start_chat(model, template="chatml", n_predict=1, top_k=5)
    list(chat.answer("a"))
    assert sampled == [dataclasses.replace(Sampling(), temp=0.6, top_k=5)]


def test_requests_without_arguments(model):
    asked = GenerateRequest(model=model, prompt="a", top_k=40, temp=0.3)
    assert sampling_of(asked, model)["temp"] == 0.3
    assert sampling_of(asked, model)["top_k"] == 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), {"temp": 0.6, "top_k": 20}), (("--temp", "0.8"), {"temp": 0.8, "top_k": 20}), (("--top-k", "40"), {"temp": 0.6})],
)
def test_the_command_line(model, tmp_path, sampled, monkeypatch, arguments, expected):
    from ggufmill.pipeline import generate

    monkeypatch.setattr(generate, "open_generating_model", lambda *_, **__: model)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    result = CliRunner().invoke(command, [str(tmp_path / "m.gguf"), "-p", "a", "-n", "1", *arguments])
    assert result.exit_code == 0, result.output
    assert sampled == [dataclasses.replace(Sampling(), **expected)]


def test_what_is_used_of_it_is_noted(model, caplog):
    with caplog.at_level("INFO", "ggufmill"):
        generate_text(model, "a", n_predict=1, temp=0.5)
    assert "sampling as the model's file recommends: top_k 20" in caplog.messages


def test_a_server_has_it_as_the_defaults_of_requests(model, monkeypatch):
    pytest.importorskip("starlette")
    from ggufmill.runtime import serve

    options = []
    monkeypatch.setattr(serve, "serve", lambda *_, **more: options.append(more["options"]))
    serve_model(model, top_p=0.5)
    assert (options[0]["temp"], options[0]["top_k"], options[0]["top_p"]) == (0.6, 20, 0.5)
