"""A checkpoint folder: its config and stored tensors, and their assembly into the tensors of a GGUF."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..formats import FormatError, SourceTensor
from ..formats.safetensors import ShardOpener, StoredTensor, find_indexes, open_safetensors
from ..formats.source import files_stamp
from .config import Config, read_config
from .quantization.methods import Finders, missing
from .quantization.stored_weights import Found, Weight
from .tensor_transforms import Edit, plain

# Ends of names that hold nothing of the model: tables computed again by every runtime, scales of activations and KV cache.
IGNORED = (
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
# Beside config.json and the weights; a checkpoint may have any of them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "vocab.txt",
    "hf_quant_config.json",
)


@dataclass(frozen=True)
class Wanted:
    """A tensor of the GGUF to come.

    sources  names in the checkpoint that it is made of; none for a computed tensor
    shape    that each of the sources has to have, outermost first
    edit     makes it from them
    or_else  the name to take where the one source is absent: tied embeddings may be stored under either name
    instead  the same tensor from other sources, where none of these is stored: experts one by one or in a stack
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    edit: Edit = plain
    or_else: str | None = None
    instead: Wanted | None = None


@dataclass(frozen=True)
class Description:
    """What an architecture's module says of a checkpoint.

    left_out  beginning of names that have no place in the GGUF -> what they are, for people to read
    renamed   beginning of names -> what to read it as, before all else: text models inside of multi-modal ones
    """

    architecture: str
    metadata: dict[str, Any]
    wanted: list[Wanted]
    n_vocab: int
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """origin: what identifies the shards where they are not in the folder but elsewhere, else ''. expect: told which stored
    tensors are going to be read, in order."""

    folder: Path
    config: Config
    stored: Mapping[str, StoredTensor]
    origin: str = ""
    expect: Callable[[list[StoredTensor]], None] | None = None

    @property
    def files(self) -> list[Path]:
        """config.json, the index, the shards, and what there is of a tokenizer."""
        beside = [path for name in TOKENIZER_FILES if (path := self.folder / name).is_file()]
        shards = [] if self.origin else dict.fromkeys(t.path for t in self.stored.values())
        return [self.config.path, *find_indexes(self.folder), *shards, *beside]

    @property
    def identity(self) -> str:
        """Digest of config.json, of every tensor's name, type, shape, shard and place, and of each file's size and time of
        change, by which other weights of the same shapes are noticed. Raises FormatError if a file is gone."""
        digest = hashlib.sha256(self.config.path.read_bytes())
        digest.update(self.origin.encode())
        digest.update(files_stamp(self.files))
        for t in self.stored.values():
            digest.update(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.path.name}\0{t.offset}\0{t.nbytes}\n".encode("utf-8", "replace"))
        return digest.hexdigest()


def open_checkpoint(
    folder: Path,
    shards: Mapping[str, ShardOpener] | None = None,
    origin: str = "",
    expect: Callable[[list[StoredTensor]], None] | None = None,
) -> Checkpoint:
    """config.json and the headers of all safetensors files of a folder, or of shards elsewhere. Raises FormatError."""
    read_config(folder)  # first, since a folder without one is no checkpoint at all
    stored = open_safetensors(folder, shards)
    return Checkpoint(folder, read_config(folder, len(stored)), stored, origin, expect)


def assemble(checkpoint: Checkpoint, description: Description) -> tuple[dict[str, SourceTensor], list[str]]:
    """The tensors of the GGUF in order, and notes on what was left out.

    No tensor data is read. Raises FormatError if a tensor is missing, is there but has no place in the GGUF, or has another
    shape, type or scale than it should: named, with how many others there are.
    """
    stored, find = _renamed(checkpoint.stored, description.renamed), Finders(checkpoint.config)
    absent: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    ready: list[tuple[Wanted, list[Weight], list[StoredTensor]]] = []
    for wanted in description.wanted:
        found = [_find(find, wanted, name, stored) for name in wanted.sources]
        if wanted.instead and not any(found):
            others = [_find(find, wanted.instead, name, stored) for name in wanted.instead.sources]
            if any(others):
                wanted, found = wanted.instead, others
        weights, parts = [], []
        for name, entry in zip(wanted.sources, found, strict=True):
            if entry is None:
                absent.append(missing(name, stored))
                continue
            weight, tensors = entry
            used.update(tensor.name for tensor in tensors)
            parts += tensors
            if weight.shape == wanted.shape:
                weights.append(weight)
            else:
                misshapen.append(f"{name} is {list(weight.shape)}, not {list(wanted.shape)}")
        ready.append((wanted, weights, parts))
    left_out, unexpected = _rest(stored, used, description.left_out)
    problems = [
        _count(absent, "tensors are missing"),
        _count(unexpected, "tensors are unknown to this architecture"),
        _count(misshapen, "tensors have another shape than config.json says"),
    ]
    if any(problems):
        raise FormatError(f"{checkpoint.folder}: {'; '.join(p for p in problems if p)}")
    if checkpoint.expect is not None:
        checkpoint.expect([part for _, _, parts in ready for part in parts])
    return {wanted.name: _made(wanted, weights, parts) for wanted, weights, parts in ready}, left_out


def _made(wanted: Wanted, weights: list[Weight], parts: list[StoredTensor]) -> SourceTensor:
    return replace(wanted.edit(wanted.name, weights), files=tuple(dict.fromkeys(part.path for part in parts)))


def _find(find: Finders, wanted: Wanted, name: str, stored: Mapping[str, StoredTensor]) -> Found | None:
    found = find(name, stored, wanted.shape)
    return find(wanted.or_else, stored, wanted.shape) if found is None and wanted.or_else else found


def _renamed(stored: Mapping[str, StoredTensor], renamed: dict[str, str]) -> Mapping[str, StoredTensor]:
    """The same by the names that the description has. Raises FormatError if two tensors then have one name."""
    if not renamed:
        return stored
    out: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        beginning = next((b for b in renamed if name.startswith(b)), "")
        own = renamed.get(beginning, "") + name.removeprefix(beginning)
        if own in out:
            raise FormatError(f"{tensor.path}: {name} and {out[own].name} are the same tensor to this architecture")
        out[own] = tensor
    return out


def _rest(stored: Mapping[str, StoredTensor], used: set[str], left_out: dict[str, str]) -> tuple[list[str], list[str]]:
    """(notes on tensors left out, names of tensors that nobody knows)."""
    counts = dict.fromkeys(left_out, 0)
    beginnings = sorted(left_out)  # none is the beginning of another, so a name's own is the last that is not after it
    unexpected = []
    for name, tensor in stored.items():
        if tensor.name in used or name.endswith(IGNORED) or _is_no_bias(name, stored):
            continue
        at = bisect_right(beginnings, name)
        if at and name.startswith(beginnings[at - 1]):
            counts[beginnings[at - 1]] += 1
        else:
            unexpected.append(name)
    notes = [f"{left_out[b]}: {n} tensor{'s' * (n > 1)} left out ({b}*)" for b, n in counts.items() if n]
    return notes, unexpected


def _is_no_bias(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a bias is nothing but zeros: some GPTQ tools write one for every layer, whether the model has it or not."""
    stem = name.removesuffix("bias")
    return name.endswith(".bias") and f"{stem}qweight" in stored and not stored[name].data.any()


def _count(names: list[str], problem: str) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} {problem}: {shown}{more}" if names else ""
