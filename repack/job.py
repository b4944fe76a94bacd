"""Repacking a whole GGUF file: the plan of `ggufmill repack`, interleaving tensors or taking it back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import TYPES, GGUFFile, PlanError, TensorInfo, TensorType, open_gguf
from ..jobs.plan import Output, Plan, make_plan
from .interleave import obstacle
from .rows import moved_rows

FILE_TYPE = "general.file_type"

# Looked up row by row: the runtime takes single rows out of them.
_STAY_PLAIN = ("token_embd.weight", "per_layer_token_embd.weight")

# general.file_type of the K-quant mixes that are no type's own number in the type table (FORMATS E.7): S, and L of Q3_K
_MIXES = {11: "q3_K", 13: "q3_K", 14: "q4_K", 16: "q5_K"}
_MXFP4 = 38  # llama-quantize leaves this one as it is

Chosen = tuple[TensorType, str, str]  # target type, rule, note


def plan_repack(
    path: str | Path | GGUFFile,
    out: str | Path,
    *,
    pattern: str | Sequence[str] | None = None,
    undo: bool = False,
    keep_split: bool = False,
) -> Plan:
    """The plan of a copy of a GGUF model with interleaved tensors, or with plain ones (undo). A split one becomes one file,
    or stays in as many (keep_split).

    By default every tensor with a packed twin is repacked, except the token embeddings, bf16 tensors (bf16_r16 serves only
    processors with bf16 instructions), and tensors whose rows are no whole groups, which the output's note tells. pattern: one
    or several regular expressions; only tensors in whose name one of them is found change, bf16 included. Rules of the outputs:
    'repack', 'undo', 'kept'. Raises PlanError when there is nothing to do or a pattern is no regular expression, FormatError as
    `open_gguf`. Source: FORMATS C.5, E.7.
    """
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    searches = _compiled(pattern)
    choose = _to_plain if undo else _to_packed
    outputs = []
    for info in file.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        wanted = None if searches is None else any(s.search(info.name) for s in searches)
        target, rule, note = choose(info, wanted)
        produce = moved_rows(info.read, info.type, target, info.shape[0])
        assert produce is not None
        outputs.append(Output(info.name, info.shape, info.type.name, target, rule, produce, note))
    changed = {o.source_type for o in outputs if o.rule != "kept"}
    if not changed:
        raise PlanError(f"{file.path}: nothing to do: {_why_nothing(outputs, searches, undo)}")
    numbers = {path: number for number, path in enumerate(file.paths)}
    if keep_split and len(numbers) < 2:
        raise PlanError(f"{file.path} is one file, so there is no split to keep")
    shards = {info.name: numbers[info.path] for info in file.tensors.values()} if keep_split else None
    return make_plan(outputs, _metadata(file.metadata, changed, undo), out, identity=file.identity, shards=shards)


def _compiled(pattern: str | Sequence[str] | None) -> list[re.Pattern[str]] | None:
    searches = []
    for text in [pattern] if isinstance(pattern, str) else pattern or ():
        try:
            searches.append(re.compile(text))
        except re.error as error:
            raise PlanError(f"{text!r} is no regular expression: {error}") from None
    return searches or None


def _to_packed(info: TensorInfo, wanted: bool | None) -> Chosen:
    """wanted: whether a pattern asks for this tensor; None without patterns."""
    kind = info.type
    if wanted is False or kind.rows > 1:
        return kind, "kept", ""
    if kind.packed is None:
        # Worth saying where someone expects a change: of quantised weights, and of f16, for which bf16_r16 would lose digits.
        quiet = len(info.shape) < 2 or (kind.block == 1 and not (wanted and kind.name == "f16"))
        return kind, "kept", "" if quiet else f"no repacked form of {kind.name}"
    if kind.is_float and not wanted:
        return kind, "kept", ""
    if info.name in _STAY_PLAIN:
        return kind, "kept", "token embeddings stay plain"
    packed = TYPES[kind.packed]
    reason = obstacle(packed, info.shape)
    return (kind, "kept", reason) if reason else (packed, "repack", "")


def _to_plain(info: TensorInfo, wanted: bool | None) -> Chosen:
    kind = info.type
    if wanted is False or kind.rows == 1:
        return kind, "kept", ""
    if kind.base is None:
        return kind, "kept", f"no plain form of {kind.name}"
    return TYPES[kind.base], "undo", ""


def _metadata(metadata: dict[str, Any], changed: set[str], undo: bool) -> dict[str, Any]:
    """The metadata with general.file_type following the tensors, if tensors of that very type changed."""
    if FILE_TYPE not in metadata:
        return metadata
    number = int(metadata[FILE_TYPE])
    main = next((t for t in TYPES.values() if t.ftype == number), None) or TYPES.get(_MIXES.get(number, ""))
    twin = main and (main.base if undo else main.packed)
    if main is None or twin is None or main.name not in changed or number == _MXFP4:
        return metadata
    return {**metadata, FILE_TYPE: np.uint32(TYPES[twin].ftype or number)}


def _why_nothing(outputs: list[Output], searches: list[re.Pattern[str]] | None, undo: bool) -> str:
    if searches is not None and not any(s.search(o.name) for s in searches for o in outputs):
        return "no tensor's name matches " + " or ".join(repr(s.pattern) for s in searches)
    notes = [o.note for o in outputs if o.note]
    if notes:
        return f"no tensor can be {'turned back' if undo else 'repacked'} ({notes[0]})"
    if undo:
        return "no tensor is interleaved"
    if searches is None and any(o.type.name == "bf16" for o in outputs):
        return (
            "bf16 is only repacked when asked for (--pattern), since bf16_r16 serves only processors with bf16 instructions, "
            "and no other tensor has a repacked form"
        )
    return "no tensor has a repacked form"
