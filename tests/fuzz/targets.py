"""What is fuzzed: every parser of files and requests, with whole files to begin with."""

import ast
import importlib
import json
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mutations
import request_seeds
import seeds
from job_files import folder, journal, journal_seed, measured, memory, result, state, written

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import model_spec
from ggufmill.convert.config import Config, read_config
from ggufmill.convert.lora import load_adapters
from ggufmill.convert.model_card import card_metadata, file_metadata
from ggufmill.convert.model_spec import ModelSpec
from ggufmill.convert.tokenizers.vocabulary import read_vocabulary
from ggufmill.formats import MillError, TensorInfo, open_gguf
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.formats.hashes import read_manifest
from ggufmill.formats.loaders import MLA_LAYOUTS
from ggufmill.formats.safetensors import open_safetensors, read_safetensors
from ggufmill.formats.source import TensorSource
from ggufmill.imatrix import load
from ggufmill.imatrix.covariance.files import open_covariance
from ggufmill.imatrix.texts import CalibrationText, read_segments
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.rules import TensorNames, parse_rules
from ggufmill.quantize.recipes.shell import rules_from_shell
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.generation.sampling_options import Sampling
from ggufmill.runtime.serve.requests.checks import RequestError
from ggufmill.runtime.serve.requests.fields import parse_chat, parse_completion
from ggufmill.runtime.text.template_sandbox import run_template
from ggufmill.runtime.text.tokenizer import Tokenizer

SECONDS = 5.0  # of processor time for one input of some kilobytes; importing what a parser needs is part of the first


# -- what is done with the bytes


def gguf(data: bytes) -> None:
    gguf_at(written("a.gguf", data))


def gguf_at(path: Path) -> None:
    opened = open_gguf(path)
    assert opened.identity
    for info in opened.tensors.values():
        assert isinstance(info, TensorInfo)
        if info.type.is_known:
            assert info.data.nbytes == info.nbytes
            assert info.read(0, 1).nbytes == info.type.row_bytes(info.shape[0])


def shard(data: bytes) -> None:
    """The first, or the second, of two files of a split model."""
    first, second = (folder() / "split" / f"a-0000{i}-of-00002.gguf" for i in (1, 2))
    written(f"split/{first.name}", data)
    second.write_bytes(seeds.shard(1))
    with suppress(MillError):
        gguf_at(first)
    first.write_bytes(seeds.shard(0))
    second.write_bytes(data)
    gguf_at(first)


def model(data: bytes) -> None:
    """Opened for inference, which nothing is computed with; its tokenizer takes a text apart."""
    loaded = load_model(written("model.gguf", data), threads=1)
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode("Hello, world \x00\U0001f642 <s>")
    assert all(0 <= i < len(tokenizer.vocabulary.tokens) for i in ids)
    tokenizer.decode(ids)
    tokenizer.vocabulary.eog_ids  # noqa: B018


def safetensors(data: bytes) -> None:
    for tensor in read_safetensors(written("a.safetensors", data)).values():
        assert tensor.data.nbytes == tensor.nbytes


def index(data: bytes) -> None:
    path = written("index/model.safetensors.index.json", data)
    if not path.with_name("a.safetensors").exists():
        path.with_name("a.safetensors").write_bytes(seeds.safetensors())
    for tensor in open_safetensors(path.parent).values():
        assert tensor.path == path.with_name("a.safetensors")


def released(data: bytes) -> None:
    open_safetensors(written("released/a.safetensors.released", data).parent)


def imatrix(data: bytes) -> None:
    found = load(written("a.imatrix", data))
    found.means()
    found.unseen_experts()


def covariance(data: bytes) -> None:
    found = open_covariance(written("a.cov", data))
    for name, one in found.inputs.items():
        for matrix in range(min(one.matrices, 4)):
            found.covariance_of(name, matrix)


@cache
def source_of_a_model() -> tuple[TensorSource, ModelSpec]:
    return open_source(FOLDER / "demo"), model_spec(config_of_a_model(), MLA_LAYOUTS[0])


def adapter(data: bytes) -> None:
    """A LoRA adapter in a GGUF."""
    load_adapters([written("adapter.gguf", data)], source_of_a_model()[0], None)


def peft(data: bytes) -> None:
    """The configuration of an adapter that peft saved."""
    _peft_folder(adapter_config=data)


def factors(data: bytes) -> None:
    """The weights of an adapter that peft saved."""
    _peft_folder(factors=data)


def _peft_folder(adapter_config: bytes = seeds.PEFT, factors: bytes | None = None) -> None:
    path = written("peft/adapter_config.json", adapter_config)
    path.with_name("adapter_model.safetensors").write_bytes(seeds.factors() if factors is None else factors)
    load_adapters([path.parent], *source_of_a_model())


def recipe(data: bytes) -> None:
    load_recipe(written("a.toml", data))


def rules(data: bytes) -> None:
    for rule in parse_rules(rules_from_shell(data.decode("utf-8", "replace"))):
        rule.first_match(TensorNames(("blk.0.ffn_up.weight", "output.weight")))


def _vocabulary_from(name: str) -> Callable[[bytes], None]:
    """Reads the bytes as that file of a checkpoint's tokenizer, and writes what comes of it into a header."""

    def run(data: bytes) -> None:
        inside = written(f"of-{name}/{name}", data).parent
        if name == "tokenizer_config.json" and not (inside / "tokenizer.json").exists():
            (inside / "tokenizer.json").write_text(json.dumps(seeds.TOKENIZER))
        metadata, _ = read_vocabulary(inside, config_of_a_model(), 64)
        header_bytes(metadata, [], 32)

    return run


def config(data: bytes) -> None:
    """config.json beside the demo's weights and tokenizer."""
    path = written("checkpoint/config.json", data)
    for file in (FOLDER / "demo").iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "config.json":
            link = path.with_name(file.name)
            if not link.exists():
                shutil.copy(file, link)
    source = open_source(path.parent)
    header_bytes(source.metadata, [], 32)


def card(data: bytes) -> None:
    notes: list[str] = []
    header_bytes(card_metadata(written("card/README.md", data).parent, notes), [], 32)
    assert all("\n" not in note for note in notes)


def metadata(data: bytes) -> None:
    header_bytes(file_metadata(written("metadata.json", data)), [], 32)


def template(data: bytes) -> None:
    """What runs in a process of its own when it is used, here without one."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    run_template({"text": data.decode("utf-8", "replace"), "variables": {"messages": messages}, "seconds": 5.0})


def texts(data: bytes) -> None:
    given = SimpleNamespace(tokenizer=tokenizer_of_a_model(), metadata={"tokenizer.chat_template": "{{ messages[0].content }}"})
    read_segments(given, [CalibrationText(written("a.jsonl", data))])


def manifest(data: bytes) -> None:
    read_manifest(written("a.manifest", data))


def request(data: bytes) -> None:
    """A request to the server, up to the sampler and the tokenizer."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    for parse in (parse_chat, parse_completion):
        try:
            asked = parse(body, {"n_predict": -1}) if isinstance(body, dict) else None
        except RequestError as error:
            json.dumps(error.as_json()).encode()
            continue
        if asked is None:
            continue
        fields = Sampling.__dataclass_fields__
        Sampling(**{name: value for name, value in asked.options.items() if name in fields})
        assert type(asked.options["n_predict"]) is int
        texts = [prompt for prompt in asked.prompts or [] if isinstance(prompt, str)]
        text = "".join([*texts, *(m["content"] for m in asked.messages or [])])
        tokenizer_of_a_model().encode(text)
        json.dumps([asked.variables, asked.tools, asked.messages])


@cache
def config_of_a_model() -> Config:
    return read_config(FOLDER / "demo")


@cache
def tokenizer_of_a_model() -> Tokenizer:
    return Tokenizer(read_vocabulary(FOLDER / "demo", config_of_a_model(), 4096)[0])


# -- all of them


@dataclass(frozen=True)
class Target:
    """run: raises MillError of one line for what it does not take; shape: of mutations.SHAPES; parsers: modules whose texts
    are words of its files; seeds: whole files, made when they are needed."""

    run: Callable[[bytes], None]
    shape: str
    parsers: tuple[str, ...]
    make: Callable[[], list[bytes]]

    @property
    def seeds(self) -> list[bytes]:
        return _seeds(self)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(sorted({word for name in self.parsers for word in _words(name)}))


@cache
def _seeds(target: Target) -> list[bytes]:
    return target.make()


@cache
def _words(module: str) -> list[str]:
    """Short texts of a module, which are keys and values that it knows."""
    source = Path(importlib.import_module(f"ggufmill.{module}").__file__ or "").read_text("utf-8")
    found = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [text for text in found if isinstance(text, str) and 0 < len(text) <= 40 and text.isprintable()]


TARGETS = {
    "gguf": Target(gguf, "gguf", ("formats.gguf", "formats.gguf_parser"), lambda: [seeds.gguf()]),
    "shard": Target(shard, "gguf", ("formats.gguf", "formats.gguf_parser"), lambda: [seeds.shard(1)]),
    "model": Target(model, "gguf", ("runtime.models.llama", "runtime.text.vocabulary", "runtime.models.rotary"), seeds.models),
    "safetensors": Target(safetensors, "safetensors", ("formats.safetensors",), lambda: [seeds.safetensors()]),
    "index": Target(index, "json", ("formats.safetensors",), lambda: [seeds.INDEX]),
    "released": Target(released, "lines", ("formats.deleted_shards",), lambda: [seeds.released()]),
    "dat": Target(imatrix, "", ("imatrix.files",), lambda: [seeds.imatrix(folder() / "seed.dat")]),
    "imatrix": Target(imatrix, "gguf", ("imatrix.files",), lambda: [seeds.imatrix(folder() / "seed.imatrix")]),
    "state": Target(state, "npz", ("imatrix.collect_state",), lambda: [seeds.state(folder() / "seed.state")]),
    "covariance": Target(covariance, "gguf", ("imatrix.covariance.files",), lambda: [seeds.covariance(folder() / "seed.cov")]),
    "adapter": Target(adapter, "gguf", ("convert.lora.load",), lambda: [seeds.adapter()]),
    "peft": Target(peft, "json", ("convert.lora.peft_folder",), lambda: [seeds.PEFT]),
    "factors": Target(factors, "safetensors", ("convert.lora.peft_folder",), lambda: [seeds.factors()]),
    "recipe": Target(
        recipe,
        "toml",
        ("quantize.recipes.recipe", "quantize.recipes.rules", "quantize.recipes.mix_tables"),
        lambda: seeds.RECIPES,
    ),
    "rules": Target(rules, "", ("quantize.recipes.rules", "quantize.recipes.mix_tables", "formats.types"), lambda: seeds.RULES),
    "tokenizer": Target(
        _vocabulary_from("tokenizer.json"),
        "json",
        ("convert.tokenizers.tokenizer_json", "convert.tokenizers.sentencepiece", "convert.tokenizers.wordpiece"),
        seeds.tokenizers,
    ),
    "settings": Target(
        _vocabulary_from("tokenizer_config.json"),
        "json",
        ("convert.tokenizers.vocabulary",),
        lambda: [seeds.SETTINGS],
    ),
    "pieces": Target(_vocabulary_from("tokenizer.model"), "", ("convert.tokenizers.sentencepiece",), seeds.pieces),
    "ranks": Target(_vocabulary_from("tiktoken.model"), "", ("convert.tokenizers.tiktoken",), lambda: [seeds.RANKS]),
    "words": Target(_vocabulary_from("vocab.txt"), "", ("convert.tokenizers.wordpiece",), lambda: [seeds.WORDS]),
    "config": Target(
        config,
        "json",
        ("convert.metadata", "convert.quantization.methods", "convert.architectures.latent_attention.deepseek"),
        seeds.configs,
    ),
    "card": Target(card, "card", ("convert.model_card",), lambda: seeds.CARDS),
    "metadata": Target(metadata, "json", ("convert.model_card",), lambda: [seeds.METADATA]),
    "template": Target(template, "", ("runtime.text.template_sandbox",), lambda: seeds.TEMPLATES),
    "texts": Target(texts, "lines", ("imatrix.texts",), lambda: [seeds.CHATS]),
    "manifest": Target(manifest, "", ("formats.hashes",), lambda: [seeds.MANIFEST]),
    "journal": Target(journal, "lines", ("jobs.journal",), lambda: [journal_seed()]),
    "memory": Target(memory, "json", ("pipeline.stages.cache",), lambda: [seeds.MEMORY]),
    "measured": Target(measured, "json", ("pipeline.recipe_search.measurements",), lambda: [seeds.MEASURED]),
    "result": Target(
        result,
        "json",
        (
            "pipeline.measuring.perplexity",
            "cli.display.origins",
        ),
        lambda: [seeds.RESULT],
    ),
    "request": Target(request, "json", ("runtime.serve.requests",), lambda: request_seeds.REQUESTS),
}


def survive(name: str, data: bytes) -> bool:
    """Whether the target takes the bytes. Raises whatever is not a MillError of one line."""
    began = time.process_time()
    try:
        TARGETS[name].run(data)
    except MillError as error:
        said = str(error)
    else:
        said = ""
    assert time.process_time() - began < SECONDS
    assert "\n" not in said
    return not said


def damaged(name: str, seed: int, data: bytes | None = None) -> bytes:
    """A whole file of the target (or the given one) with changes that follow from the seed."""
    draw, target = random.Random(seed), TARGETS[name]
    return mutations.damaged(target.shape, draw.choice(target.seeds) if data is None else data, draw, target.words)
