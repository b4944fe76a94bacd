"""Repacking a GGUF file: the plan of `ggufmill repack`, which interleaves the rows of tensors or undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import TYPES, GGUFFile, PlanError, TensorInfo, TensorType, open_gguf
from ..jobs.outputs import OutputKind, Outputs
from ..jobs.patterns import NamePattern, compile_pattern
from ..jobs.plan import Plan, make_plan
from .interleave import ReadRows, packing_obstacle, repacked_rows

FILE_TYPE = "general.file_type"

# The runtime reads single rows of these.
_NEVER_PACKED = ("token_embd.weight", "per_layer_token_embd.weight")

# general.file_type of the k-quant mixes that is no type's own number in the table of types (`docs/formats/mixes.md`): S, and L
# of Q3_K
_MIXES = {11: "q3_K", 13: "q3_K", 14: "q4_K", 16: "q5_K"}
_MXFP4 = 38  # llama-quantize does not change this one

_Choice = tuple[TensorType, str, str]  # target type, rule, note


def plan_repack(
    path: str | Path | GGUFFile,
    out: str | Path,
    *,
    pattern: str | Sequence[str] | None = None,
    undo: bool = False,
    keep_split: bool = False,
) -> Plan:
    """The plan of a copy of a GGUF model with interleaved tensors or, with `undo`, with plain ones. A split model becomes one
    file, or keeps its split (keep_split).

    By default every tensor of a type that has a repacked form is repacked, except token embeddings, bf16 tensors (bf16_r16
    serves only processors with bf16 instructions), and tensors whose number of rows is no multiple of the group, which the
    output's note says. pattern: one or several regular expressions; only tensors whose name one of them matches anywhere are
    changed, bf16 included. Rules of the outputs: 'repack', 'undo', 'kept'. Raises PlanError when there is nothing to do or a
    pattern is no regular expression, FormatError as `open_gguf`. The rules are those of llama-quantize
    (`docs/formats/interleaved.md`, `docs/formats/mixes.md`).
    """
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    patterns = _compiled(pattern)
    choose = _choose_plain if undo else _choose_packed

    def produce(name: str, kind: OutputKind) -> ReadRows:
        info = file.tensors[name]
        rows = repacked_rows(info.read, info.type, kind.type, info.shape[0])
        assert rows is not None
        return rows

    outputs = Outputs(produce)
    for info in file.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        matches = None if patterns is None else any(p.search(info.name) for p in patterns)
        target, rule, note = choose(info, matches)
        outputs.add(info.name, OutputKind(info.shape, info.type.name, target, rule, note))
    changed = {kind.source_type for kind in outputs.kinds if kind.rule != "kept"}
    if not changed:
        raise PlanError(f"{file.path}: nothing to do: {_why_nothing(outputs, patterns, undo)}")
    numbers = {path: number for number, path in enumerate(file.paths)}
    if keep_split and len(numbers) < 2:
        raise PlanError(f"{file.path} is one file, so there is no split to keep")
    shards = {info.name: numbers[info.path] for info in file.tensors.values()} if keep_split else None
    return make_plan(outputs, _metadata(file.metadata, changed, undo), out, identity=file.identity, shards=shards)


def _compiled(pattern: str | Sequence[str] | None) -> list[NamePattern] | None:
    texts = [pattern] if isinstance(pattern, str) else pattern or ()
    return [compile_pattern(text, "--pattern") for text in texts] or None


def _choose_packed(info: TensorInfo, matches: bool | None) -> _Choice:
    """matches: whether a pattern matches anywhere in the tensor's name; None without patterns."""
    stored = info.type
    if matches is False or stored.rows > 1:
        return stored, "kept", ""
    if stored.packed is None:
        # A note where a change may be expected: for quantised weights, and for f16, of which bf16_r16 would lose digits.
        silent = len(info.shape) < 2 or (stored.block == 1 and not (matches and stored.name == "f16"))
        return stored, "kept", "" if silent else f"no repacked form of {stored.name}"
    if stored.is_float and not matches:
        return stored, "kept", ""
    if info.name in _NEVER_PACKED:
        return stored, "kept", "token embeddings stay plain"
    packed = TYPES[stored.packed]
    obstacle = packing_obstacle(packed, info.shape)
    return (stored, "kept", obstacle) if obstacle else (packed, "repack", "")


def _choose_plain(info: TensorInfo, matches: bool | None) -> _Choice:
    stored = info.type
    if matches is False or stored.rows == 1:
        return stored, "kept", ""
    if stored.base is None:
        return stored, "kept", f"no plain form of {stored.name}"
    return TYPES[stored.base], "undo", ""


def _metadata(metadata: dict[str, Any], changed: set[str], undo: bool) -> dict[str, Any]:
    """The metadata with a new general.file_type if tensors of the type that it names have changed."""
    if FILE_TYPE not in metadata:
        return metadata
    number = int(metadata[FILE_TYPE])
    main = next((t for t in TYPES.values() if t.ftype == number), None) or TYPES.get(_MIXES.get(number, ""))
    target = main and (main.base if undo else main.packed)
    if main is None or target is None or main.name not in changed or number == _MXFP4:
        return metadata
    return {**metadata, FILE_TYPE: np.uint32(TYPES[target].ftype or number)}


def _why_nothing(outputs: Outputs, patterns: list[NamePattern] | None, undo: bool) -> str:
    if patterns is not None and not any(p.search(name) for p in patterns for name in outputs.names):
        return "no tensor's name matches " + " or ".join(repr(p.text) for p in patterns)
    notes = [kind.note for kind in outputs.kinds if kind.note]
    if notes:
        return f"no tensor can be {'unpacked' if undo else 'repacked'} ({notes[0]})"
    if undo:
        return "no tensor is interleaved"
    if patterns is None and any(kind.type.name == "bf16" for kind in outputs.kinds):
        return (
            "bf16 is only repacked when asked for (--pattern), since bf16_r16 serves only processors with bf16 instructions, "
            "and no other tensor has a repacked form"
        )
    return "no tensor has a repacked form"
