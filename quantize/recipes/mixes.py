"""Stock mixes: the type that each tensor gets when llama-quantize is asked for a file type such as Q4_K_M or IQ2_K.

A file type has a default type and, in mix_tables.py, exceptions by role (docs/formats/mixes.md).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from ...data_classes import dataclass
from ...formats import TYPES, PlanError, TensorType
from ...formats.metadata_values import whole_number
from ...formats.source import form_of
from .mix_tables import (
    ALIASES,
    DEFAULT_TYPES,
    EMBEDDING_ROLE,
    FILE_TYPE_IDS,
    OUTPUT_ROLE,
    SECTIONS,
    WITHOUT_FILE_TYPE,
    Role,
)

_FIRST_LAYER = "blk.0."  # the only number in the names' parts of mix_tables
# architecture -> {number of layers: size class}: llama.cpp recognises models of 8B and 70B by their number of layers.
_SIZE_CLASSES: dict[str, dict[int, str]] = {
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
class TableRow:
    """A row of a role's table: for these file types (empty: any), if all conditions hold, old type -> new type.

    types: {'': t} gives t whatever the default type is, {} leaves the default type.
    """

    file_types: frozenset[str]
    conditions: tuple[str, ...]
    types: Mapping[str, str]


@cache
def _rows(table: str, file_type: str) -> tuple[TableRow, ...]:
    """The rows of a table that concern a file type."""
    return tuple(row for row in _parse_table(table) if not row.file_types or file_type in row.file_types)


@cache
def _parse_table(table: str) -> tuple[TableRow, ...]:
    rows = []
    for line in filter(str.strip, table.splitlines()):
        names, conditions, types = (part.strip() for part in line.split("|"))
        file_types = frozenset() if names == "*" else frozenset(names.split())
        required = tuple(filter(None, (part.strip() for part in conditions.split("&"))))
        replacements = dict(pair.split(">") for pair in types.split()) if ">" in types else {"": types}
        rows.append(TableRow(file_types, required, {} if types == "=" else replacements))
    return tuple(rows)


@dataclass(frozen=True)
class ModelTraits:
    """What the conditions ask about a model.

    gqa       query heads per key-value head
    experts   experts per layer, 0 for a dense model
    tied      the embeddings serve as output matrix too
    imatrix   whether importance is given
    size      size class '8B' or '70B', '' for any other
    n_attn_v  number of tensors that hold attention values
    """

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
    def of(cls, metadata: Mapping[str, Any], names: Iterable[str], n_vocab: int, imatrix: bool) -> ModelTraits:
        """From GGUF metadata, the names of all tensors, and the number of rows of token_embd.weight. Raises FormatError for
        metadata with something else in the place of a number."""
        architecture, names = str(metadata.get("general.architecture", "")), set(names)

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
                value = value[0] if len(value) else default  # one value per layer: llama.cpp takes the first
            return whole_number({key: value}, key)

        heads, layers = number("attention.head_count"), number("block_count")
        kv_heads = number("attention.head_count_kv", heads)
        n_embd = number("embedding_length")
        # Further tests that a model with this many layers has to pass to be of the size class.
        in_size_class = {
            ("llama", 32): n_vocab >= 40000 and n_vocab != 49152,
            ("llama", 80): heads != kv_heads,
            ("qwen3", 36): n_embd != 2560,
            ("qwen3vl", 36): n_embd != 2560,
        }
        size = _SIZE_CLASSES.get(architecture, {}).get(layers, "")
        return cls(
            architecture,
            layers,
            heads // kv_heads if kv_heads else 0,
            number("expert_count"),
            "output.weight" not in names,
            imatrix,
            n_vocab,
            size if in_size_class.get((architecture, layers), True) else "",
            sum("attn_v.weight" in name or "attn_qkv.weight" in name for name in names),
        )


@dataclass(frozen=True)
class LayerPosition:
    """Where a tensor stands among those of its role: `index` out of `count` layers; `seen`: tensors of the role before it."""

    index: int = 0
    count: int = 1
    seen: int = 0


_ONE = LayerPosition()  # of a tensor that is alone in its role, or whose place does not matter


def _use_more_bits(i: int, n: int) -> bool:
    """llama.cpp's use_more_bits: the first and the last eighth of the layers, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_CONDITIONS: dict[str, Callable[[ModelTraits, LayerPosition, int], bool]] = {
    "falcon": lambda m, at, columns: m.architecture == "falcon",
    "not falcon": lambda m, at, columns: m.architecture != "falcon",
    "columns % 256": lambda m, at, columns: columns % 256 != 0,
    "tied": lambda m, at, columns: m.tied,
    "imatrix": lambda m, at, columns: m.imatrix,
    "no imatrix": lambda m, at, columns: not m.imatrix,
    "experts>=2": lambda m, at, columns: m.experts >= 2,
    "experts>=4": lambda m, at, columns: m.experts >= 4,
    "experts>=8": lambda m, at, columns: m.experts >= 8,
    "gqa>=2": lambda m, at, columns: m.gqa >= 2,
    "gqa>=4": lambda m, at, columns: m.gqa >= 4,
    "70B": lambda m, at, columns: m.size == "70B",
    "large vocab": lambda m, at, columns: m.size != "" and m.n_vocab >= 127999,
    "first 2": lambda m, at, columns: at.seen < 2,
    "first 4": lambda m, at, columns: at.seen < 4,
    "first 1/16": lambda m, at, columns: at.index < at.count // 16,
    "first 1/8": lambda m, at, columns: at.index < at.count // 8,
    "first 1/8 by count": lambda m, at, columns: at.seen < at.count // 8,
    "middle 3/4": lambda m, at, columns: at.count // 8 <= at.index < 7 * at.count // 8,
    "more bits": lambda m, at, columns: _use_more_bits(at.index, at.count),
}

_OF_PLACE = {"first 2", "first 4", "first 1/16", "first 1/8", "first 1/8 by count", "middle 3/4", "more bits"}

# A condition -> what it says, after the role: "attn_v (8 experts or more)".
_WORDS = {
    "falcon": "Falcon",
    "not falcon": "",
    "columns % 256": "rows that are no multiple of 256 long",
    "tied": "the embeddings serve as output",
    "imatrix": "with an imatrix",
    "no imatrix": "without an imatrix",
    **{f"experts>={n}": f"{n} experts or more" for n in (2, 4, 8)},
    **{f"gqa>={n}": f"{n} query heads or more per key-value head" for n in (2, 4)},
    "70B": "a model of 70B",
    "large vocab": "a large vocabulary",
    "first 2": "the first 2 layers",
    "first 4": "the first 4 layers",
    "first 1/16": "the first sixteenth of the layers",
    "first 1/8": "the first eighth of the layers",
    "first 1/8 by count": "the first eighth of the layers",
    "middle 3/4": "the middle three quarters of the layers",
    "more bits": "the outer eighths of the layers and every third between",
}


class MixType(NamedTuple):
    """A type, and why the mix chose it: the role and the conditions that held; '' for the default type."""

    type: TensorType
    reason: str = ""


@lru_cache(4096)
def _fitting_roles(section: int, form: str, is_first: bool) -> list[Role]:
    """The roles of a section for tensors with names of a form, in the first layer or not."""
    name = form if is_first else form.replace(_FIRST_LAYER, "blk.1.", 1)
    return [role for role in SECTIONS[section].roles if any(part in name for part in role.parts)]


@dataclass
class Mix:
    """A file type's mix for one model. `select` counts tensors: call it once per quantisable tensor that `tells_apart`
    from others, in the file's order."""

    file_type: str
    model: ModelTraits
    _counts: Counter[str] = field(default_factory=Counter)

    @cached_property
    def default(self) -> TensorType:
        return default_type(self.file_type)

    def select(self, name: str, columns: int) -> MixType:
        """The type of the tensor `name` with rows of `columns` elements, before rules, flags and fallbacks."""
        if name == "output.weight" or (self.model.tied and name == "token_embd.weight"):
            return self._apply(OUTPUT_ROLE, _ONE, columns)
        if name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return self._apply(EMBEDDING_ROLE, _ONE, columns)
        role = self._role(name, columns)
        return MixType(self.default) if role is None else self._apply(role, self._position(role, name), columns)

    def tells_apart(self, form: str, columns: int) -> bool:
        """Whether tensors with names of a form may get different types: by their place among those of their role, or where
        the first layer's have a role of their own."""
        role = self._role(form, columns)
        return role is not None and (role.counter in self._used_counters or role.parts[0].startswith(_FIRST_LAYER))

    @cached_property
    def _section(self) -> int:
        return next(i for i, s in enumerate(SECTIONS) if not s.file_types or self.file_type in s.file_types.split())

    @cached_property
    def _used_counters(self) -> set[str]:
        roles = SECTIONS[self._section].roles
        return {r.counter for r in roles for row in _rows(r.rows, self.file_type) if _OF_PLACE & {*row.conditions}}

    def _role(self, name: str, columns: int) -> Role | None:
        fitting = _fitting_roles(self._section, form_of(name), name.startswith(_FIRST_LAYER))
        return next((role for role in fitting if self._holds(role.when, _ONE, columns)), None)

    def _position(self, role: Role, name: str) -> LayerPosition:
        """Counts the tensor. With experts the layer is read from the name: their tensors need not come in the layers' order."""
        if not role.counter:
            return _ONE
        seen = self._counts[role.counter]
        self._counts[role.counter] += 1
        if role.counter == "attn_v":
            return LayerPosition(seen, self.model.n_attn_v, seen)
        prefix = re.match(r"blk\.(\d+)\.", name)
        index = int(prefix[1]) if self.model.experts > 1 and prefix else seen
        return LayerPosition(index, self.model.n_layer, seen)

    def _holds(self, condition: str, at: LayerPosition, columns: int) -> bool:
        return not condition or _CONDITIONS[condition](self.model, at, columns)

    def _apply(self, role: Role, at: LayerPosition, columns: int) -> MixType:
        default = self.default
        for row in _rows(role.rows, self.file_type):
            if all(self._holds(condition, at, columns) for condition in row.conditions):
                chosen = TYPES[row.types.get("", row.types.get(default.name, default.name))]
                return MixType(chosen, "" if chosen is default else _reason(role, row.conditions))
        return MixType(default)


def _reason(role: Role, conditions: Sequence[str]) -> str:
    """'attn_v (8 experts or more)'."""
    single = {id(OUTPUT_ROLE): "output", id(EMBEDDING_ROLE): "token_embd"}.get(id(role))
    name = single or ", ".join(part.strip(".").removesuffix(".weight") for part in role.parts) or "all other tensors"
    words = [_WORDS[condition] for condition in filter(None, (role.when, *conditions)) if _WORDS[condition]]
    return f"{name} ({', '.join(words)})" if words else name


@cache
def file_types() -> dict[str, str]:
    """File type as llama-quantize spells it -> name of its default type; in the order of the table of types."""
    with_file_type = (t for t in TYPES.values() if t.ftype is not None and t.name not in WITHOUT_FILE_TYPE)
    same_name = {t.name.upper(): t.name for t in with_file_type}
    return {name: default for name, default in same_name.items() if name not in ALIASES} | DEFAULT_TYPES


def file_type_name(name: str) -> str | None:
    """The file type that llama-quantize reads in a name: 'q4_k' -> 'Q4_K_M', 'iq4_k' -> 'IQ4_K'; None if there is none."""
    upper = ALIASES.get(name.upper(), name.upper())
    return next((file_type for file_type in file_types() if file_type.upper() == upper), None)


def default_type(file_type: str) -> TensorType:
    """The type of most tensors of a file type. Raises PlanError for an unknown one."""
    try:
        return TYPES[file_types()[file_type]]
    except KeyError:
        raise PlanError(f"there is no file type {file_type!r}") from None


def file_type_id(file_type: str) -> int:
    """The value of general.file_type for a file type. Raises PlanError for an unknown one."""
    default_id = default_type(file_type).ftype
    return FILE_TYPE_IDS.get(file_type, default_id if default_id is not None else 0)
