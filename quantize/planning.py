"""Planning a quantise or convert job: source, recipe and importance in; for every tensor its type and what decided it out."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from ..formats.loader_facts import LoaderTensor
from ..formats.loaders import loader_problems
from ..jobs.outputs import Output, Outputs
from ..jobs.plan import Plan, make_plan
from .importance import Importance
from .plan_warnings import PlanWarnings, warnings_of
from .prune import draft_layer_prefixes
from .recipes.loader_types import LoaderTypes
from .recipes.mixes import file_type_id
from .recipes.recipe import strip_folders
from .recipes.rules import Rule
from .recipes.type_selection import (
    EMBEDDINGS,
    INTEGER_TYPES,
    OUTPUT,
    Selection,
    TypeOverrides,
    TypeSelector,
)
from .tensor_outputs import TensorOutputs, kind_of, repacks, uses_importance
from .tensor_scale import shards_with_scales

if TYPE_CHECKING:
    from .covariance.source import Covariances

_OWN_KEYS = (
    "split.",
    "quantize.imatrix.",
    "quantize.covariance.",
    "quantize.tuning.",
    "ggufmill.recipe",
    "ggufmill.rule_hits",
    "ggufmill.version",
)


def plan_quantize(
    source: TensorSource,
    out: str | Path,
    *,
    type: TensorType | str | None = None,
    rules: Sequence[Rule] = (),
    recipe_text: str = "",
    importance: Importance | None = None,
    covariances: Covariances | None = None,
    overrides: TypeOverrides | None = None,
    pure: bool = False,
    allow_requantize: bool = False,
    ignore_imatrix_rules: bool = False,
    hide_imatrix: bool = False,
    strict: bool = False,
    allow_nonfinite: bool = False,
    device: str | None = None,
    override_kv: Mapping[str, Any] | None = None,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
    keep_split: bool = False,
    variant: str = "",
    version: str = "",
    program: str | None = None,
) -> Plan:
    """The plan of a quantise or convert job. No tensor data is read.

    type              for tensors that no rule matches: a type; the name of a file type ('Q4_K_M'), whose mix applies; or None:
                      they keep their type, and fp8 becomes bf16
    rules             apply whatever `type` is, a float type too (where llama-quantize silently ignores them)
    recipe_text       recorded in the file's metadata, local paths reduced to file names
    importance        for the encoders of all quantised tensors
    covariances       of their inputs, which let codes make up for the errors of others; their diagonals stand in for importance
    overrides         types that flags give single tensors and roles
    pure              every quantisable tensor becomes `type`: mix and rules are ignored
    strict            every warning is an error
    allow_nonfinite   weights that are NaN or infinite are written as 0, and counted in the plan's `replaced`; else they are
                      errors when the plan is executed
    device            as torch names it; the bytes are the same (see docs/devices.md)
    override_kv       metadata to set
    split_max_size, split_max_tensors, tensor_first_split  see `make_plan`
    keep_split        each file holds the same tensors as in the source, which has to be a split GGUF
    variant           what was made of the source before, in words: files of a split are named by it
    version           of the program, for the metadata
    program           that is to load the file, one of `loaders.PROGRAMS`: types, layout and fallbacks are its own

    Raises PlanError for what cannot or must not be done; its text says what to do instead.
    """
    noticed, overrides = PlanWarnings(draft_layers=draft_layer_prefixes(source)), overrides or TypeOverrides()
    if pure and overrides.roles:
        raise PlanError(
            "--pure gives every weight the same type: leave it out, or the options that give roles one of their own"
        )
    weighted = importance is not None or covariances is not None
    selector = TypeSelector(source, type, rules, overrides, weighted, pure, program)
    if overrides.leave_output and selector.tied:
        noticed.messages.append("the model has no output.weight to leave as it is: its embeddings serve as output too")
    replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
    tensor_outputs = TensorOutputs(source.tensors, importance, covariances, replaced, device)
    outputs = _choose(source, selector, tensor_outputs, noticed, allow_requantize, ignore_imatrix_rules)
    if overrides.extra_output is not None:
        outputs.append(_extra_output(source, overrides.extra_output, outputs, tensor_outputs, selector.types))
    warnings = warnings_of(noticed, selector, rules, outputs)
    if covariances is not None and noticed.largest_covariance > covariances.cache.memory:
        warnings.append(
            f"one covariance takes {noticed.largest_covariance:,} bytes when it is prepared, more than the "
            f"{covariances.cache.memory:,} of --memory: no other is prepared beside it"
        )
    if strict and warnings:
        raise PlanError("--strict: " + "; ".join(warnings))
    if strict and covariances is not None and not noticed.with_covariance:
        raise PlanError("--strict: the covariance is used for no tensor")
    provenance = dict(importance.metadata) if importance is not None else {}
    content: list[Any] = [version, variant, importance_digest(importance)]
    if covariances is not None:
        provenance |= covariances.provenance(noticed.with_covariance)
        content += [covariances.identity, covariances.effort]
    metadata = _metadata(source, outputs, type, recipe_text, provenance, hide_imatrix, version)
    metadata |= dict(override_kv or {})
    plan = make_plan(
        outputs,
        metadata,
        out,
        identity=json.dumps([source.identity, *content]),
        content=json.dumps(content),
        split_max_size=split_max_size,
        split_max_tensors=split_max_tensors,
        tensor_first_split=tensor_first_split,
        shards=shards_with_scales(source.split(), outputs) if keep_split else None,
        warnings=warnings,
        replaced=replaced,
    )
    check_loads(plan, program)
    if covariances is None:
        return plan
    needed, given = noticed.covariance_bytes, covariances.cache.memory
    return replace(plan, covariance_bytes=max(noticed.largest_covariance, min(needed, given)))


def outputs_of(source: TensorSource, type: TensorType | str, importance: Importance) -> Outputs:
    """The tensors of `plan_quantize` for a type or file type alone, whether they were quantised before or should have other
    importance: the part of a plan that says how large the weights are, in little time. Raises PlanError as there."""
    selector = TypeSelector(source, type, (), TypeOverrides(), has_imatrix=True)
    tensor_outputs = TensorOutputs(source.tensors, importance, None, None, None)
    return _choose(source, selector, tensor_outputs, PlanWarnings(), allow_requantize=True, ignore_soft=True)


def _choose(
    source: TensorSource,
    selector: TypeSelector,
    tensor_outputs: TensorOutputs,
    noticed: PlanWarnings,
    allow_requantize: bool,
    ignore_soft: bool,
) -> Outputs:
    """What the tensors of a source become: those that nothing tells apart are looked at once."""
    importance, covariances = tensor_outputs.importance, tensor_outputs.covariances
    outputs, numbers, has_own = Outputs(tensor_outputs.produce), array("I"), False
    groups, by_name = source.groups, covariances is not None or (importance is not None and importance.tells_apart)
    places, like = groups.to_look_at([by_name or selector.tells_apart(tensor) for tensor in groups.first])
    for place, n in zip(places.tolist(), np.bincount(like).tolist(), strict=True):
        tensor = groups.first_at(place) or source.tensors[groups.names[place]]
        selection = selector.select(tensor, n)
        if _is_quantized(tensor) and not allow_requantize and not repacks(tensor, selection.type):
            raise PlanError(
                f"{tensor.name} is {tensor.source_type} already; quantising it again to {selection.type.name} adds a second "
                "error: start from the f16 or bf16 model, or say --allow-requantize"
            )
        if uses_importance(tensor, selection.type):
            noticed.note_covariance(tensor, selection.type, covariances)
            if not tensor_outputs.has_importance(tensor):
                file_type_needs_it = selector.file_type == "Q2_K_S" and selection.type.name == "q2_K"
                _check_importance(tensor, n, selection.type, importance, ignore_soft, noticed, file_type_needs_it)
        numbers.append(outputs.number(kind_of(tensor, selection)))
        has_own = has_own or tensor_outputs.is_own(tensor, selection.type)
    number_of = np.frombuffer(numbers, np.uint32)[like] if numbers else np.empty(0, np.uint32)
    if not has_own:
        outputs.extend(groups.names, number_of)
        return outputs
    kinds, outputs = outputs.kinds, Outputs(tensor_outputs.produce)
    for tensor, kind in zip(source.tensors.values(), map(kinds.__getitem__, number_of.tolist()), strict=True):
        tensor_outputs.add_to(outputs, tensor, Selection(kind.type, kind.rule, kind.note))
    return outputs


def check_loads(plan: Plan, program: str | None) -> None:
    """Raises PlanError for a plan of a file that a program (None: any) does not load."""
    if program is None:
        return
    tensors = {name: LoaderTensor(tuple(kind.shape), kind.type) for name, kind in plan.outputs.entries()}
    problems = loader_problems(plan.metadata, tensors, program, len(plan.files))
    if problems:
        raise PlanError(f"{program} would not load {plan.files[0].path}: {'; '.join(problems)}")


def _extra_output(
    source: TensorSource,
    requested: TensorType,
    outputs: Outputs,
    tensor_outputs: TensorOutputs,
    types: LoaderTypes,
) -> Output:
    """A second, smaller output matrix for drafting tokens, as --extra-output-tensor of llama-quantize writes it."""
    name = OUTPUT if OUTPUT in source.tensors else EMBEDDINGS[0]
    tensor = source.tensors.get(name)
    if tensor is None:
        raise PlanError(f"--extra-output-tensor: the model has no {OUTPUT} and no {EMBEDDINGS[0]}")
    selection = Selection(TYPES.fallback_for(requested, tensor.shape, types.fallbacks)[0], "--extra-output-tensor")
    types.check(name, selection.type, selection.rule)
    extra = tensor_outputs.output(tensor, "output_extra.weight", selection)
    full = next(kind for other, kind in outputs.entries() if other == name)
    if extra.nbytes >= full.nbytes:
        raise PlanError(
            f"--extra-output-tensor: as {selection.type.name} it would be no smaller than {name} as {full.type.name}"
        )
    return extra


def _is_quantized(tensor: SourceTensor) -> bool:
    """Whether rounding has gone into the tensor already. The weights of a checkpoint trained in int4, which `stored` can hold
    too, are what they are meant to be: their source type is the checkpoint's."""
    stored = tensor.stored
    return stored is not None and not (stored.is_float or stored.name in INTEGER_TYPES) and tensor.source_type == stored.name


def _check_importance(
    tensor: SourceTensor,
    count: int,
    target: TensorType,
    importance: Importance | None,
    ignore_soft: bool,
    noticed: PlanWarnings,
    file_type_needs_it: bool,
) -> None:
    """For a tensor without importance data: raises PlanError if its type needs them, else notes the tensor, and that as many as
    `count` are like it, for a warning.

    ignore_soft: types that only should have importance do without. file_type_needs_it: the file type asks for importance
    where the tensor type does not.
    """
    need = TYPES.imatrix_need(target) or ("soft" if file_type_needs_it else None)
    exempt = tensor.name in (*EMBEDDINGS, OUTPUT)
    if need == "hard" or (need == "soft" and not ignore_soft and not exempt):
        have = "the imatrix has no entry for it" if importance is not None else "none was given (--imatrix FILE)"
        have += "; imatrix --nextn collects it" if tensor.name.startswith(noticed.draft_layers) else ""
        raise PlanError(f"{tensor.name} is to become {target.name}, which needs importance data, and {have}")
    if importance is not None and not exempt:
        noticed.without_importance[tensor.name] = count


def _metadata(
    source: TensorSource,
    outputs: Outputs,
    default: TensorType | str | None,
    recipe_text: str,
    provenance: Mapping[str, Any],
    hide: bool,
    version: str,
) -> dict[str, Any]:
    metadata = {k: v for k, v in source.metadata.items() if not k.startswith(_OWN_KEYS)}
    metadata["general.quantization_version"] = np.uint32(2)
    metadata["general.file_type"] = np.uint32(_file_type(default, outputs))
    hidden = {k: "top_secret" if isinstance(v, str) else np.int32(0) for k, v in provenance.items()}
    metadata |= hidden if hide else provenance
    if recipe_text:
        metadata["ggufmill.recipe"] = strip_folders(recipe_text)
        hits: Counter[str] = Counter()
        for kind, n in outputs.counts():
            hits[kind.rule] += n
        metadata["ggufmill.rule_hits"] = [f"{count} {rule}" for rule, count in hits.items()]
    if version:
        metadata["ggufmill.version"] = version
    return metadata


def _file_type(default: TensorType | str | None, outputs: Outputs) -> int:
    """The value of general.file_type: of the file type, of the default type, or of the type that takes the most bytes."""
    if isinstance(default, str):
        return file_type_id(default)
    if default is not None and default.ftype is not None:
        return default.ftype
    nbytes: Counter[str] = Counter()
    for kind, n in outputs.counts():
        nbytes[kind.type.name] += kind.nbytes * n
    return TYPES[max(nbytes, key=lambda name: nbytes[name])].ftype or 0


def importance_digest(importance: Importance | None) -> str:
    """A digest of all names and means."""
    digest = hashlib.sha256()
    for name, mean in sorted(importance.means.items()) if importance is not None else ():
        digest.update(name.encode() + mean.tobytes())
    return digest.hexdigest()
