"""What the layers of a graph keep per token, in the types that the settings ask for."""

from __future__ import annotations

from ....formats import PlanError
from ...graph import Graph
from ...graph.ops import CacheSpec, LatentAttention
from .decoder import Settings
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
    parts = _latent_parts(latent, settings) if latent is not None else _grouped_parts(graph, settings)
    if latent is None or settings.mla:
        return parts, parts
    return parts, {"kv": Part(1, latent.latent.shape[0] + latent.k_pe.shape[0]), **parts}


def _grouped_parts(graph: Graph, settings: Settings) -> dict[str, Part]:
    specs = {spec.name: spec for spec in graph.cache}
    what = {"k": ("keys", "-ctk"), "v": ("values", "-ctv")}
    types = dict(zip("kv", settings.cache_types, strict=True))
    return {name: part_of(*what[name], spec.heads, spec.width, types[name]) for name, spec in specs.items()}


def _latent_parts(op: LatentAttention, settings: Settings) -> dict[str, Part]:
    (heads, width), rank, rope = op.q.shape, op.latent.shape[0], op.k_pe.shape[0]
    k, v = settings.cache_types
    if settings.mla == 0:
        return {"k": part_of("keys", "-ctk", heads, width, k), "v": part_of("values", "-ctv", heads, op.v_width, v)}
    parts = {"kv": part_of("latents with their rotated keys", "-ctk", 1, rank + rope, k)}
    if settings.mla == 1:
        parts["v"] = part_of("latents", "-ctv", 1, rank, v)
    elif settings.cache_v is not None and v.lower() != k.lower():
        raise PlanError(
            f"-ctv {v} has nothing to act on: with -mla {settings.mla} only latents are cached, as {k} (-ctk); "
            "leave it away, or use -mla 0 or 1"
        )
    return parts
