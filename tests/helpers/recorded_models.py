"""What transformers computes with tiny random models, recorded: a record serves every test of its case, and needs no torch.

A record has config.json, the names and shapes of the checkpoint's tensors, the token ids and the logits. The weights are drawn
by name, so that it need not have them. transformers makes it when it is first wanted; it stays in build/models/CASE-DIGEST.npz,
named by what it was made from. Records of some cases, which have every op and variant between them, are in tests/data/models,
with a few columns of the logits:

    python tests/helpers/recorded_models.py      chooses these cases and writes their records again (needs transformers)
"""

import copy
import functools
import hashlib
import json
import math
import os
import sys
import tempfile
import zlib
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from model_cases import CASES
from model_cases.common import COMMON, VISION
from safetensors.numpy import load_file, save_file

from ggufmill.convert import open_source
from ggufmill.runtime.models.architectures import build_graph
from ggufmill.runtime.models.recurrent.variants import RECURRENT_VARIANTS
from ggufmill.runtime.models.variants import VARIANTS

TESTS = Path(__file__).parents[1]
KEPT, MADE = TESTS / "data" / "models", TESTS.parent / "build" / "models"
LENGTH = 90  # tokens: several times the windows of WINDOW
LATENT = ("v3", "v3-legacy", "v2-lite", "deepseek32", "longcat-flash", "kimi-linear")  # with -mla
ALWAYS = ("llama", "v3", "llama-llama3", "v2-lite")  # other tests begin with these
KEPT_COLUMNS = slice(None, None, 12)
SCALARS = ("inv_freq", "embed_scale", "mup_vector", "_input_scale", "projection_scale")  # what the config says, not weights


@dataclass(frozen=True)
class Record:
    """config: config.json; table: name -> (shape, mean) of the tensors to draw; values: the others; logits: float32
    [LENGTH, columns], those of all tokens of the vocabulary or of KEPT_COLUMNS."""

    config: str
    table: dict
    values: dict
    tokens: np.ndarray
    logits: np.ndarray

    def difference(self, found, at=slice(None)):
        """The largest one of logits [..., vocabulary] from those at these positions."""
        columns = slice(None) if self.logits.shape[1] == COMMON["vocab_size"] else KEPT_COLUMNS
        return np.abs(found[..., columns] - self.logits[at]).max()

    def tensors(self):
        return {name: draw(name, shape, mean) for name, (shape, mean) in self.table.items()} | self.values

    def write(self, folder):
        """The checkpoint, with the smallest vocabulary there is."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vocab.txt").write_text("[UNK]\n")
        (folder / "config.json").write_text(self.config)
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def oracle():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)  # products this small gain nothing from more
    torch.manual_seed(1)  # of what `randomise` keeps of a new model, such as the mean of its sinks
    return torch, transformers


def new_config(transformers, family, options):
    """(class, config) of a row of CASES: a class of transformers, without ForCausalLM where it ends so, or a multimodal class,
    for which the options are those of the text model."""
    options = copy.deepcopy(options)  # configs change their rotary settings
    if not family.endswith("ForConditionalGeneration"):
        architecture = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, family)
        return architecture, architecture.config_class(**options, attn_implementation="eager")
    architecture = getattr(transformers, family)
    values = {"text_config": options, "vision_config": VISION, "tie_word_embeddings": options["tie_word_embeddings"]}
    return architecture, architecture.config_class(**values, attn_implementation="eager")


def draw(name, shape, mean):
    """float32 weights of a size that makes logits of order 1, so that a tolerance means something; norms and biases differ."""
    noise = np.asarray(np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32))
    if "bias" in name:
        return np.float32(0.2) * noise
    if len(shape) <= 1:
        return np.asarray(np.float32(mean) + np.float32(0.2) * noise)  # around 1, or 0 where 1 + weight is what counts
    return noise / np.float32(math.sqrt(shape[-1]))


def record_of(case, changes=None):
    """changes: of the case's config. Skips the test where there is neither a record nor transformers to make it."""
    kept = KEPT / f"{case}.npz"
    if find_spec("transformers") is None and not changes and kept.is_file():
        return _load(kept)
    torch, transformers = oracle()
    made_from = (_sources(), COMMON, CASES[case], changes, torch.__version__, transformers.__version__)
    path = MADE / f"{case}-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}.npz"
    if not path.is_file():
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # whatever the test that asks first computes in
        try:
            _save(path, _make(case, changes or {}))
        finally:
            torch.set_default_dtype(dtype)
    return _load(path)


def layout_of(case):
    """Of latent attention, that the case is converted to."""
    return CASES[case][2] if len(CASES[case]) > 2 else "ik"


@functools.cache
def _sources():
    return Path(__file__).read_text("utf-8")


def _make(case, changes):
    torch, transformers = oracle()
    family, options, *_ = CASES[case]
    architecture, config = new_config(transformers, family, COMMON | options | changes)
    tokens = np.random.default_rng(3).integers(3, COMMON["vocab_size"], LENGTH)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        architecture(config).save_pretrained(folder)
        table, values = {}, {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name.endswith("tid2eid"):  # the experts of each token: any, but none twice
                order = np.random.default_rng(1).random((len(tensor), config.n_routed_experts)).argsort(axis=1)
                values[name] = order[:, : tensor.shape[1]].astype(tensor.dtype)
            elif tensor.dtype.kind != "f" or any(part in name for part in SCALARS):
                values[name] = tensor
            else:
                table[name] = [list(tensor.shape), float(tensor.mean()) if tensor.ndim <= 1 and tensor.size else 0.0]
        record = Record((folder / "config.json").read_text(), table, values, tokens, np.empty(0))
        record.write(folder)
        model = architecture.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None])).logits[0].numpy()
    return Record(record.config, table, values, tokens, logits)


def _save(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {f"value {name}": tensor for name, tensor in record.values.items()}
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.npz")  # of this process: others may make the same record now
    np.savez_compressed(
        unfinished, config=record.config, table=json.dumps(record.table), tokens=record.tokens, logits=record.logits, **values
    )
    unfinished.replace(path)


def _load(path):
    with np.load(path) as data:
        values = {name.removeprefix("value "): data[name] for name in data if name.startswith("value ")}
        return Record(str(data["config"]), json.loads(str(data["table"])), values, data["tokens"], data["logits"])


# --- which records are kept -----------------------------------------------------------------------------------------


def features(case):
    """What a case has of ops, of the fields of ops, and of those of the variants of architectures."""
    with tempfile.TemporaryDirectory() as folder:
        record_of(case).write(Path(folder))
        graph = build_graph(open_source(folder, mla_layout=layout_of(case)))
    found = {
        (type(op).__name__, field.name, _kind(getattr(op, field.name)))
        for op in (*graph.ops, *graph.head)
        for field in fields(op)
    }
    variant = {**VARIANTS, **RECURRENT_VARIANTS}.get(graph.architecture)
    if variant is not None:
        default = type(variant)()
        found |= {
            ("variant", field.name, str(getattr(value, "__name__", value)))
            for field in fields(variant)
            if (value := getattr(variant, field.name)) != getattr(default, field.name)
        }
    return found


def _kind(value):
    """Words and switches by their values, numbers by whether they are 0, other operands by whether they are there."""
    if value is None or isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int | float):
        return str(value != 0)
    return type(value).__name__ if is_dataclass(value) else "given"


def covering_cases():
    """The fewest cases, chosen greedily, that have with ALWAYS what all cases have."""
    left = {case: features(case) for case in CASES}
    chosen = []
    while any(left.values()):
        chosen.append(ALWAYS[len(chosen)] if len(chosen) < len(ALWAYS) else max(left, key=lambda case: len(left[case])))
        done = left[chosen[-1]]
        left = {case: have - done for case, have in left.items()}
    return chosen


def kept_cases():
    return sorted(path.stem for path in KEPT.glob("*.npz"))


def kept_or_oracle(cases):
    """Cases as parameters of a test; those without a kept record need the oracles."""
    kept = kept_cases()
    return [pytest.param(case, marks=() if case in kept else pytest.mark.oracle) for case in cases]


def main():
    for path in KEPT.glob("*.npz"):
        path.unlink()
    for case in covering_cases():
        record = record_of(case)
        kept = Record(record.config, record.table, record.values, record.tokens, record.logits[:, KEPT_COLUMNS])
        _save(KEPT / f"{case}.npz", kept)


if __name__ == "__main__":
    sys.exit(main())
