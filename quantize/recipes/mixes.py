"""Stock mixes: which type each tensor gets when llama-quantize is asked for a file type such as Q4_K_M or IQ2_K.

A file type names a default type and, in mix_tables.py, a set of exceptions by role (spec, section E.3).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...formats import TYPES, PlanError, TensorType
from .mix_tables import ALIASES, DEFAULTS, FILE_TYPES, HEAD, LOOKUP, NO_FILE_TYPE, SECTIONS, Role

# architecture -> (layers -> size class) where the reference tells models of 8 and 70 billion weights apart by their layers.
_SIZES: dict[str, dict[int, str]] = {
    "llama": {32: "8B", 36: "8B", 80: "70B"},
    "deci": {80: "70B"},
    "qwen2": {80: "70B"},
    "qwen3": {36: "8B"},
    "qwen3vl": {36: "8B"},
    "olmo": {80: "70B"},
    "cohere2": {32: "8B"},
    "mistral3": {34: "8B"},
}


@dataclass(frozen=True)
class Row:
    """A line of a role's table: for these file types (empty: any), if all conditions hold, this type (old -> new; {}: kept)."""

    file_types: frozenset[str]
    conditions: tuple[str, ...]
    types: Mapping[str, str]


@cache
def _rows(table: str) -> tuple[Row, ...]:
    rows = []
    for line in filter(str.strip, table.splitlines()):
        names, when, types = (part.strip() for part in line.split("|"))
        kinds = frozenset() if names == "*" else frozenset(names.split())
        conditions = tuple(filter(None, (part.strip() for part in when.split("&"))))
        changes = dict(pair.split(">") for pair in types.split()) if ">" in types else {"": types}
        rows.append(Row(kinds, conditions, {} if types == "=" else changes))
    return tuple(rows)


@dataclass(frozen=True)
class Model:
    """What the conditions ask about a model. size: '8B', '70B' or ''; n_attn_v: tensors with values of attention."""

    architecture: str
    n_layer: int
    gqa: int
    experts: int
    tied: bool
    imatrix: bool
    n_vocab: int
    size: str
    n_attn_v: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any], names: Iterable[str], n_vocab: int, imatrix: bool) -> Model:
        """From GGUF metadata, the names of all tensors, and the rows of token_embd.weight."""
        architecture, names = str(metadata.get("general.architecture", "")), set(names)

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
                value = value[0] if len(value) else default  # per layer: the reference looks at the first
            return int(value)

        heads, layers = number("attention.head_count"), number("block_count")
        kv = number("attention.head_count_kv", heads)
        size = _SIZES.get(architecture, {}).get(layers, "")
        n_embd = number("embedding_length")
        told = {
            ("llama", 32): n_vocab >= 40000 and n_vocab != 49152,
            ("llama", 80): heads != kv,
            ("qwen3", 36): n_embd != 2560,
            ("qwen3vl", 36): n_embd != 2560,
        }
        return cls(
            architecture,
            layers,
            heads // kv if kv else 0,
            number("expert_count"),
            "output.weight" not in names,
            imatrix,
            n_vocab,
            size if told.get((architecture, layers), True) else "",
            sum("attn_v.weight" in name or "attn_qkv.weight" in name for name in names),
        )


@dataclass
class Layer:
    """Where a tensor stands: the how-manieth of how many, and by plain counting."""

    index: int = 0
    count: int = 1
    counted: int = 0


def _more(i: int, n: int) -> bool:
    """The first and last eighth of the layers, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_CONDITIONS: dict[str, Callable[[Model, Layer, int], bool]] = {
    "falcon": lambda m, at, columns: m.architecture == "falcon",
    "not falcon": lambda m, at, columns: m.architecture != "falcon",
    "odd columns": lambda m, at, columns: columns % 256 != 0,
    "tied": lambda m, at, columns: m.tied,
    "imatrix": lambda m, at, columns: m.imatrix,
    "no imatrix": lambda m, at, columns: not m.imatrix,
    "experts>=2": lambda m, at, columns: m.experts >= 2,
    "experts>=4": lambda m, at, columns: m.experts >= 4,
    "experts>=8": lambda m, at, columns: m.experts >= 8,
    "gqa>=2": lambda m, at, columns: m.gqa >= 2,
    "gqa>=4": lambda m, at, columns: m.gqa >= 4,
    "70B": lambda m, at, columns: m.size == "70B",
    "big": lambda m, at, columns: m.size != "" and m.n_vocab >= 127999,
    "first 2": lambda m, at, columns: at.counted < 2,
    "first 4": lambda m, at, columns: at.counted < 4,
    "earliest": lambda m, at, columns: at.index < at.count // 16,
    "early": lambda m, at, columns: at.index < at.count // 8,
    "counted early": lambda m, at, columns: at.counted < at.count // 8,
    "middle": lambda m, at, columns: at.count // 8 <= at.index < 7 * at.count // 8,
    "more": lambda m, at, columns: _more(at.index, at.count),
}


@dataclass
class Mix:
    """A file type applied to one model. `choose` has to be asked about all quantisable tensors, in the file's order, once."""

    file_type: str
    model: Model
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def default(self) -> TensorType:
        return default_type(self.file_type)

    def choose(self, name: str, columns: int) -> TensorType:
        """The type for a tensor of this row length, before rules, flags and fallbacks."""
        if name == "output.weight" or (self.model.tied and name == "token_embd.weight"):
            return self._apply(HEAD, Layer(), columns)
        if name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return self._apply(LOOKUP, Layer(), columns)
        section = next(s for s in SECTIONS if not s.file_types or self.file_type in s.file_types.split())
        for role in section.roles:
            if any(part in name for part in role.parts) and self._holds(role.when, Layer(), columns):
                return self._apply(role, self._layer(role, name), columns)
        return self.default

    def _layer(self, role: Role, name: str) -> Layer:
        """Experts' tensors need not come in the order of layers: with experts the layer is read from the name."""
        if not role.counter:
            return Layer()
        counted = self._counts[role.counter]
        self._counts[role.counter] += 1
        if role.counter == "attn_v":
            return Layer(counted, self.model.n_attn_v, counted)
        block = re.match(r"blk\.(\d+)\.", name)
        index = int(block[1]) if self.model.experts > 1 and block else counted
        return Layer(index, self.model.n_layer, counted)

    def _holds(self, condition: str, at: Layer, columns: int) -> bool:
        return not condition or _CONDITIONS[condition](self.model, at, columns)

    def _apply(self, role: Role, at: Layer, columns: int) -> TensorType:
        default = self.default
        for row in _rows(role.rows):
            if row.file_types and self.file_type not in row.file_types:
                continue
            if all(self._holds(condition, at, columns) for condition in row.conditions):
                return TYPES[row.types.get("", row.types.get(default.name, default.name))]
        return default


@cache
def file_types() -> dict[str, str]:
    """Every file type -> its default type, in the order of the type table, as llama-quantize spells them."""
    own = {t.name.upper(): t.name for t in map(TYPES.__getitem__, TYPES) if t.ftype is not None and t.name not in NO_FILE_TYPE}
    return {name: kind for name, kind in own.items() if name not in ALIASES} | DEFAULTS


def file_type_name(name: str) -> str | None:
    """'q4_k' -> 'Q4_K_M', 'iq4_k' -> 'IQ4_K'; None for what is no file type."""
    upper = ALIASES.get(name.upper(), name.upper())
    return next((known for known in file_types() if known.upper() == upper), None)


def default_type(file_type: str) -> TensorType:
    """Raises PlanError for an unknown file type."""
    try:
        return TYPES[file_types()[file_type]]
    except KeyError:
        raise PlanError(f"there is no file type {file_type!r}") from None


def file_type_id(file_type: str) -> int:
    """What general.file_type says."""
    own = default_type(file_type).ftype
    return FILE_TYPES.get(file_type, own if own is not None else 0)
