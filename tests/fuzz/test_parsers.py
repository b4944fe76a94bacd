"""Every parser against damaged input: a MillError of one line, or a result; never a crash, a hang, or memory
beyond the file's size.

`fuzz.py` beside this feeds the same targets for as long as one likes; what it finds is kept in tests/data/bad and read here.
"""

import json
import os
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufmill.convert.config import Config, read_config
from ggufmill.convert.vocabulary import read_vocabulary
from ggufmill.formats import MillError, TensorInfo, open_gguf
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.formats.safetensors import open_safetensors, read_safetensors
from ggufmill.formats.types import TYPES
from ggufmill.imatrix.entries import Imatrix
from ggufmill.imatrix.files import load, save
from ggufmill.quantize.recipe import from_shell, load_recipe, parse_rules
from ggufmill.recipes import FOLDER
from ggufmill.runtime.chat import ChatTemplate

BAD = Path(__file__).parent.parent / "data" / "bad"
SECONDS = 20.0  # for one input; a hang is what takes longer even on a busy machine


@cache
def folder() -> Path:
    """In memory where there is such a place: thousands of files are written."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=shared if os.access(shared, os.W_OK) else None))


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


# -- what is done with the bytes


def gguf(data: bytes) -> None:
    opened = open_gguf(written("a.gguf", data))
    assert opened.identity
    for info in opened.tensors.values():
        assert isinstance(info, TensorInfo)
        if info.type.is_known:
            assert info.data.nbytes == info.nbytes
            assert info.read(0, 1).nbytes == info.type.row_bytes(info.shape[0])


def safetensors(data: bytes) -> None:
    for tensor in read_safetensors(written("a.safetensors", data)).values():
        assert tensor.data.nbytes == tensor.nbytes


def index(data: bytes) -> None:
    inside = folder() / "index"
    if not inside.exists():
        inside.mkdir()
        (inside / "a.safetensors").write_bytes(safetensors_seed())
    (inside / "model.safetensors.index.json").write_bytes(data)
    for tensor in open_safetensors(inside).values():
        assert tensor.path == inside / "a.safetensors"


def imatrix(data: bytes) -> None:
    found = load(written("a.imatrix", data))
    found.means()
    found.starved()


def recipe(data: bytes) -> None:
    load_recipe(written("a.toml", data))


def rules(data: bytes) -> None:
    parse_rules(from_shell(data.decode("utf-8", "replace")))


def tokenizer(data: bytes) -> None:
    inside = folder() / "tokenizer"
    inside.mkdir(exist_ok=True)
    (inside / "tokenizer.json").write_bytes(data)
    metadata, _ = read_vocabulary(inside, config_of_a_model(), 64)
    header_bytes(metadata, [], 32)


def template(data: bytes) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    ChatTemplate(data.decode("utf-8", "replace")).render(messages)


# -- whole files to begin with


@cache
def config_of_a_model() -> Config:
    return read_config(FOLDER / "demo")


def gguf_seed() -> bytes:
    metadata = {
        "general.architecture": "llama",
        "general.alignment": np.uint32(32),
        "a.flag": True,
        "a.list": ["x", "yy"],
        "a.numbers": np.arange(3, dtype=np.int32),
        "a.float": np.float32(0.5),
    }
    directory = [("a.weight", (32, 4), TYPES["q4_0"]), ("b", (5,), TYPES["f32"]), ("c", (256, 4, 2), TYPES["iq4_k_r4"])]
    header, _, size = header_bytes(metadata, directory, 32)
    return header + bytes(size - len(header))


def safetensors_seed() -> bytes:
    text = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
            "b": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [12, 16]},
        }
    ).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


def imatrix_seed(suffix: str) -> bytes:
    path = folder() / f"seed{suffix}"
    entry = (np.ones((1, 8), np.float32), np.array([512], np.int64))
    save(Imatrix({"blk.0.ffn_up.weight": entry, "output.weight": entry}, ["text"], 3), path)
    return path.read_bytes()


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<0x41>": 3}, "merges": ["a b"], "unk_token": "a"},
    "added_tokens": [{"id": 4, "content": "<s>", "special": True}],
    "pre_tokenizer": {"type": "ByteLevel"},
    "decoder": {"type": "ByteLevel"},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
}
SENTENCEPIECE = TOKENIZER | {"pre_tokenizer": {"type": "Metaspace"}, "decoder": {"type": "Sequence", "decoders": []}}
SCRIPT = 'custom="\n# a\nblk\\.[0-9]+\\.ffn_(up|gate)=q8_0\n.*=Q6_K,^output\\.weight$=f32\n"\n./quantize --custom-q "$custom"\n'
RECIPE = """[source]
model = 'a'
[quantize]
type = 'Q4_K_M'
rules = '''
ffn=q8_0
'''
split_max_size = '5G'
[validate]
text = 'x'
ctx = 8
"""
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'user' %}{{ raise_exception('x') }}{% endif %}"
    "<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}"
    "{% set ns = namespace(a=1) %}{% set ns.a = ns.a * 2 %}{{ ns.a | tojson }}"
)


@dataclass(frozen=True)
class Target:
    run: object
    seeds: tuple[bytes, ...]


def targets() -> dict[str, Target]:
    toml = RECIPE.encode()
    return {
        "gguf": Target(gguf, (gguf_seed(),)),
        "safetensors": Target(safetensors, (safetensors_seed(),)),
        "index": Target(index, (b'{"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}',)),
        "dat": Target(imatrix, (imatrix_seed(".dat"),)),
        "imatrix": Target(imatrix, (imatrix_seed(".imatrix"),)),
        "recipe": Target(recipe, (toml,)),
        "rules": Target(rules, (SCRIPT.encode(), b"a=q8_0,b=iq4_k_r4 # c\n\n(x,y)=f32")),
        "tokenizer": Target(tokenizer, (json.dumps(TOKENIZER).encode(), json.dumps(SENTENCEPIECE).encode())),
        "template": Target(template, (TEMPLATE.encode(),)),
    }


def survive(name: str, data: bytes) -> bool:
    """Whether the target takes the bytes. Raises whatever is not a MillError of one line."""
    began = time.perf_counter()
    try:
        targets_now()[name].run(data)
    except MillError as error:
        said = str(error)
    else:
        said = ""
    assert time.perf_counter() - began < SECONDS
    assert "\n" not in said
    return not said


@cache
def targets_now() -> dict[str, Target]:
    return targets()


NAMES = list(targets_now())


@pytest.mark.parametrize("name", NAMES)
def test_whole_files_are_taken(name):
    assert all(survive(name, seed) for seed in targets_now()[name].seeds)


@st.composite
def damaged(draw, seeds):
    """A whole file with bytes changed, cut out, doubled, or its end lost."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        n = draw(st.integers(1, 9))
        match draw(st.sampled_from(["set", "ones", "cut", "insert", "end"])):
            case "set":
                data[at : at + n] = draw(st.binary(min_size=n, max_size=n))
            case "ones":
                data[at : at + n] = b"\xff" * n
            case "cut":
                del data[at : at + n]
            case "insert":
                data[at:at] = data[at : at + n] * draw(st.integers(1, 40))
            case "end":
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_damage_is_told(name, data):
    seeds = targets_now()[name].seeds
    survive(name, data.draw(st.one_of(damaged(seeds), st.binary(max_size=200))))


@pytest.mark.parametrize("path", sorted(BAD.glob("*.bin")), ids=lambda p: p.stem)
def test_files_that_were_trouble_once(path):
    """NAME of tests/data/bad/NAME-*.bin is the target."""
    tracemalloc.start()
    try:
        survive(path.stem.partition("-")[0], path.read_bytes())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20  # the sandbox's limit is 16 Mi characters
