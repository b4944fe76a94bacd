"""`ggufmill convert`: a Hugging Face checkpoint becomes a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..convert.lora.gguf import open_adapter
from ..convert.lora.peft_folder import is_peft_folder
from ..convert.outtype import adapter_types, outtype_rules
from ..convert.projectors.source import open_projector
from ..convert.projectors.types import projector_types
from ..formats import TYPES, TensorSource
from ..jobs.plan import Plan
from ..quantize.fixed_types import plan_types
from ..request_fields import fields_of, shared
from ..version import __version__
from .cluster.call import cluster_call
from .common.arguments import as_adapters, refuse_unused
from .common.progress import reporting
from .planning import Quantization, metadata_to_set, resolved
from .requests.convert import ConvertRequest
from .requests.groups import Splits
from .requests.quantize import QuantizeRequest
from .requests.verb import verb
from .writing.write_model import WriteResult, finished_without_source, write_model
from .writing.write_options import write_options


@verb(ConvertRequest)
def convert_model(request: ConvertRequest) -> WriteResult:
    """Converts a Hugging Face checkpoint, or a LoRA adapter of one, to a GGUF file.

    Returns a `WriteResult`. Raises FormatError for a checkpoint that is damaged or not supported, PlanError for what stands in
    the way before anything is written, MillError for what fails on the way, CheckFailed when `verify` finds a difference.

    Example:
        >>> from ggufmill import convert_model
        >>> from ggufmill.recipes import FOLDER
        >>> result = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", dry_run=True)
        >>> result.status, len(result.plan.outputs), result.plan.file_bytes
        ('planned', 74, 9596544)
    """
    call = cluster_call(plan_convert, request)
    out, source = Path(request.out), request.source
    request = resolved(request)
    options = write_options(request, call.resolved(request) if call is not None else None)
    if request.delete_source_shards:
        named = TYPES[request.outtype] if request.outtype not in ("auto", "mxfp4") else None
        earlier = finished_without_source(source, out, request.mla_layout, options, named, "", as_adapters(request.lora))
        if earlier is not None:
            return earlier
    opened, plan = _planned(request)
    with reporting(request.progress) as report:
        return write_model(
            plan,
            "convert",
            opened,
            options,
            report,
            delete_source_shards=request.delete_source_shards,
            partial_requant=request.partial_requant,
        )


def plan_convert(request: ConvertRequest) -> Plan:
    """The plan of a request: what a worker makes again."""
    return _planned(request)[1]


def _planned(request: ConvertRequest) -> tuple[TensorSource, Plan]:
    """The source of a resolved request, and its plan. Raises UsageError for arguments without effect."""
    source, splitting = request.source, [field.name for field in fields_of(Splits)]
    if not (is_peft_folder(source) or request.mmproj):
        refuse_unused(request, "an adapter (a folder with adapter_config.json)", "base")
        job = Quantization(_as_quantization(request))
        types, rules = outtype_rules(job.source, request.outtype, request.symmetric_q40)
        return job.source, job.plan(type=types, rules=rules)
    refuse_unused(request, "a text model", "program")
    keys: dict[str, Any] = {"override_kv": metadata_to_set(request), "allow_nonfinite": request.allow_nonfinite}
    keys |= {"rule": f"--outtype {request.outtype}", "version": __version__}
    if is_peft_folder(source):
        refuse_unused(request, "a text model: an adapter is one file", *splitting)
        refuse_unused(request, "a checkpoint, not an adapter", "lora", "symmetric_q40", "vocab")
        opened = open_adapter(source, request.base, request.mla_layout, request.architecture)
        return opened, plan_types(opened, request.out, adapter_types(opened, request.outtype), **keys)
    refuse_unused(request, "a text model: llama.cpp reads a projector from one file", *splitting)
    refuse_unused(request, "a text model", "lora", "base", "vocab")
    opened = open_projector(source, remote=request.remote)
    types, file_type = projector_types(opened, request.outtype)
    return opened, plan_types(opened, request.out, types, file_type=file_type, **keys)


def _as_quantization(request: ConvertRequest) -> QuantizeRequest:
    """Converting is quantising to the outtype, of weights that a checkpoint may store quantised."""
    return shared(request, QuantizeRequest, allow_requantize=True)
