"""What the layers of a graph keep per token, in the types that the settings ask for."""

from __future__ import annotations

from ....formats import PlanError
from ...graph import Graph
from ...graph.ops import CacheSpec, LatentAttention
from ...settings import Settings
from .kv_cache import Part, part_of


def cached_parts(graph: Graph, settings: Settings) -> tuple[dict[str, Part], dict[str, Part]]:
    """By name, as it usually is, and while somebody observes: then the latents too, which -mla 0 does not need otherwise.

    Raises PlanError for types that do not fit the model or the kind of attention.
    """
    layers: dict[int, dict[str, CacheSpec]] = {}
    for spec in graph.cache:
        layers.setdefault(spec.layer, {})[spec.name] = spec
    shapes = {tuple((name, s.heads, s.width) for name, s in specs.items()) for specs in layers.values()}
    if len(shapes) > 1:
        raise PlanError("the cpu backend does not know layers that keep different rows per token")
    latent = next((op for op in graph.ops if isinstance(op, LatentAttention)), None)
    if latent is None:
        specs = {spec.name: spec for spec in graph.cache}
        parts = grouped_parts(specs["k"].heads, specs["k"].width, specs["v"].width, settings) if specs else {}
        return parts, parts
    (heads, width), (rank,), (rope,) = latent.q.shape, latent.latent.shape, latent.k_pe.shape
    parts = latent_parts(heads, width, latent.v_width, rank, rope, settings)
    return parts, parts if settings.mla else {"kv": Part(1, rank + rope), **parts}


def grouped_parts(heads: int, k_width: int, v_width: int, settings: Settings) -> dict[str, Part]:
    """Keys and values of so many heads."""
    k, v = settings.cache_types
    return {"k": part_of("keys", "-ctk", heads, k_width, k), "v": part_of("values", "-ctv", heads, v_width, v)}


def latent_parts(heads: int, k_width: int, v_width: int, rank: int, rope: int, settings: Settings) -> dict[str, Part]:
    """Each head's keys and values (-mla 0), or latents of `rank` numbers with `rope` rotated ones of their keys."""
    k, v = settings.cache_types
    if settings.mla == 0:
        return grouped_parts(heads, k_width, v_width, settings)
    parts = {"kv": part_of("latents with their rotated keys", "-ctk", 1, rank + rope, k)}
    if settings.mla == 1:
        parts["v"] = part_of("latents", "-ctv", 1, rank, v)
    elif settings.cache_v is not None and v.lower() != k.lower():
        raise PlanError(
            f"-ctv {v} has nothing to act on: with -mla {settings.mla} only latents are cached, as {k} (-ctk); "
            "leave it away, or use -mla 0 or 1"
        )
    return parts
