"""A checkpoint folder: its config.json and stored tensors, and their assembly into the tensors of a GGUF."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from ..data_classes import dataclass
from ..formats import FormatError, SourceTensor
from ..formats.safetensors import StoredTensor, find_indexes, open_safetensors
from ..formats.source import files_stamp
from ..quantize.tensor_scale import takes_scale
from .architectures.encoders.pooling import read_modules
from .config import Config, read_config
from .draft_layers import with_draft_layers
from .hub.fetch import TOKENIZER_FILES, FetchedRepository
from .model_spec import ModelSpec, TensorSpec
from .quantization.methods import WeightFinder, missing_name
from .quantization.stored_weights import StoredWeight, WeightTensors

# Suffixes of tensors that are not weights of the model: tables that every runtime recomputes, scales of activations and KV
# cache.
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".input_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    stored    tensor name -> stored tensor
    origin    identifies the shards if they are not in the folder but on a server, else ''
    prefetch  to be called with the stored tensors that are going to be read, in order
    """

    folder: Path
    config: Config
    stored: Mapping[str, StoredTensor]
    origin: str = ""
    prefetch: Callable[[list[StoredTensor]], None] | None = None

    @property
    def files(self) -> list[Path]:
        """config.json, the index, the shards in the folder, and the tokenizer's files."""
        tokenizer_files = [path for name in TOKENIZER_FILES if (path := self.folder / name).is_file()]
        shards = [] if self.origin else dict.fromkeys(t.path for t in self.stored.values())
        return [self.config.path, *find_indexes(self.folder), *shards, *tokenizer_files]

    @property
    def identity(self) -> str:
        """Digest of config.json, of every tensor's name, dtype, shape, shard and offset, and of each file's size and
        modification time, which changes with the weights; of a repository that is read remotely the content of small files and
        the hub's hashes of shards, which are the same on every machine. Raises FormatError if a file is gone."""
        digest = hashlib.sha256(self.config.path.read_bytes())
        digest.update(self.origin.encode())
        if self.origin:  # small files of a repository, in a cache: other machines have them with other times
            digest.update(b"".join(path.name.encode() + hashlib.sha256(path.read_bytes()).digest() for path in self.files))
        else:
            digest.update(files_stamp(self.files))
        for t in self.stored.values():
            digest.update(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.path.name}\0{t.offset}\0{t.nbytes}\n".encode("utf-8", "replace"))
        return digest.hexdigest()


def open_checkpoint(fetched: FetchedRepository, *, lossy: bool = False) -> Checkpoint:
    """Reads config.json and the headers of all safetensors files of a folder, or of shards elsewhere; lossy: as for
    `read_config`. Raises FormatError."""
    folder = fetched.folder
    read_config(folder)  # first: a folder without one is not a checkpoint at all
    stored: Mapping[str, StoredTensor] = open_safetensors(folder, fetched.shards)
    for place, *_ in read_modules(folder).dense:
        stored = stored | {f"{place}.{name}": tensor for name, tensor in open_safetensors(folder / place).items()}
    return Checkpoint(folder, read_config(folder, len(stored), lossy=lossy), stored, fetched.origin, fetched.prefetch)


def assemble(
    checkpoint: Checkpoint, model: ModelSpec, mtp: bool | None = None
) -> tuple[ModelSpec, dict[str, SourceTensor], list[str]]:
    """What the GGUF is made from, its tensors in order, and notes on what was left out. No tensor data is read.

    mtp: draft layers that the checkpoint has are kept (None: unless the program that the file is for does not load them)

    Raises FormatError if tensors are missing, have no counterpart in the GGUF, or have another shape, dtype or scale than they
    should; all problems are in one message.
    """
    stored, find_weight = _renamed(checkpoint.stored, model.renamed_prefixes), WeightFinder(checkpoint.config)
    model = with_draft_layers(model, stored, mtp)
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for name in (name for names in model.stored_values.values() for name in names):
        tensor = stored.get(name)
        if tensor is None:
            missing.append(name)
            continue
        used.add(tensor.name)
        if prod(tensor.shape) != 1:
            misshapen.append(f"{name} is {list(tensor.shape)}, not one number")
    for name in model.stored_integers.values():
        if name not in stored:
            missing.append(name)
            continue
        used.add(stored[name].name)
        if len(stored[name].shape) != 1 or stored[name].dtype not in ("I64", "U64"):
            misshapen.append(f"{name} is {stored[name].dtype} {list(stored[name].shape)}, not a list of 64-bit whole numbers")
    assembled: list[tuple[TensorSpec, list[StoredWeight], list[StoredTensor]]] = []
    for spec in model.tensors:
        sources = [_find(find_weight, spec, name, stored) for name in spec.sources]
        alternative = spec.alternative
        while alternative and not (any(sources) and _has_shape(spec, sources)):
            others = [_find(find_weight, alternative, name, stored) for name in alternative.sources]
            if any(others) and (_has_shape(alternative, others) or not any(sources)):
                spec, sources = alternative, others
            alternative = alternative.alternative
        if spec.is_optional and not any(sources):
            continue
        weights, tensors = [], []
        for number, (name, source) in enumerate(zip(spec.sources, sources, strict=True)):
            if source is None:
                missing.append(missing_name(name, stored))
                continue
            weight, weight_tensors = source
            used.update(tensor.name for tensor in weight_tensors)
            tensors += weight_tensors
            shape = spec.source_shape(number)
            if weight.shape == shape:
                weights.append(weight)
            else:
                misshapen.append(f"{name} is {list(weight.shape)}, not {list(shape)}")
        assembled.append((spec, weights, tensors))
    notes, unexpected = _unused(stored, used, model.skipped_prefixes)
    problems = [
        _count(missing, "tensors are missing"),
        _count(unexpected, "tensors are unknown to this architecture"),
        _count(misshapen, "tensors have another shape than config.json says"),
    ]
    if any(problems):
        raise FormatError(f"{checkpoint.folder}: {'; '.join(p for p in problems if p)}")
    if checkpoint.prefetch is not None:
        checkpoint.prefetch([tensor for _, _, tensors in assembled for tensor in tensors])
    return model, {spec.name: _transform(spec, weights, tensors) for spec, weights, tensors in assembled}, notes


def stored_values(checkpoint: Checkpoint, model: ModelSpec) -> dict[str, np.ndarray]:
    """The metadata that tensors contain, which `assemble` has checked: key -> float32 [tensors], of tensors of one number each,
    or uint64."""
    is_needed = model.stored_values or model.stored_integers
    stored = _renamed(checkpoint.stored, model.renamed_prefixes) if is_needed else {}

    def value(name: str) -> float:
        return float(StoredWeight(stored[name]).read(slice(0, 1)).item())

    numbers = {key: np.array([value(name) for name in names], np.float32) for key, names in model.stored_values.items()}
    integers = {key: stored[name].rows(0, stored[name].shape[0]) for key, name in model.stored_integers.items()}
    return numbers | {key: values.astype(np.uint64) for key, values in integers.items()}


def _transform(spec: TensorSpec, weights: list[StoredWeight], tensors: list[StoredTensor]) -> SourceTensor:
    tensor = replace(spec.transform(spec.name, weights), files=tuple(dict.fromkeys(tensor.path for tensor in tensors)))
    if tensor.scale is not None and not takes_scale(spec.name):  # its rows cannot be kept without their factor
        return replace(tensor, raw=None, stored=None, scale=None)
    return tensor


def _has_shape(spec: TensorSpec, sources: list[WeightTensors | None]) -> bool:
    return all(source is None or source[0].shape == spec.source_shape(i) for i, source in enumerate(sources))


def _find(find_weight: WeightFinder, spec: TensorSpec, name: str, stored: Mapping[str, StoredTensor]) -> WeightTensors | None:
    weight = find_weight(name, stored, spec.shape)
    if weight is None and spec.fallback_source:
        return find_weight(spec.fallback_source, stored, spec.shape)
    return weight


def _renamed(stored: Mapping[str, StoredTensor], renamed_prefixes: dict[str, str]) -> Mapping[str, StoredTensor]:
    """The tensors under the names that the ModelSpec uses. Raises FormatError if two then have the same name."""
    if not renamed_prefixes:
        return stored
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        prefix = next((p for p in renamed_prefixes if name.startswith(p)), "")
        new_name = renamed_prefixes.get(prefix, "") + name.removeprefix(prefix)
        if new_name in renamed:
            raise FormatError(f"{tensor.path}: {name} and {renamed[new_name].name} are the same tensor to this architecture")
        renamed[new_name] = tensor
    return renamed


def _unused(
    stored: Mapping[str, StoredTensor], used: set[str], skipped_prefixes: dict[str, str]
) -> tuple[list[str], list[str]]:
    """The tensors that no spec uses -> (notes on those with a skipped prefix, names of the others)."""
    counts = dict.fromkeys(skipped_prefixes, 0)
    prefixes = sorted(skipped_prefixes)  # none is a prefix of another, so only the last one not after a name can match it
    unexpected = []
    for name, tensor in stored.items():
        if tensor.name in used or 0 in tensor.shape or name.endswith(IGNORED_SUFFIXES) or _is_zero_bias(name, stored):
            continue
        rank = bisect_right(prefixes, name)
        if rank and name.startswith(prefixes[rank - 1]):
            counts[prefixes[rank - 1]] += 1
        else:
            unexpected.append(name)
    notes = []
    for what in dict.fromkeys(skipped_prefixes.values()):
        found = {p: n for p, n in counts.items() if n and skipped_prefixes[p] == what}
        n = sum(found.values())
        if n:
            notes.append(f"{what}: {n} tensor{'s' * (n > 1)} left out ({', '.join(f'{p}*' for p in found)})")
    return notes, unexpected


def _is_zero_bias(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether this is a bias of zeros: some tools write one for every layer, whether the model has biases or not."""
    stem = name.removesuffix("bias")
    has_weight = f"{stem}weight" in stored or f"{stem}qweight" in stored
    return name.endswith(".bias") and has_weight and not stored[name].data.any()


def _count(names: list[str], problem: str) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} {problem}: {shown}{more}" if names else ""
