"""What `plan` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...request_fields import argument, option, request
from ...runtime.settings import CACHE_TYPES
from ..common.arguments import FileType, Size
from .groups import SourceOptions


@request
class ForecastOptions:
    """The cluster for which it is forecast how long making the model takes."""

    cluster: int | Sequence[int] = option(
        "How long making the model takes on N machines, simulated. [without numbers: 1 to 64]",
        doc="Numbers of machines, such as (1, 8, 64): how long making the model takes on a cluster of them, simulated.",
        default=(),
        kind="machines",
        metavar="[N,...]",
    )
    cluster_threads: int | None = option("Of each of these machines.", default=None, least=1, shown="as this one has")
    cluster_output: str | None = option("As of `quantize`.", default=None, choices=("shared", "collect"), shown="shared")
    read_rate: Size | None = option("Bytes per second that their storage reads for all together.", default=None, kind="size")
    write_rate: Size | None = option("Bytes per second that it writes.", default=None, kind="size")
    network_rate: Size | None = option("Bytes per second of a machine's network, each way.", default=None, kind="size")
    encode_rate: float | None = option("Weights per second of a thread.", default=None, shown="measured here for each type")


@request
class PlanRequest(SourceOptions, ForecastOptions):
    model: str | Path = argument(
        "A GGUF file, a checkpoint's folder or hf:OWNER/NAME, of which the headers are read.", kind="source", kw_only=False
    )
    ram: Size | None = option(
        "Memory of the machine (256G, 256GiB).", default=None, kind="memory", metavar="SIZE", shown="not limited"
    )
    vram: Size | Sequence[Size] = option(
        "Memory of each GPU (24GiB,24GiB).", default=(), kind="memories", metavar="SIZE,...", shown="what torch finds"
    )
    device: str | Sequence[str] | None = option(
        "Devices of torch: cuda (all), cuda:1, xpu, mps, cpu, auto; or none.",
        doc="Devices of torch, as for `load_model`, with the memory that they and the machine have free.",
        default=None,
        flags="-dev --device",
        kind="device_names",
        metavar="NAME,...",
        shown="those that there are, if torch is installed",
    )
    n_ctx: int = option("Context in tokens.", default=32768, flags="-c --ctx-size", least=1, most=2**31 - 1)
    ubatch: int = option("Tokens per pass.", default=512, flags="-ub --ubatch-size", least=1)
    cache_k: str | None = option(
        "Type of cached keys.", default=None, flags="-ctk --cache-type-k", choices=CACHE_TYPES, shown="f16"
    )
    cache_v: str | None = option(
        "Type of cached values.", default=None, flags="-ctv --cache-type-v", choices=CACHE_TYPES, shown="f16"
    )
    mla: int | None = option("Latent attention's mode.", default=None, flags="-mla --mla-use", least=0, most=3, shown="3")
    flash: bool = option(
        "Attention whose scores are not stored.", default=True, flags="-fa --flash-attn", kind="switch", shown="on"
    )
    attn_max_batch: int | None = option(
        "Bound of attention's buffer, in MiB.", default=None, flags="-amb --attn-max-batch", least=1, metavar="MiB"
    )
    n_gpu_layers: int | None = option(
        "Layers on devices, the last ones.",
        default=None,
        flags="-ngl --n-gpu-layers --gpu-layers",
        least=0,
        shown="all",
    )
    override_tensor: str | Sequence[str] = option(
        "CPU, CUDA0, ... for the tensors that match; the first match wins.",
        default=(),
        flags="-ot --override-tensor",
        kind="texts",
        metavar="REGEX=DEVICE,...",
    )
    cpu_moe: bool = option("Experts stay in RAM.", default=False)
    n_cpu_moe: int | None = option("The experts of the first N layers stay in RAM.", default=None, least=0)
    tensor_split: Sequence[float] | None = option(
        "Shares of the devices in the layers.",
        default=None,
        flags="-ts --tensor-split",
        kind="shares",
        metavar="N,N,...",
        shown="by memory",
    )
    recipe: str | Path | None = option(
        "Recipe that the model is to be quantised by.", default=None, kind="name", metavar="FILE", shown="all are tried"
    )
    type: FileType | None = option("File type for what no rule takes.", default=None, kind="file_type")
