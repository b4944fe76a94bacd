"""`ggufmill plan` says what goes where in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import BITS, bits_per_weight_text, bits_text, duration, size_text
from ..pipeline.requests.plan import PlanRequest
from .command import Verb
from .display.console import call, table
from .options.fields import options_of

if TYPE_CHECKING:
    from ..pipeline.cluster.forecast import ClusterForecast
    from ..pipeline.plan import MemoryPlan


@click.command(cls=Verb)
@options_of(PlanRequest)
@click.option("--tensors", is_flag=True, help="Show every tensor.")
def command(tensors: bool, **options: Any) -> None:
    """Plan what of MODEL (a GGUF or a Hugging Face folder) goes where, and whether it fits: weights, KV cache, compute buffers.

    The weights are as --recipe or --type would make them; a GGUF that is quantised already counts as it is. For any other
    model without either, every shipped recipe and every file type is tried, and the largest that fits is shown. Devices are
    filled as llama.cpp does it: -ngl, -ot and --cpu-moe mean the same. The exit code is 1 if a device has too little memory.

    \b
    Examples:
      ggufmill plan DeepSeek-V3/ --ram 256G --vram 24G -ot exps=CPU -ctk q8_0 -amb 512
      ggufmill plan DeepSeek-V3/ --recipe deepseek-v3-iq4_k_r4 --cluster=1,8,64 --cluster-threads 64 --read-rate 5G
      ggufmill plan model.gguf --device auto -ot exps=CPU
      ggufmill plan DeepSeek-V3/ --recipe deepseek-v3-iq2_k_r4 --vram 32GiB -ot "blk\\.[3-4]\\.ffn=CUDA0,exps=CPU" --json
    """
    from ..pipeline.plan import plan_memory

    call(plan_memory, show=lambda result: _text(result, tensors), bars=False, **options)


def _text(result: MemoryPlan, tensors: bool) -> str:
    """tensors: with a row for each."""
    chosen, placement, parts = result.chosen, result.chosen.placement, []
    if result.tried:
        rows = [
            (c.recipe, size_text(c.nbytes), bits_text(c.bits_per_weight), "fits" if c.placement.fits else "")
            for c in result.tried
        ]
        parts.append(table(("recipe or file type", "weights", BITS, ""), rows))
    if tensors:
        kinds = [kind for _, kind in chosen.outputs.entries()]
        places = list(zip(kinds, placement.places.items(), strict=True))
        headings = ("tensor", "type", "bytes", "device", "rule")
        parts.append(table(headings, places, lambda at: (at[1][0], at[0].type.name, at[0].nbytes, *at[1][1])))
    devices = [
        (d.name, d.tensors, *map(_mib, (d.weights, d.cache, d.compute, d.total, d.capacity, d.free))) for d in placement.devices
    ]
    parts.append(f"{chosen.recipe}: {size_text(chosen.nbytes)}, {bits_per_weight_text(chosen.bits_per_weight)}; sizes in MiB")
    parts.append(table(("device", "tensors", "weights", "KV cache", "compute", "total", "of", "free"), devices))
    rules = [(rule, n, _mib(size)) for rule, (n, size) in placement.hits.items()]
    if rules:
        parts.append(table(("-ot", "tensors", "weights"), rules))
    if result.cluster is not None:
        parts.append(_cluster_text(result.cluster))
    return "\n\n".join(parts)


def _cluster_text(forecast: ClusterForecast) -> str:
    rates, first = forecast.rates, forecast.rows[0].simulated
    rows = [
        (row.machines, row.pieces, duration(row.estimated), duration(row.simulated), f"{first / row.simulated:.1f}", row.bound)
        for row in forecast.rows
    ]
    headings = ("machines", "pieces", "estimated", "simulated", "times as fast", "bound by")
    read, write, network = (f"{rates[name] / 1e9:.3g} GB/s" for name in ("read", "write", "network"))
    return (
        f"projected, not measured: {rates['threads']} threads per machine; shared storage reads {read} and writes {write}; "
        f"network {network} per machine; output {rates['output']}\n{table(headings, rows)}"
    )


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.2f}"
