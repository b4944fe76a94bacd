"""What the layers of a model keep per token in the KV cache: rows of keys and values, or of latents, and their types."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats import TYPES, PlanError
from .graph import Graph
from .graph.ops import CacheSpec, LatentAttention
from .settings import Settings

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q4_0", "iq4_nl", "q8_KV")
_LANES = 16  # rows of the float types are filled up to a multiple of so many numbers, which kernels read at once


@dataclass(frozen=True)
class CachePart:
    """What a layer keeps per token under one name: a row of `width` numbers for each of `heads`, as `type`."""

    heads: int
    width: int
    type: str = "f32"

    @property
    def padded_width(self) -> int:
        """Numbers of a row in memory."""
        return -(-self.width // _LANES) * _LANES if TYPES[self.type].is_float else self.width

    @property
    def row_bytes(self) -> int:
        return TYPES[self.type].row_bytes(self.padded_width)

    @property
    def token_bytes(self) -> int:
        """Bytes per token and layer."""
        return self.heads * self.row_bytes


def grouped_parts(heads: int, k_width: int, v_width: int, settings: Settings) -> dict[str, CachePart]:
    """Keys and values of `heads` key heads, in the types of the settings. Raises PlanError for a type that does not fit."""
    k, v = settings.cache_types
    return {"k": _part("keys", "-ctk", heads, k_width, k), "v": _part("values", "-ctv", heads, v_width, v)}


def latent_parts(heads: int, k_width: int, v_width: int, rank: int, rope: int, settings: Settings) -> dict[str, CachePart]:
    """Each head's keys and values (-mla 0), or latents of `rank` numbers followed by the `rope` rotated ones of their keys.

    Raises PlanError for types that do not fit the model or the kind of attention.
    """
    k, v = settings.cache_types
    if settings.mla == 0:
        return grouped_parts(heads, k_width, v_width, settings)
    parts = {"kv": _part("latents with their rotated keys", "-ctk", 1, rank + rope, k)}
    if settings.mla == 1:
        parts["v"] = _part("latents", "-ctv", 1, rank, v)
    elif settings.cache_v is not None and v.lower() != k.lower():
        raise PlanError(
            f"-ctv {v} has nothing to act on: with -mla {settings.mla} only latents are cached, as {k} (-ctk); "
            "leave it away, or use -mla 0 or 1"
        )
    return parts


def graph_parts(graph: Graph, settings: Settings) -> tuple[dict[str, CachePart], dict[str, CachePart]]:
    """The parts that every layer of a graph keeps, by name: without an observer, and with one, for which -mla 0 keeps the
    latents too.

    Raises PlanError for types that do not fit the model or the kind of attention.
    """
    layers: dict[int, dict[str, CacheSpec]] = {}
    for spec in graph.cache:
        layers.setdefault(spec.layer, {})[spec.name] = spec
    shapes = {tuple((name, s.heads, s.width) for name, s in specs.items()) for specs in layers.values()}
    if len(shapes) > 1:
        raise PlanError("layers that keep rows of different shapes per token are not supported")
    latent = next((op for op in graph.ops if isinstance(op, LatentAttention)), None)
    if latent is None:
        specs = {spec.name: spec for spec in graph.cache}
        parts = grouped_parts(specs["k"].heads, specs["k"].width, specs["v"].width, settings) if specs else {}
        return parts, parts
    (heads, width), (rank,), (rope,) = latent.q.shape, latent.latent.shape, latent.k_pe.shape
    parts = latent_parts(heads, width, latent.v_width, rank, rope, settings)
    return parts, parts if settings.mla else {"kv": CachePart(1, rank + rope), **parts}


def _part(content: str, option: str, heads: int, width: int, type_name: str) -> CachePart:
    """A part of a type that a user chose with an option. Raises PlanError, naming the option, where that type does not fit."""
    name = next((name for name in CACHE_TYPES if name.lower() == type_name.lower()), None)
    if name is None:
        raise PlanError(f"{option} {type_name}: no type for a cache; there are {', '.join(CACHE_TYPES)}")
    if not TYPES[name].fits(width):
        block = TYPES[name].block
        raise PlanError(
            f"{option} {name}: {content} of this model have {width} numbers, no multiple of the {block} of a block; "
            "f32, f16 and bf16 work"
        )
    return CachePart(heads, width, name)
