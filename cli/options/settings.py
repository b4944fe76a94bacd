"""The options that every verb which runs a model shares; they become the settings of `load_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from . import devices, flags
from .types import CpuMask, CpuRange, ExpertReduction

NUMA_MODES = ("distribute", "isolate", "numactl")  # of runtime.thread_placement, which takes long to import
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q4_0", "iq4_nl", "q8_KV")
CACHE_TYPE = click.Choice(CACHE_TYPES, case_sensitive=False)
N_CTX = click.IntRange(4, 2**31 - 1)
_SWITCH = {"on": True, "1": True, "off": False, "0": False}
SWITCH = click.Choice(tuple(_SWITCH), case_sensitive=False)
# an option of ik_llama.cpp for what is always done here; else -fmoe would be read as -f moe
fused_experts = click.option("-fmoe", "--fused-moe", is_flag=True, hidden=True, expose_value=False, help="Always so.")


def switch(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | None:
    return None if value is None else _SWITCH[value]


def _one_sequence(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Refuses more than the one sequence that all verbs but `serve` work on."""
    if value is not None and value > 1:
        raise click.BadParameter("several sequences at once are for `serve`; this works on one")


# The keyword that click gives the command -> the field of Settings, and the conversion of its value.
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "n_ctx": ("n_ctx", int),
    "threads": ("threads", int),
    "cpu_mask": ("cpus", tuple),
    "cpu_range": ("cpus", tuple),
    "numa": ("numa", str),
    "batch_size": ("batch", int),
    "ubatch_size": ("ubatch", int),
    "parallel": ("parallel", int),
    "cache_type_k": ("cache_k", str),
    "cache_type_v": ("cache_v", str),
    "flash_attn": ("flash", bool),
    "mla_use": ("mla", int),
    "attn_max_batch": ("attention_bytes", lambda mebibytes: mebibytes << 20),
    "run_time_repack": ("repack", bool),
    "smart_expert_reduction": ("expert_reduction", tuple),
    "ctx_checkpoints": ("checkpoints", int),
    "lora": ("lora", tuple),
    "architecture": ("architecture", str),
    "allow_lossy_config": ("allow_lossy_config", bool),
}


def _options(n_ctx: int | None, parallel: bool, in_windows: bool) -> list[flags.Decorator]:
    window = n_ctx or "the model's"
    passes = "Tokens per pass: whole windows, 2048 of longer ones." if in_windows else "Tokens per pass."
    return [
        click.option("-c", "--ctx-size", "n_ctx", type=N_CTX, help=f"Context in tokens. [default: {window}]"),
        click.option("-t", "--threads", type=click.IntRange(1), help="Threads. [default: all processors]"),
        click.option("-C", "--cpu-mask", type=CpuMask(), help="Run on these processors: bits of a hexadecimal number."),
        click.option("-Cr", "--cpu-range", type=CpuRange(), help="Run on these processors, and those of --cpu-mask."),
        click.option(
            "--numa",
            type=click.Choice(NUMA_MODES, case_sensitive=False),
            help="distribute: threads and memory over all NUMA nodes; isolate: on this node; numactl: as numactl has set it.",
        ),
        click.option("-b", "--batch-size", type=click.IntRange(1), help="Logical batch size in tokens. [default: 2048]"),
        click.option("-ub", "--ubatch-size", type=click.IntRange(1), help=f"{passes} [default: 2048]"),
        click.option("-ctk", "--cache-type-k", type=CACHE_TYPE, help="Type of the cached keys. [default: f16]"),
        click.option("-ctv", "--cache-type-v", type=CACHE_TYPE, help="Type of the cached values. [default: f16]"),
        click.option(
            "-fa",
            "--flash-attn",
            type=SWITCH,
            is_flag=False,
            flag_value="on",
            callback=switch,
            help="Attention whose scores are never stored. [default: on]",
        ),
        click.option(
            "-mla",
            "--mla-use",
            type=click.IntRange(0, 3),
            help="Latent attention: 0 caches keys and values, 1 latents twice, 2 and 3 once. [default: 3]",
        ),
        click.option(
            "-amb", "--attn-max-batch", metavar="MiB", type=click.IntRange(1), help="Most for its buffers. [default: 512]"
        ),
        click.option("-rtr", "--run-time-repack", is_flag=True, help="Interleave rows of the weights when loading, in memory."),
        click.option(
            "-ser",
            "--smart-expert-reduction",
            type=ExpertReduction(),
            help="Use N experts per token and more only if they weigh T times the strongest.",
        ),
        click.option(
            "--ctx-checkpoints",
            type=click.IntRange(1),
            help="Recurrent states of a sequence that are kept to go back to, of models with such layers. [default: 8]",
        ),
        fused_experts,
        *devices.OPTIONS,
        click.option(
            "--lora",
            multiple=True,
            metavar="FILE[=SCALE]",
            callback=lambda ctx, param, files: files or None,
            help="Run with a LoRA adapter, a GGUF or (of a checkpoint) a folder of peft; several add up.",
        ),
        flags.reading,
        click.option(
            "-np",
            "--parallel",
            type=click.IntRange(1),
            hidden=not parallel,  # else -np would be read as -n p
            callback=None if parallel else _one_sequence,
            help="Sequences served at once. [default: 1]",
        ),
    ]


def run_options(n_ctx: int | None = None, *, parallel: bool = False, in_windows: bool = False) -> flags.Decorator:
    """Adds all options to a command, which gets them as one keyword argument, `settings`: those that were given, by the names
    that the library has for them.

    n_ctx: the library's default for this verb, for the help; None: the model's own. parallel: the command works on several
    sequences at once, and -np says how many. in_windows: it runs a text window by window (see `Model.hidden_of_windows`).
    """

    def given(values: dict[str, Any]) -> dict[str, Any]:
        for name in ("run_time_repack", "allow_lossy_config"):
            values[name] = values[name] or None
        if values["cpu_mask"] is not None and values["cpu_range"] is not None:
            values["cpu_range"] = sorted({*values["cpu_mask"], *values["cpu_range"]})
        own = {_FIELDS[key][0]: _FIELDS[key][1](values[key]) for key in _FIELDS if values[key] is not None}
        return own | devices.settings_of(values)

    return flags.gathered(_options(n_ctx, parallel, in_windows), [*_FIELDS, *devices.FIELDS], "settings", given)
