"""Stock mixes: which type each tensor gets when llama-quantize is asked for a file type such as Q4_K_M or IQ2_K.

A file type names a default type and a set of exceptions by role (spec, section E.3). They are kept here as tables: a section
is a set of file types and the roles that are told apart for them; a role is recognised by a part of a tensor's name, the first
that fits counts; of a role's rows the first that fits counts too. A row reads

    file types | conditions, all of which must hold | type

where `*` is any file type, `=` leaves the type as it is, and `a>b c>d` replaces type a by b and type c by d.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..formats import TYPES, PlanError, TensorType

# File types that are not called like their default type. The others are: IQ4_K is iq4_k, Q4_K_R4 is q4_k_r4.
_DEFAULTS = {
    "Q2_K_S": "q2_K",
    "Q3_K_S": "q3_K",
    "Q3_K_M": "q3_K",
    "Q3_K_L": "q3_K",
    "Q4_K_S": "q4_K",
    "Q4_K_M": "q4_K",
    "Q5_K_S": "q5_K",
    "Q5_K_M": "q5_K",
    "IQ2_S": "iq2_xs",
    "IQ2_M": "iq2_s",
    "IQ2_M_R4": "iq2_s_r4",
    "IQ3_XS": "iq3_s",
    "IQ3_M": "iq3_s",
    "IQ3_KL": "iq3_k",
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# general.file_type where it is not the default type's own.
_FILE_TYPES = {
    "Q2_K_S": 21,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "IQ2_S": 28,
    "IQ2_M": 29,
    "IQ2_M_R4": 229,
    "IQ3_XS": 22,
    "IQ3_M": 27,
    "IQ3_KL": 146,
}
# Types that have no file type of their own name (section A).
_NO_FILE_TYPE = ("iq2_s", "iq2_s_r4", "q4_0_4x4", "q4_0_4x8", "q4_0_8x8", "q8_k_r16", "q1_0_g128")

_LOW_OUTPUT = """IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_K IQ3_K IQ2_KS IQ3_K_R4 IQ3_KS IQ2_K_R4 IQ3_XXS_R4 IQ2_KL
    IQ2_M_R4 IQ1_S_R4 IQ1_M_R4 IQ2_KT IQ3_KT IQ1_KT"""
_OUTPUT = f"""
    *                                                                   | falcon        | q8_0
    *                                                                   | odd columns   | q8_0
    {" ".join(_LOW_OUTPUT.split())}                                     | tied          | iq4_k
    {" ".join(_LOW_OUTPUT.split())}                                     |               | q5_K
    IQ2_XXS_R4 IQ2_XS_R4                                                | tied          | iq4_k_r4
    IQ2_XXS_R4 IQ2_XS_R4                                                |               | q5_k_r4
    IQ3_S IQ3_M IQ3_KL IQ4_XS IQ3_S_R4 IQ4_KS IQ4_KSS IQ4_KS_R4         | tied          | iq5_k
    Q8_0 Q8_0_R8 IQ6_K Q6_K_R4 Q8_K_R8 Q8_KV Q8_KV_R8                   |               | =
    *                                                                   |               | q6_K
"""
_EMBEDDING = """
    IQ2_XXS IQ2_XS IQ1_S IQ1_M IQ2_XXS_R4 IQ2_XS_R4 IQ1_S_R4 IQ1_M_R4   |               | q2_K
    IQ2_S IQ2_M IQ2_M_R4 IQ3_XXS IQ3_KT                                 |               | iq3_s
    IQ3_XXS_R4                                                          |               | iq3_k
    IQ1_BN IQ2_BN IQ2_BN_R4                                             |               | iq4_nl
"""
_ATTN_V = """
    *                                                                   | experts>=4    | q8_0
    *                                                                   | 70B           | q3_K>q5_K q4_K>q5_K iq3_k>iq5_k
    Q2_K                                                                | gqa>=4        | q4_K
    Q2_K                                                                |               | q3_K
    IQ2_K                                                               | gqa>=2        | iq4_k
    IQ2_K                                                               |               | iq3_k
    IQ2_K_R4                                                            | gqa>=2        | iq4_k_r4
    IQ2_K_R4                                                            |               | iq3_k_r4
    Q2_K_S                                                              | gqa>=4        | q4_K
    Q2_K_R4                                                             | gqa>=4        | q4_k_r4
    IQ3_XXS                                                             | gqa>=4        | q4_K
    IQ3_XXS                                                             | gqa>=2        | iq3_k
    IQ3_XXS                                                             | no imatrix    | iq3_s
    IQ3_XXS                                                             |               | iq3_xxs
    IQ3_KT                                                              | gqa>=4        | iq4_k
    IQ3_KT                                                              |               | iq3_k
    IQ4_KT                                                              | gqa>=4        | iq5_k
    IQ4_KT                                                              |               | iq4_k
    IQ3_XXS_R4                                                          | gqa>=4        | q4_k_r4
    IQ3_XXS_R4                                                          | gqa>=2        | iq3_k_r4
    IQ3_XXS_R4                                                          | no imatrix    | iq3_k_r4
    IQ3_XXS_R4                                                          |               | iq3_xxs_r4
    IQ3_XS IQ3_S                                                        | gqa>=2        | iq4_k
    IQ3_S_R4                                                            | gqa>=2        | iq4_k_r4
    IQ3_K                                                               | gqa>=2        | iq4_k
    IQ3_KS IQ2_KL                                                       | gqa>=2        | iq4_ks
    IQ3_K_R4                                                            | gqa>=2        | iq4_k_r4
    IQ3_KL IQ3_M                                                        | gqa>=2        | iq5_k
    IQ3_KL IQ3_M                                                        |               | iq4_k
    Q3_K_M                                                              | first 2       | q5_K
    Q3_K_M                                                              |               | q4_K
    Q3_K_L                                                              |               | q5_K
    IQ4_NL IQ4_XS IQ4_NL_R4 IQ4_XS_R8 IQ4_KS IQ4_KSS                    | gqa>=2        | iq5_k
    IQ4_KS_R4                                                           | gqa>=2        | iq5_k_r4
    IQ4_K IQ4_K_R4                                                      | gqa>=2        | iq5_k
    Q4_K_M Q5_K_M                                                       | more          | q6_K
    Q4_K_S Q4_K_R4                                                      | first 4       | q5_K
    Q5_K_S                                                              | big           | q6_K
    Q5_K_S                                                              |               | =
    IQ5_K IQ5_KS                                                        | big           | iq6_k
    IQ5_K IQ5_KS                                                        |               | =
    *                                                                   | gqa>=4        | q2_K>iq3_s iq3_xxs>iq3_s \
q2_k_r4>iq3_k_r4 iq3_xxs_r4>iq3_k_r4 q3_K>q4_K iq3_s>q4_K iq3_k>iq4_k iq3_ks>iq4_ks iq2_kl>iq4_ks iq3_s_r4>q4_k_r4 \
q3_k_r4>q4_k_r4 q4_K>q5_K iq4_xs>q5_K iq4_nl>q5_K iq4_nl_r4>q5_K iq4_xs_r8>q5_K iq4_k>iq5_k iq4_ks>iq5_k q5_K>q6_K \
iq5_k>iq6_k iq5_ks>iq6_k
"""
_ATTN_K = """
    *                                                                   | experts>=4    | q8_0
    IQ3_XS                                                              |               | iq3_xxs
    IQ3_XXS IQ3_XXS_R4                                                  |               | iq2_s
"""
_ATTN_Q = """
    IQ3_XS                                                              |               | iq3_xxs
    IQ3_XXS IQ3_XXS_R4                                                  |               | iq2_s
    Q5_K_S                                                              | big           | q4_K
    IQ5_K                                                               | big           | iq4_k
    IQ5_KS                                                              | big           | iq4_ks
"""
_FFN_DOWN = """
    Q2_K                                                                |               | q3_K
    Q2_K_S                                                              | early         | q4_K
    Q2_K_R4                                                             | early         | q4_k_r4
    IQ3_XXS                                                             | no imatrix & early | q4_K
    IQ3_XXS                                                             | no imatrix    | q3_K
    IQ3_KT                                                              | no imatrix & early | iq4_k
    IQ3_KT                                                              | no imatrix    | iq3_k
    IQ3_XXS_R4                                                          | no imatrix & early | q4_k_r4
    IQ3_XXS_R4                                                          | no imatrix    | iq3_k_r4
    Q3_K_M                                                              | earliest      | q5_K
    Q3_K_M                                                              | not falcon    | q4_K
    Q3_K_M                                                              | more          | q4_K
    Q3_K_M                                                              |               | q3_K
    IQ3_M                                                               | early         | iq4_k
    IQ3_M                                                               | experts>=4 & more | iq4_k
    Q3_K_L                                                              | falcon        | q4_K
    Q3_K_L                                                              |               | q5_K
    IQ3_KL                                                              | more          | iq4_ks
    IQ3_KL                                                              |               | iq3_k
    Q4_K_M                                                              | falcon & earliest | q6_K
    Q4_K_M                                                              | falcon & more | q5_K
    Q4_K_M                                                              | falcon        | q4_K
    Q4_K_M                                                              | more          | q6_K
    IQ4_NL IQ4_XS IQ4_KS IQ4_KSS IQ4_NL_R4 IQ4_XS_R8                    | no imatrix & early | q5_K
    IQ4_KS_R4                                                           | no imatrix & early | q5_k_r4
    Q5_K_M                                                              | more          | q6_K
    Q4_K_S Q4_K_R4                                                      | not falcon & early | q5_K
    Q4_0                                                                | imatrix & early | q4_1
    Q5_0                                                                | imatrix & early | q5_1
    Q4_0_R8                                                             | imatrix & early | iq4_nl_r4
"""
_ATTN_OUTPUT = """
    Q3_K_L                                                              | falcon        | q4_K
    *                                                                   | falcon        | =
    Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS IQ4_K IQ4_KSS IQ4_KS IQ4_KS_R4 IQ5_KS \
IQ5_KS_R4 IQ2_K IQ3_K IQ3_KL Q4_K_R4 IQ4_NL_R4 IQ4_XS_R8 Q3_K_R4 IQ3_KT IQ3_KS Q2_K_R4 IQ4_K_R4 IQ3_K_R4 IQ2_K_R4 IQ3_XXS_R4 \
IQ3_S_R4                                                                | experts>=4    | q5_K
    IQ2_KL                                                              | experts>=4    | iq4_ks
    *                                                                   | experts>=4    | =
    Q2_K                                                                |               | q3_K
    IQ3_XXS                                                             |               | iq3_s
    IQ3_KT                                                              | gqa>=4        | iq3_k
    IQ3_XXS_R4                                                          |               | iq3_k_r4
    Q3_K_M                                                              |               | q4_K
    Q3_K_L                                                              |               | q5_K
    IQ3_M                                                               |               | iq4_k
    IQ2_K                                                               |               | iq3_k
    IQ2_K_R4                                                            |               | iq3_k_r4
    IQ3_KL                                                              |               | iq4_ks
"""
_FFN_GATE_UP = """
    IQ3_XS                                                              | middle        | iq3_xxs
    IQ3_KL                                                              | more          | iq4_ks
"""


@dataclass(frozen=True)
class Role:
    """Tensors with one of `parts` in their name, if `when` holds. counter: what is counted to tell layers apart; see Mix."""

    parts: tuple[str, ...]
    rows: str
    when: str = ""
    counter: str = ""


@dataclass(frozen=True)
class Section:
    """Roles for some file types; `file_types` empty: for all that no earlier section has."""

    file_types: str
    roles: tuple[Role, ...]


def _low(v: str, k: str, first: str, qkv: str, shared: str, down: str, output_experts: str, output: str) -> tuple[Role, ...]:
    """The roles of the two families that share a scheme; v: its three types, from best to least."""
    best, middle, least = v.split()
    values = f"* | experts>=4 | {best}\n* | gqa>=4 | {best}\n* | gqa>=2 | {middle}\n* | | {least}"
    return (
        Role(("attn_v.weight",), values, counter="attn_v"),
        Role(("attn_k",), f"* | | {k}", when="experts>=8"),
        Role(("blk.0.ffn_down", "blk.0.ffn_gate", "blk.0.ffn_up"), f"* | | {first}", when="experts>=8"),
        Role(("attn_q",), f"* | | {k}", when="experts>=8"),
        Role(("attn_qkv.weight",), f"* | | {qkv}"),
        Role(("_shexp.weight",), f"* | | {shared}"),
        Role(("ffn_down",), f"* | early | {down}", counter="ffn_down"),
        Role(("attn_output.weight",), f"* | experts>=4 | {output_experts}\n* | | {output}"),
    )


_TWO_BIT = (
    Role(
        ("attn_v.weight",),
        "* | gqa>=4 | iq4_k\n* | experts>=4 | iq4_k\n* | gqa>=2 | iq3_k\n* | experts>=2 | iq3_k\n"
        "IQ2_S IQ2_M IQ2_M_R4 | | iq3_s\n* | | q2_K",
        counter="attn_v",
    ),
    Role(("attn_k", "attn_q"), "* | | q4_K", when="experts>=8"),
    Role(("attn_qkv.weight",), "IQ2_S IQ2_M IQ2_M_R4 | | iq3_xxs\n* | | iq2_k"),
    Role(("ffn_down",), "IQ2_S IQ2_M IQ2_M_R4 | counted early | iq3_s\n* | counted early | q2_K", counter="ffn_down"),
    Role(
        ("attn_output.weight",),
        "* | experts>=4 | q5_K\nIQ1_S IQ1_M | | iq2_k\nIQ2_S IQ2_M IQ2_M_R4 | | iq3_s",
    ),
)
_SECTIONS = (
    Section(
        "IQ1_S_R4 IQ1_M_R4",
        _low("iq4_k_r4 iq3_k_r4 q2_k_r4", "q4_k_r4", "iq3_k_r4", "iq2_k_r4", "iq4_k_r4", "q2_k_r4", "q5_k_r4", "iq2_k_r4"),
    ),
    Section("IQ2_KT", _low("iq4_k iq3_k q2_K", "q4_K", "iq3_k", "iq3_k", "iq4_k", "iq3_k", "q5_K", "iq3_k")),
    Section("IQ2_XXS IQ2_XS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_KS IQ2_XXS_R4 IQ2_XS_R4 IQ2_M_R4", _TWO_BIT),
    Section(
        "",
        (
            Role(("attn_v.weight",), _ATTN_V, counter="attn_v"),
            Role(("attn_k",), _ATTN_K),
            Role(("attn_q",), _ATTN_Q),
            Role(("ffn_down",), _FFN_DOWN, counter="ffn_down"),
            Role(("attn_output.weight",), _ATTN_OUTPUT),
            Role(("ffn_gate",), _FFN_GATE_UP, counter="ffn_gate"),
            Role(("ffn_up",), _FFN_GATE_UP, counter="ffn_up"),
        ),
    ),
)
_HEAD = Role((), _OUTPUT)
_LOOKUP = Role((), _EMBEDDING)

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
            return self._apply(_HEAD, Layer(), columns)
        if name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return self._apply(_LOOKUP, Layer(), columns)
        section = next(s for s in _SECTIONS if not s.file_types or self.file_type in s.file_types.split())
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
    own = {t.name.upper(): t.name for t in map(TYPES.__getitem__, TYPES) if t.ftype is not None and t.name not in _NO_FILE_TYPE}
    return {name: kind for name, kind in own.items() if name not in _ALIASES} | _DEFAULTS


def file_type_name(name: str) -> str | None:
    """'q4_k' -> 'Q4_K_M', 'iq4_k' -> 'IQ4_K'; None for what is no file type."""
    upper = _ALIASES.get(name.upper(), name.upper())
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
    return _FILE_TYPES.get(file_type, own if own is not None else 0)
