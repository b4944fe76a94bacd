"""What each layer of a model keeps of a sequence: rows of keys and values, or of latents, per token, in a type of choice; or a
recurrent state, of the same size whatever the sequence's length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from ..data_classes import dataclass
from ..formats import TYPES, PlanError
from .graph.values import CacheSpec, StateSpec
from .settings import CACHE_TYPES, Settings

if TYPE_CHECKING:
    from .graph import Graph

_LANES = 16  # rows of the float types are filled up to a multiple of this many numbers, which kernels read at once


@dataclass(frozen=True)
class CachePart:
    """What a layer keeps per token under one name: a row of `width` numbers for each of `heads`, as `type`.

    every     tokens that share their rows, those of the last of them
    rotation  sizes of the runs of a row that lie in memory as their Walsh-Hadamard transforms; (): the row is as it is
    """

    heads: int
    width: int
    type: str = "f32"
    every: int = 1
    rotation: tuple[int, ...] = ()

    @cached_property
    def padded_width(self) -> int:
        """Numbers of a row in memory."""
        return -(-self.width // _LANES) * _LANES if TYPES[self.type].is_float else self.width

    @cached_property
    def row_bytes(self) -> int:
        return TYPES[self.type].row_bytes(self.padded_width)

    @property
    def suits_bytes(self) -> bool:
        """Whether what is made of the rows may be rounded to eight bits in blocks of 32: they are in blocks themselves."""
        return not TYPES[self.type].is_float

    @property
    def token_bytes(self) -> int:
        """Bytes per token and layer, rounded up."""
        return -(-self.heads * self.row_bytes // self.every)

    def rows_of(self, tokens: int) -> int:
        """Rows of a head that `tokens` tokens have."""
        return tokens // self.every


@dataclass(frozen=True)
class StatePart:
    """What a layer keeps per sequence under one name: float32 of this shape, zeros at the beginning of a sequence.

    The last axis is filled up in memory to a multiple of _LANES numbers, as in `CachePart`.
    """

    shape: tuple[int, ...]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        return (*self.shape[:-1], -(-self.shape[-1] // _LANES) * _LANES)

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.padded_shape)


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps, by name: rows of every token, and states of the sequence."""

    rows: Mapping[str, CachePart] = field(default_factory=dict)
    states: Mapping[str, StatePart] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        return sum(part.token_bytes for part in self.rows.values())

    @property
    def state_bytes(self) -> int:
        return sum(part.nbytes for part in self.states.values())


def types_text(layers: Iterable[LayerCache]) -> str:
    """The types of the rows of layers, in words: 'q8_0 and f16', 'q8_0 or q4_0' where layers differ."""
    types: dict[str, dict[str, None]] = {}
    for layer in layers:
        for name, part in layer.rows.items():
            types.setdefault(name, {})[part.type] = None
    return " and ".join(map(" or ".join, types.values()))


def rows_text(layers: Sequence[LayerCache]) -> str:
    """What rows of layers mean: the types and rotations of each, '0.k q8_0 64,64; 0.v q8_0 128; ...'."""
    kept = ((f"{number}.{name}", part) for number, layer in enumerate(layers) for name, part in layer.rows.items())
    return "; ".join(f"{name} {part.type} {','.join(map(str, part.rotation))}".rstrip() for name, part in kept)


def state_offsets(layers: Sequence[LayerCache]) -> tuple[dict[tuple[int, str], int], int]:
    """Where the states of all layers lie in one block of memory: (layer, name) -> bytes from its start, and its size."""
    offsets, end = {}, 0
    for number, layer in enumerate(layers):
        for name, part in layer.states.items():
            offsets[number, name] = end
            end += part.nbytes
    return offsets, end


def grouped_parts(heads: int, k_width: int, v_width: int, settings: Settings) -> dict[str, CachePart]:
    """Keys and values of `heads` key heads, in the types of the settings. Raises PlanError for a type that does not fit."""
    (k, v), (k_rotates, v_rotates) = settings.cache_types, settings.cache_rotations
    return {
        "k": _part("keys", "-ctk", heads, (k_width,), k, k_rotates),
        "v": _part("values", "-ctv", heads, (v_width,), v, v_rotates),
    }


def latent_parts(heads: int, k_width: int, v_width: int, rank: int, rope: int, settings: Settings) -> dict[str, CachePart]:
    """Each head's keys and values (-mla 0), or latents of `rank` numbers followed by the `rope` rotated ones of their keys.

    Raises PlanError for types that do not fit the model or the kind of attention.
    """
    (k, v), (k_rotates, v_rotates) = settings.cache_types, settings.cache_rotations
    if settings.mla == 0:
        return grouped_parts(heads, k_width, v_width, settings)
    parts = {"kv": _part("latents with their rotated keys", "-ctk", 1, (rank, rope), k, k_rotates)}
    if settings.mla == 1:
        parts["v"] = _part("latents", "-ctv", 1, (rank,), v, v_rotates)
        return parts
    _check_values(settings, f"with -mla {settings.mla} only latents are cached", "leave it out, or use -mla 0 or 1")
    return parts


def entry_parts(width: int, every: int, settings: Settings) -> dict[str, CachePart]:
    """Entries that are keys and values at once, each for `every` tokens. Raises PlanError for types that do not fit."""
    (k, _), (rotates, _) = settings.cache_types, settings.cache_rotations
    _check_values(settings, "keys of this model are its values, which are cached", "leave it out")
    return {"entries": replace(_part("keys", "-ctk", 1, (width,), k, rotates), every=every)}


def graph_layers(graph: Graph, settings: Settings) -> tuple[list[LayerCache], list[LayerCache]]:
    """What every layer of a graph keeps: without an observer, and with one, for which -mla 0 keeps the latents too.

    Raises PlanError for types that do not fit the model or the kind of attention.
    """
    from .graph.ops import LatentAttention  # planning needs no ops

    count = 1 + max((spec.layer for spec in graph.cache), default=-1)
    latent = {op.layer: op for op in graph.ops if isinstance(op, LatentAttention)}
    plain, observed = [], []
    for layer in range(count):
        specs = [spec for spec in graph.cache if spec.layer == layer]
        states = {spec.name: StatePart(spec.shape) for spec in specs if isinstance(spec, StateSpec)}
        kept = {spec.name: spec for spec in specs if isinstance(spec, CacheSpec)}
        own = settings.of_layer(layer, graph.n_layers)
        rows: dict[str, CachePart] = {}
        extra: dict[str, CachePart] = {}
        if layer in latent:
            op = latent[layer]
            (heads, width), (rank,), (rope,) = op.q.shape, op.latent.shape, op.k_pe.shape
            rows = latent_parts(heads, width, op.v_width, rank, rope, own)
            extra = {} if settings.mla else {"kv": CachePart(1, rank + rope)}
        elif "entries" in kept:
            rows = entry_parts(kept["entries"].width, kept["entries"].every, own)
        elif "k" in kept:
            rows = grouped_parts(kept["k"].heads, kept["k"].width, kept["v"].width, own)
        if "index_k" in kept:
            rows["index_k"] = CachePart(1, kept["index_k"].width, every=kept["index_k"].every)
        plain.append(LayerCache(rows, states))
        observed.append(LayerCache({**extra, **rows}, states))
    return plain, observed


def _check_values(settings: Settings, why: str, remedy: str) -> None:
    """Raises PlanError for a type or rotation that was chosen for values, and is not that of the keys."""
    (k, v), (rotates, _) = settings.cache_types, settings.cache_rotations
    if settings.cache_v is not None and v.lower() != k.lower():
        raise PlanError(f"-ctv {v} has no effect: {why}, as {k} (-ctk); {remedy}")
    if settings.v_cache_hadamard not in (None, rotates):
        flag, how = ("-no-vhad", "rotated (-khad)") if rotates else ("-vhad", "without rotation")
        raise PlanError(f"{flag} has no effect: {why}, {how}; {remedy}")


def _part(content: str, option: str, heads: int, widths: tuple[int, ...], type_name: str, is_rotated: bool) -> CachePart:
    """A part of a type that a user chose with an option. widths: of the runs of a row, each rotated for itself in blocks of the
    largest power of two that divides it. Raises PlanError, naming the option, where that type does not fit."""
    name, width = next((name for name in CACHE_TYPES if name.lower() == type_name.lower()), None), sum(widths)
    if name is None:
        raise PlanError(f"{option} {type_name}: no type for a cache; there are {', '.join(CACHE_TYPES)}")
    if not TYPES[name].fits(width):
        block = TYPES[name].block
        raise PlanError(
            f"{option} {name}: {content} of this model have {width} numbers, no multiple of the {block} of a block; "
            "f32, f16 and bf16 work"
        )
    rotation = tuple(block for run in widths for block in [run & -run] * (run // (run & -run)))
    return CachePart(heads, width, name, rotation=rotation if is_rotated else ())
