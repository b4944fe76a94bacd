"""`ggufmill convert`: a Hugging Face checkpoint becomes a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..convert import open_source
from ..convert.hub.fetch import is_repository
from ..convert.lora.gguf import open_adapter
from ..convert.lora.peft_folder import is_peft_folder
from ..convert.model_card import file_metadata
from ..convert.outtype import adapter_types, outtype_rules
from ..convert.projectors.source import open_projector
from ..convert.projectors.types import projector_types
from ..formats import TYPES
from ..quantize.fixed_types import plan_types
from ..quantize.planning import plan_quantize
from ..request_fields import values_of
from ..version import __version__
from .cluster.call import cluster_call
from .common.arguments import as_adapters, as_bytes, refuse_unused
from .common.programs import layout_for
from .common.progress import reporting
from .requests.convert import ConvertRequest
from .requests.sources import reading_of
from .requests.verb import verb
from .writing.write_model import WriteResult, finished_without_source, write_model, write_options


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
    call = cluster_call("convert_model", values_of(request))
    out, source, options = Path(request.out), request.source, write_options(request, call)
    layout = layout_for(request.program, source, request.mla_layout)
    named = TYPES[request.outtype] if request.outtype not in ("auto", "mxfp4") else None
    if request.delete_source_shards:
        earlier = finished_without_source(source, out, layout, options, named, "", as_adapters(request.lora))
        if earlier is not None:
            return earlier
    replaced: list[tuple[str, int]] | None = [] if request.allow_nonfinite else None
    keys = metadata_to_set(request.metadata, request.override_kv)
    planning: dict[str, Any] = {"override_kv": keys, "nonfinite_counts": replaced, "version": __version__}
    splitting = {"--split-max-size": request.split_max_size, "--split-max-tensors": request.split_max_tensors}
    splitting["--no-tensor-first-split"] = not request.tensor_first_split
    if is_peft_folder(source) or request.mmproj:
        refuse_unused({"--for": request.program}, "a text model")
    adapters = {"--lora": as_adapters(request.lora)}
    remote = request.remote or ((request.dry_run or request.cluster is not None) and is_repository(source))
    rule = f"--outtype {request.outtype}"
    if is_peft_folder(source):
        refuse_unused(splitting, "a text model: an adapter is one file")
        given = {**adapters, "--symmetric-q40": request.symmetric_q40, "--no-vocab": not request.vocab}
        refuse_unused(given, "a checkpoint, not an adapter")
        opened = open_adapter(source, request.base, layout, request.architecture)
        plan = plan_types(opened, out, adapter_types(opened, request.outtype), rule=rule, **planning)
    elif request.mmproj:
        refuse_unused(splitting, "a text model: llama.cpp reads a projector from one file")
        refuse_unused({**adapters, "--base": request.base, "--no-vocab": not request.vocab}, "a text model")
        opened = open_projector(source, remote=remote)
        types, file_type = projector_types(opened, request.outtype)
        plan = plan_types(opened, out, types, file_type=file_type, rule=rule, **planning)
    else:
        refuse_unused({"--base": request.base}, "an adapter (a folder with adapter_config.json)")
        opened = open_source(source, **reading_of(request) | {"mla_layout": layout, "remote": remote})
        weights, rules = outtype_rules(opened, request.outtype, request.symmetric_q40)
        plan = plan_quantize(
            opened,
            out,
            type=weights,
            rules=rules,
            allow_requantize=True,
            program=request.program,
            split_max_size=as_bytes(request.split_max_size),
            split_max_tensors=request.split_max_tensors,
            tensor_first_split=request.tensor_first_split,
            **planning,
        )
    with reporting(request.progress) as report:
        return write_model(
            plan,
            "convert",
            opened,
            options,
            report,
            replaced=replaced,
            delete_source_shards=request.delete_source_shards,
            partial_requant=request.partial_requant,
        )


def metadata_to_set(metadata: str | Path | None, override_kv: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys of a JSON file, and those that beat them. Raises as `file_metadata`."""
    return {**(file_metadata(Path(metadata)) if metadata is not None else {}), **(override_kv or {})}
