"""`ggufmill convert`: a Hugging Face checkpoint becomes a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
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
from .cluster.call import cluster_call
from .common.arguments import Size, as_adapters, as_bytes, refuse_unused
from .common.programs import layout_for
from .common.progress import OnProgress, reporting
from .writing.write_model import WriteOptions, WriteResult, finished_without_source, write_model


def convert_model(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    mmproj: bool = False,
    outtype: str = "auto",
    symmetric_q40: bool = False,
    mla_layout: str | None = None,
    mtp: bool | None = None,
    vocab: bool = True,
    architecture: str | None = None,
    allow_lossy_config: bool = False,
    program: str | None = None,
    lora: str | Path | Sequence[str | Path] = (),
    allow_nonfinite: bool = False,
    remote: bool = False,
    delete_source_shards: bool = False,
    metadata: str | Path | None = None,
    override_kv: Mapping[str, Any] | None = None,
    split_max_size: Size | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
    partial_requant: bool = False,
    verify: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    cluster: str | None = None,
    cluster_output: str | None = None,
    progress: OnProgress | bool | None = None,
) -> WriteResult:
    """Converts a Hugging Face checkpoint, or a LoRA adapter of one, to a GGUF file.

    source                a checkpoint folder, or hf:OWNER/NAME[@REVISION], which is downloaded into the hub's cache; or a
                          folder of peft (adapter_config.json), which becomes an adapter as convert_lora_to_gguf.py makes it
    out                   the file to write
    base                  of an adapter: the model that it changes, of which config.json is read; None: where the adapter says
    mmproj                instead of the text model, its vision and audio towers, as llama.cpp's projector file; auto is f16
    outtype               type of the weights: auto (f16 for an f16 checkpoint, else bf16; weights stored in mxfp4 and nvfp4
                          stay in it, symmetric int4 in groups of 32 becomes q4_0, both without loss), f32, f16, bf16, q8_0
                          or mxfp4 (all experts); norms, routers and biases are f32
    symmetric_q40         weights stored in symmetric int4 with groups of 32 become q4_0 without loss, whatever outtype says; an
                          error if there are none, or int4 weights of another form
    mla_layout            matrices of DeepSeek's latent attention: 'ik' (default), 'mainline' or 'legacy'
    mtp                   draft layers (multi-token prediction) are kept, or left out; None: they are kept where the checkpoint
                          has them, unless it is DeepSeek-V3 in a layout for ik_llama.cpp, which does not load them
    vocab                 False: the file has no vocabulary; else a checkpoint without a tokenizer is an error, since nothing
                          could run the file
    architecture          as which the checkpoint is converted, a name as in config.json's architectures; None: what is there
    allow_lossy_config    settings that a GGUF cannot say, and without which the model still makes sense, are left out; they are
                          warnings, and in the file's metadata (`ggufmill.lost_config`)
    program               that is to load the file: 'llama.cpp', 'ik_llama.cpp' or 'ollama'. Types and layout are what it knows,
                          what it does not know is an error; None: any
    lora                  LoRA adapters, FILE or FILE=SCALE, which are merged into the weights: a GGUF or a folder of peft
    allow_nonfinite       weights that are NaN or infinite are written as 0 and counted in `replaced`; else they are errors
    remote                weights of a repository are read as they are needed, without downloading its files
    delete_source_shards  DELETES each file of the checkpoint once all its tensors are written
    metadata              a JSON file of metadata keys to set; override_kv, a dict of keys and values, beats it
    split_max_size        bytes per file at most, a number or a text such as '50G'; split_max_tensors: tensors per file
    tensor_first_split    False: the first file of a split holds the metadata only
    partial_requant       files of the split that are there already stay as they are
    verify                a sample of every tensor is read back and compared with the source
    manifest              OUT.manifest is written, with the sha256 of every tensor
    dry_run               nothing is written; the result has the plan and what it takes
    resume, force         an interrupted job is continued; an existing output is replaced
    threads               workers; None: one per processor
    cluster               other machines do the work: tcp://HOST:PORT or the scheduler file of dask.distributed, or 'local:N'
    cluster_output        'shared' (default: workers write into the output's folder, which all see under the same path), or
                          'collect' (they send what they make)
    progress              stage 'convert' in bytes, then 'checksums' and 'verify'; see pipeline/common/progress.py

    Returns a `WriteResult`. Raises FormatError for a checkpoint that is damaged or not supported, PlanError for what stands in
    the way before anything is written, MillError for what fails on the way, CheckFailed when `verify` finds a difference.

    Example:
        >>> from ggufmill import convert_model
        >>> from ggufmill.recipes import FOLDER
        >>> result = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", dry_run=True)
        >>> result.status, len(result.plan.outputs), result.plan.file_bytes
        ('planned', 74, 9596544)
    """
    call = cluster_call("convert_model", locals())
    out, options = Path(out), WriteOptions(verify, manifest, dry_run, resume, force, threads, cluster=call)
    mla_layout = layout_for(program, source, mla_layout)
    named = TYPES[outtype] if outtype not in ("auto", "mxfp4") else None
    if delete_source_shards:
        earlier = finished_without_source(source, out, mla_layout, options, named, "", as_adapters(lora))
        if earlier is not None:
            return earlier
    replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
    keys = metadata_to_set(metadata, override_kv)
    planning: dict[str, Any] = {"override_kv": keys, "nonfinite_counts": replaced, "version": __version__}
    splitting = {"--split-max-size": split_max_size, "--split-max-tensors": split_max_tensors}
    splitting["--no-tensor-first-split"] = not tensor_first_split
    if is_peft_folder(source) or mmproj:
        refuse_unused({"--for": program}, "a text model")
    if is_peft_folder(source):
        refuse_unused(splitting, "a text model: an adapter is one file")
        given = {"--lora": as_adapters(lora), "--symmetric-q40": symmetric_q40, "--no-vocab": not vocab}
        refuse_unused(given, "a checkpoint, not an adapter")
        opened = open_adapter(source, base, mla_layout, architecture)
        plan = plan_types(opened, out, adapter_types(opened, outtype), rule=f"--outtype {outtype}", **planning)
    elif mmproj:
        refuse_unused(splitting, "a text model: llama.cpp reads a projector from one file")
        refuse_unused({"--lora": as_adapters(lora), "--base": base, "--no-vocab": not vocab}, "a text model")
        opened = open_projector(source, remote=remote or ((dry_run or cluster is not None) and is_repository(source)))
        types, file_type = projector_types(opened, outtype)
        plan = plan_types(opened, out, types, file_type=file_type, rule=f"--outtype {outtype}", **planning)
    else:
        refuse_unused({"--base": base}, "an adapter (a folder with adapter_config.json)")
        opened = open_source(
            source,
            mla_layout=mla_layout,
            mtp=mtp,
            vocab=vocab,
            remote=remote or ((dry_run or cluster is not None) and is_repository(source)),
            architecture=architecture,
            allow_lossy_config=allow_lossy_config,
            lora=as_adapters(lora),
        )
        weights, rules = outtype_rules(opened, outtype, symmetric_q40)
        plan = plan_quantize(
            opened,
            out,
            type=weights,
            rules=rules,
            allow_requantize=True,
            program=program,
            split_max_size=as_bytes(split_max_size),
            split_max_tensors=split_max_tensors,
            tensor_first_split=tensor_first_split,
            **planning,
        )
    with reporting(progress) as report:
        return write_model(
            plan,
            "convert",
            opened,
            options,
            report,
            replaced=replaced,
            delete_source_shards=delete_source_shards,
            partial_requant=partial_requant,
        )


def metadata_to_set(metadata: str | Path | None, override_kv: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys of a JSON file, and those that beat them. Raises as `file_metadata`."""
    return {**(file_metadata(Path(metadata)) if metadata is not None else {}), **(override_kv or {})}
