"""What `plan` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ...request_fields import argument, option, request
from ...runtime.settings import CacheTypes, LayerPlacement
from ..common.arguments import FileType, Size
from .groups import SourceOptions


@request
class ForecastOptions:
    """The cluster for which it is forecast how long making the model takes."""

    section: ClassVar[str] = "Forecast of a cluster"

    cluster: int | Sequence[int] = option(
        "Simulate how long making the model takes on N machines. [without numbers: 1 to 64]",
        doc="Numbers of machines, such as (1, 8, 64): how long making the model takes on a cluster of them, simulated.",
        default=(),
        kind="machines",
        metavar="[N,...]",
    )
    cluster_threads: int | None = option(
        "Give each of these machines this many threads.", default=None, least=1, shown="as this one has", rare=True
    )
    cluster_output: str | None = option(
        "Let workers write into a shared folder, or send what they make, as in `quantize`.",
        default=None,
        choices=("shared", "collect"),
        shown="shared",
        rare=True,
    )
    read_rate: Size | None = option(
        "Assume that their storage reads this many bytes per second for all together.", default=None, kind="size", rare=True
    )
    write_rate: Size | None = option("Assume that it writes this many bytes per second.", default=None, kind="size", rare=True)
    network_rate: Size | None = option(
        "Assume that a machine's network carries this many bytes per second, each way.", default=None, kind="size", rare=True
    )
    encode_rate: float | None = option(
        "Assume that a thread encodes this many weights per second.",
        default=None,
        shown="measured here for each type",
        rare=True,
    )


@request
class PlanRequest(SourceOptions, CacheTypes, ForecastOptions, LayerPlacement):
    model: str | Path = argument(
        "A GGUF file, a checkpoint's folder or hf:OWNER/NAME, of which the headers are read.", kind="source", kw_only=False
    )
    ram: Size | None = option(
        "Fit the model into this much RAM (256G, 256GiB).",
        default=None,
        kind="size",
        metavar="SIZE",
        shown="not limited",
    )
    vram: Size | Sequence[Size] = option(
        "Use this much memory of each GPU (24GiB,24GiB).",
        default=(),
        kind="sizes",
        metavar="SIZE,...",
        shown="what torch finds",
    )
    device: str | Sequence[str] | None = option(
        "Use these devices of torch: cuda (all), cuda:1, xpu, mps, cpu, auto; or none.",
        doc="Devices of torch, as for `load_model`, with the memory that they and the machine have free.",
        default=None,
        flags="-dev --device",
        kind="device_names",
        metavar="NAME,...",
        shown="those that there are, if torch is installed",
    )
    n_ctx: int = option("Plan a context of this many tokens.", default=32768, flags="-c --ctx-size", least=1, most=2**31 - 1)
    ubatch: int = option("Run this many tokens per pass.", default=512, flags="-ub --ubatch-size", least=1, rare=True)
    mla: int | None = option(
        "Compute latent attention in this way.", default=None, flags="-mla --mla-use", least=0, most=3, shown="3", rare=True
    )
    flash: bool = option(
        "Use flash attention, which never stores all scores.",
        default=True,
        flags="-fa --flash-attn",
        kind="switch",
        shown="on",
        rare=True,
    )
    attn_max_batch: int | None = option(
        "Use at most this many MiB for the buffers of attention.",
        default=None,
        flags="-amb --attn-max-batch",
        least=1,
        metavar="MiB",
        rare=True,
    )
    recipe: str | Path | None = option(
        "Plan the model as this recipe quantises it.", default=None, kind="name", metavar="FILE", shown="all are tried"
    )
    type: FileType | None = option("Give tensors that no rule takes this file type.", default=None, kind="file_type")
