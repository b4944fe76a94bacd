"""The options that every verb which runs a model shares; they become the settings of `load_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.console import warn
from . import flags

if TYPE_CHECKING:
    from ...formats import TensorSource
    from ...runtime import Model

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q4_0", "iq4_nl", "q8_KV")
N_CTX = click.IntRange(4, 2**31 - 1)
_SWITCH = {"on": True, "1": True, "off": False, "0": False}


class Reduction(click.ParamType):
    """`N,T`: at least N experts per token, of the others those that weigh at least T times the strongest."""

    name = "N,T"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        count, _, share = value.partition(",")
        try:
            return int(count), float(share)
        except ValueError:
            self.fail(f"{value!r} is not N,T: a number of experts and a share of the strongest, like 6,0.4", param, ctx)


def _switch(ctx: click.Context, param: click.Parameter, value: str) -> bool:
    return _SWITCH[value]


def _alone(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Refuses more than the one sequence that all verbs but `serve` work on."""
    if value is not None and value > 1:
        raise click.BadParameter("several sequences at once are for `serve`; this works on one")


# The keyword that click gives the command -> the field of Settings, and how its value gets there.
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "n_ctx": ("n_ctx", int),
    "threads": ("threads", int),
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
}


def _options(n_ctx: int | None, parallel: bool) -> list[Callable[[Callable], Callable]]:
    cache = click.Choice(CACHE_TYPES, case_sensitive=False)
    switch = click.Choice(tuple(_SWITCH), case_sensitive=False)
    window = "Context in tokens." if n_ctx else "Context in tokens. [default: the model's]"
    return [
        click.option("-c", "--ctx-size", "n_ctx", type=N_CTX, default=n_ctx, show_default=bool(n_ctx), help=window),
        click.option("-t", "--threads", type=click.IntRange(1), help="Threads. [default: all processors]"),
        click.option("-b", "--batch-size", type=click.IntRange(1), help="Tokens taken on together. [default: 2048]"),
        click.option("-ub", "--ubatch-size", type=click.IntRange(1), help="Tokens per pass. [default: 2048]"),
        click.option("-ctk", "--cache-type-k", type=cache, help="Type of the cached keys. [default: f16]"),
        click.option("-ctv", "--cache-type-v", type=cache, help="Type of the cached values. [default: f16]"),
        click.option(
            "-fa",
            "--flash-attn",
            type=switch,
            default="on",
            show_default=True,
            is_flag=False,
            flag_value="on",
            callback=_switch,
            help="Attention whose scores are never stored.",
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
            type=Reduction(),
            help="Use N experts per token and more only if they weigh T times the strongest.",
        ),
        click.option(
            "-np",
            "--parallel",
            type=click.IntRange(1),
            hidden=not parallel,  # else -np would be read as -n p
            callback=None if parallel else _alone,
            help="Sequences served at once. [default: 1]",
        ),
    ]


def run_options(n_ctx: int | None = None, *, parallel: bool = False) -> Callable[[Callable], Callable]:
    """Adds all options to a command, which gets them as one keyword argument, `settings`: a dict for load_model.

    n_ctx: the command's default; with None, settings["n_ctx"] is only there if it was given. Options that were not given are
    left out, so that the defaults are those of `Settings`. parallel: the command works on several sequences, -np says how many.
    """

    def chosen(values: dict[str, Any]) -> dict[str, Any]:
        return {_FIELDS[key][0]: _FIELDS[key][1](value) for key, value in values.items() if value is not None}

    return flags.gathered(_options(n_ctx, parallel), list(_FIELDS), "settings", chosen)


def load(source: TensorSource, settings: dict[str, Any]) -> Model:
    """load_model; what was copied into memory is said on stderr."""
    from ...runtime import load_model

    model = load_model(source, **settings)
    if model.packed_bytes:
        click.echo(f"{source.path}: {model.packed_bytes / 2**20:.1f} MiB of weights interleaved in memory", err=True)
    return model


def load_to_generate(source: TensorSource, settings: dict[str, Any]) -> Model:
    """As `load`; a context in which the model was not trained is said, too: what is written there may make no sense."""
    model = load(source, settings)
    if "n_ctx" in settings:
        from ...runtime.evaluate.perplexity import context_notes

        warn(context_notes(model, None, model.n_ctx))
    return model
