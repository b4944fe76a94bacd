"""`ggufmill plan` says what goes where in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.messages import duration, gib
from .command import Verb
from .display.console import call, table
from .options import devices, flags
from .options.settings import CACHE_TYPE, SWITCH, fused_experts, switch
from .options.types import FILE_TYPE, MEMORIES, MEMORY, SIZE, Listed, Source

if TYPE_CHECKING:
    from ..pipeline.cluster.forecast import ClusterForecast
    from ..pipeline.plan import MemoryPlan


@click.command(cls=Verb)
@click.argument("model", type=Source())
@click.option("--ram", type=MEMORY, metavar="SIZE", help="Memory of the machine (256G, 256GiB). [default: not limited]")
@click.option(
    "--vram",
    type=MEMORIES,
    default=(),
    metavar="SIZE,...",
    help="Memory of each GPU (24GiB,24GiB). [default: what torch finds]",
)
@devices.device
@click.option(
    "-c", "--ctx-size", "n_ctx", type=click.IntRange(1, 2**31 - 1), default=32768, show_default=True, help="Context in tokens."
)
@click.option("-ub", "--ubatch-size", "ubatch", type=click.IntRange(1), default=512, show_default=True, help="Tokens per pass.")
@click.option("-ctk", "--cache-type-k", "cache_k", type=CACHE_TYPE, help="Type of cached keys. [default: f16]")
@click.option("-ctv", "--cache-type-v", "cache_v", type=CACHE_TYPE, help="Type of cached values. [default: f16]")
@click.option("-mla", "--mla-use", "mla", type=click.IntRange(0, 3), help="Latent attention's mode. [default: 3]")
@click.option(
    "-fa",
    "--flash-attn",
    "flash",
    type=SWITCH,
    is_flag=False,
    flag_value="on",
    default="on",
    show_default=True,
    callback=switch,
    help="No scores stored.",
)
@click.option("-amb", "--attn-max-batch", metavar="MiB", type=click.IntRange(1), help="Bound of attention's buffer.")
@devices.rules
@fused_experts
@click.option("--recipe", metavar="FILE", help="Recipe that the model is to be quantised by. [default: all are tried]")
@click.option("--type", "type", type=FILE_TYPE, help="File type for what no rule takes.")
@flags.mla_layout
@flags.mtp
@flags.reading
@flags.program
@click.option(
    "--cluster",
    type=Listed(int, "a number of machines such as 8"),
    is_flag=False,
    flag_value="1,2,4,8,16,32,64",
    default=(),
    metavar="[N,...]",
    help="How long making the model takes on N machines, simulated. [without numbers: 1 to 64]",
)
@click.option("--cluster-threads", type=click.IntRange(1), help="Of each of these machines. [default: as this one has]")
@click.option("--cluster-output", type=click.Choice(("shared", "collect")), help="As of `quantize`. [default: shared]")
@click.option("--read-rate", type=SIZE, metavar="SIZE", help="Bytes per second that their storage reads for all together.")
@click.option("--write-rate", type=SIZE, metavar="SIZE", help="Bytes per second that it writes.")
@click.option("--network-rate", type=SIZE, metavar="SIZE", help="Bytes per second of a machine's network, each way.")
@click.option("--encode-rate", type=float, help="Weights per second of a thread. [default: measured here for each type]")
@click.option("--tensors", is_flag=True, help="Show every tensor.")
@flags.as_json
def command(model: Any, tensors: bool, as_json: bool, **options: Any) -> None:
    """What of MODEL (a GGUF or a Hugging Face folder) goes where, and whether it fits: weights, KV cache, compute buffers.

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

    call(plan_memory, model, show=lambda result: _text(result, tensors), as_json=as_json, bars=False, **options)


def _text(result: MemoryPlan, tensors: bool) -> str:
    """tensors: with a row for each."""
    chosen, placement, parts = result.chosen, result.chosen.placement, []
    if result.tried:
        rows = [(c.recipe, gib(c.nbytes), f"{c.bits_per_weight:.3f}", "fits" if c.placement.fits else "") for c in result.tried]
        parts.append(table(("recipe or file type", "weights", "bits", ""), rows))
    if tensors:
        kinds = [kind for _, kind in chosen.outputs.entries()]
        places = list(zip(kinds, placement.places.items(), strict=True))
        headings = ("tensor", "type", "bytes", "device", "rule")
        parts.append(table(headings, places, lambda at: (at[1][0], at[0].type.name, at[0].nbytes, *at[1][1])))
    devices = [
        (d.name, d.tensors, *map(_mib, (d.weights, d.cache, d.compute, d.total, d.capacity, d.free))) for d in placement.devices
    ]
    parts.append(f"{chosen.recipe}: {gib(chosen.nbytes)}, {chosen.bits_per_weight:.3f} bits per weight; sizes in MiB")
    parts.append(table(("device", "tensors", "weights", "KV cache", "compute", "in all", "of", "free"), devices))
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
