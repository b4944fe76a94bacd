"""`ggufmill plan` says what goes where in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..formats import PlanError, TensorSource, TensorType
from ..pipeline.console import emit, gib, table, warn
from .options import flags
from .options.settings import CACHE_TYPES

if TYPE_CHECKING:
    from ..runtime.memory import Override, Placement, Use

_CACHE = click.Choice(CACHE_TYPES, case_sensitive=False)


@click.command(short_help="What goes where: RAM, GPUs, KV cache, buffers")
@click.argument("model", type=flags.SourceName())
@click.option("--ram", type=flags.SIZE, metavar="SIZE", help="Memory of the machine (256G, 256GiB). [default: not limited]")
@click.option("--vram", type=flags.SIZES, metavar="SIZE,...", help="Memory of each GPU (24GiB,24GiB). [default: no GPU]")
@click.option(
    "-c", "--ctx-size", "n_ctx", type=click.IntRange(1, 2**31 - 1), default=32768, show_default=True, help="Context in tokens."
)
@click.option("-ub", "--ubatch-size", "ubatch", type=click.IntRange(1), default=512, show_default=True, help="Tokens per pass.")
@click.option("-ctk", "--cache-type-k", "cache_k", type=_CACHE, help="Type of cached keys. [default: f16]")
@click.option("-ctv", "--cache-type-v", "cache_v", type=_CACHE, help="Type of cached values. [default: f16]")
@click.option("-mla", "--mla-use", "mla", type=click.IntRange(0, 3), help="Latent attention's mode. [default: 3]")
@click.option(
    "-fa",
    "--flash-attn",
    "flash",
    type=click.Choice(("on", "off")),
    default="on",
    show_default=True,
    help="No scores stored.",
)
@click.option("-amb", "--attn-max-batch", "amb", metavar="MiB", type=click.IntRange(1), help="Bound of attention's buffer.")
@click.option("-ngl", "--n-gpu-layers", "ngl", type=click.IntRange(0), help="Layers on GPUs, the last ones. [default: all]")
@click.option("-ot", "--override-tensor", "ot", multiple=True, metavar="REGEX=DEVICE,...", help="First match wins.")
@click.option("--cpu-moe", is_flag=True, help="Experts stay in RAM.")
@click.option("--n-cpu-moe", type=click.IntRange(0), help="The experts of the first N layers stay in RAM.")
@click.option("--recipe", metavar="FILE", help="Recipe that the model is to be quantised by. [default: all are tried]")
@click.option("--type", "type", type=flags.FILE_TYPE, help="File type for what no rule takes.")
@flags.mla_layout
@click.option("--tensors", "each", is_flag=True, help="Show every tensor.")
@flags.as_json
def command(
    model: str | Path,
    ram: int | None,
    vram: tuple[int, ...] | None,
    amb: int | None,
    ngl: int | None,
    ot: tuple[str, ...],
    cpu_moe: bool,
    n_cpu_moe: int | None,
    recipe: str | None,
    type: TensorType | str | None,
    mla_layout: str | None,
    flash: str,
    each: bool,
    as_json: bool,
    **use: Any,
) -> None:
    """What of MODEL (a GGUF or a Hugging Face folder) goes where, and whether it fits: weights, KV cache, compute buffers.

    The weights are as --recipe or --type would make them; a GGUF that is quantised already counts as it is. For any other
    model without either, every shipped recipe and every file type is tried, and the largest that fits is shown. Devices are
    filled as llama.cpp does it: -ngl, -ot and --cpu-moe mean the same.

    \b
    Examples:
      ggufmill plan DeepSeek-V3/ --ram 256G --vram 24G -ot exps=CPU -ctk q8_0 -amb 512
      ggufmill plan DeepSeek-V3/ --recipe deepseek-v3-iq2_k_r4 --vram 32GiB -ot "blk\\.[3-4]\\.ffn=CUDA0,exps=CPU" --json
    """
    from ..convert import open_source
    from ..runtime.memory import CPU, Use, experts_to_cpu, parse_overrides

    capacities: dict[str, int | None] = {CPU: ram, **{f"CUDA{i}": size for i, size in enumerate(vram or ())}}
    overrides = [rule for text in ot for rule in parse_overrides(text)]
    overrides += experts_to_cpu(n_cpu_moe) if n_cpu_moe is not None else []
    overrides += experts_to_cpu() if cpu_moe else []
    wanted = Use(gpu_layers=ngl, attention_bytes=amb << 20 if amb else None, flash=flash == "on", **use)
    job = _Planner(open_source(model, mla_layout=mla_layout, remote=isinstance(model, str)), wanted, overrides, capacities)
    if recipe is not None or type is not None or job.quantised:
        chosen, tried = job.of(recipe, type), []
    else:
        tried = job.tried()
        fitting = [c for c in tried if c.placed.fits]
        chosen = max(fitting or tried, key=lambda c: (c.nbytes if c.placed.fits else -c.nbytes, c.label))
    summary = {"recipe": chosen.label, "total_bytes": chosen.nbytes, "bits_per_weight": chosen.bits, **chosen.placed.as_json()}
    summary["candidates"] = [
        {"recipe": c.label, "total_bytes": c.nbytes, "bits_per_weight": c.bits, "fits": c.placed.fits} for c in tried
    ]
    if not as_json:
        warn(chosen.placed.warnings)
    emit(summary, as_json, lambda: "\n\n".join(_texts(chosen, tried, each)))


class _Candidate:
    """A way to quantise the model and where everything would lie then.

    types: tensor -> type name and bytes; foreign: the recipe has rules that find nothing, so is for another model.
    """

    def __init__(
        self, label: str, nbytes: int, bits: float, placed: Placement, types: dict[str, tuple[str, int]], foreign: bool
    ):
        self.label, self.nbytes, self.bits, self.placed, self.types, self.foreign = label, nbytes, bits, placed, types, foreign


class _Planner:
    def __init__(
        self, source: TensorSource, use: Use, overrides: Sequence[Override], capacities: dict[str, int | None]
    ) -> None:
        self.source, self.use, self.overrides, self.capacities = source, use, overrides, capacities

    @property
    def quantised(self) -> bool:
        return any(t.stored is not None and not t.stored.is_float and len(t.shape) > 1 for t in self.source.tensors.values())

    def of(self, recipe: str | None, type: TensorType | str | None) -> _Candidate:
        """The model as it is without either. Raises PlanError."""
        from ..quantize.planning import AssumedImportance, plan_quantize
        from ..quantize.recipes.recipe import Recipe, load_recipe
        from ..recipes import find
        from ..runtime.memory import Weight, place

        loaded = load_recipe(find(recipe)) if recipe is not None else Recipe("", [], "")
        default = type or loaded.type
        plan = plan_quantize(
            self.source,
            "out.gguf",
            type=default,
            rules=loaded.rules,
            importance=AssumedImportance({}),
            ignore_imatrix_rules=True,
            allow_requantize=True,
        )
        weights = [Weight(o.name, o.type, o.nbytes) for o in plan.outputs]
        placed = place(weights, self.source.metadata, self.use, self.overrides, self.capacities)
        name = default.name if isinstance(default, TensorType) else default
        label = recipe if recipe is not None else name if name is not None else "as it is"
        dead = [w for w in plan.warnings if "matches no tensor" in w] if recipe is not None else []
        placed.warnings += dead
        types = {o.name: (o.type.name, o.nbytes) for o in plan.outputs}
        return _Candidate(label, plan.total_bytes, plan.bits_per_weight, placed, types, bool(dead))

    def tried(self) -> list[_Candidate]:
        """Every shipped recipe whose rules all find something, and every file type, largest first: none larger than the model
        as it is, nor of its size with other types."""
        from ..quantize import can_encode
        from ..quantize.recipes.mixes import default_type, file_types
        from ..recipes import names

        found, as_it_is = [], self.of(None, None)
        for name in names():
            if name.endswith(".txt"):
                candidate = self.of(name, None)
                if not candidate.foreign:
                    found.append(candidate)
        for name in file_types():
            kind = default_type(name)
            if can_encode(kind) and kind.rows == 1 and "_bn" not in kind.name and kind.name != "q1_0_g128":
                try:
                    found.append(self.of(None, name))
                except PlanError:
                    continue
        same = [c for c in found if c.types == as_it_is.types]
        smaller = [c for c in found if c.nbytes < as_it_is.nbytes]
        return sorted((same or [as_it_is]) + smaller, key=lambda c: (-c.nbytes, c.label))


def _texts(chosen: _Candidate, tried: Sequence[_Candidate], each: bool) -> list[str]:
    parts = []
    if tried:
        rows = [(c.label, gib(c.nbytes), f"{c.bits:.3f}", "fits" if c.placed.fits else "") for c in tried]
        parts.append(table(("recipe or file type", "weights", "bits", ""), rows))
    if each:
        places = chosen.placed.places
        rows = [(n, *chosen.types[n], places[n][0], places[n][1]) for n in places]
        parts.append(table(("tensor", "type", "bytes", "device", "rule"), rows))
    devices = [
        (d.name, d.tensors, *map(_mib, (d.weights, d.cache, d.compute, d.total, d.capacity, d.free)))
        for d in chosen.placed.devices
    ]
    columns = ("device", "tensors", "weights", "KV cache", "compute", "in all", "of", "free")
    parts.append(f"{chosen.label}: {gib(chosen.nbytes)}, {chosen.bits:.3f} bits per weight; sizes in MiB")
    parts.append(table(columns, devices))
    rules = [(rule, n, _mib(size)) for rule, (n, size) in chosen.placed.hits.items()]
    if rules:
        parts.append(table(("-ot", "tensors", "weights"), rules))
    if tried and not chosen.placed.fits:
        parts.append("nothing fits: put less on the device that lacks memory, or look for smaller types with `ggufmill search`")
    return parts


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.2f}"
