"""From a source, a recipe and importance data to a plan: which tensor becomes which type, and why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType, dims
from ..formats.plan import Output, Plan, make_plan
from .recipe import Rule, first_match, suspicious
from .transform import producer

# Tensors that llama-quantize never touches (FORMATS E.2): by ending, by part of the name.
_NEVER_ENDING = ("ffn_gate_inp.weight", "position_embd.weight", "token_types.weight")
_NEVER_PART = ("_norm.weight", "ssm_conv1d", "ssm_x.weight", "ssm_dt.weight", "attn_rel_b.weight", "exp_probs_b")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_INTEGERS = ("i8", "i16", "i32", "i64")

# Where importance may come from when a tensor has no entry of its own (FORMATS E.5): (part of the name, what to put there).
_SUBSTITUTES = (
    ("ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    ("ffn_gate_exps.weight", "ffn_gate_up_exps.weight"),
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    ("ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
    ("ffn_gate.weight", "ffn_up.weight"),
    ("attn_v_b.weight", "attn_kv_b.weight"),
    ("attn_kv_b.weight", "attn_v_b.weight"),
)


@dataclass(frozen=True)
class Importance:
    """Mean squared activations: tensor name -> float32 [matrices, columns]; metadata: the quantize.imatrix.* keys to write."""

    means: Mapping[str, np.ndarray]
    metadata: dict[str, Any] = field(default_factory=dict)

    def of(self, tensor: SourceTensor) -> np.ndarray | None:
        """float32 [shape[2] or 1, shape[0]] for a tensor, by its own name or a substitute's; None if there is none.

        Raises PlanError when the entry has another width: it is of another model.
        """
        names = [tensor.name]
        names += [tensor.name.replace(part, other) for part, other in _SUBSTITUTES if tensor.name.endswith(part)]
        columns, _, matrices = dims(tensor.shape)
        for name in names:
            mean = self.means.get(name)
            if mean is None:
                continue
            if mean.shape[1] == columns and mean.shape[0] in (1, matrices):
                return np.ascontiguousarray(np.broadcast_to(mean, (matrices, columns)), np.float32)
            if name == tensor.name and name not in _EMBEDDINGS:
                raise PlanError(
                    f"imatrix entry {name} is {mean.shape[0]} x {mean.shape[1]}, the tensor needs "
                    f"{matrices} x {columns}: this imatrix was made from another model"
                )
        return None


@dataclass(frozen=True)
class Choice:
    """What a tensor is to become: type, the rule that said so, and a note on a fallback."""

    type: TensorType
    rule: str
    note: str = ""


@dataclass
class _Report:
    """What planning noticed; `warnings` are errors under --strict."""

    warnings: list[str] = field(default_factory=list)
    hits: dict[Rule, int] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)
    unimportant: list[str] = field(default_factory=list)


def quantisable(tensor: SourceTensor) -> bool:
    """Whether a rule may change this tensor: a weight matrix that is neither router, norm nor of integers."""
    return (
        tensor.name.endswith("weight")
        and len(tensor.shape) >= 2
        and tensor.source_type not in _INTEGERS
        and not tensor.name.endswith(_NEVER_ENDING)
        and not any(part in tensor.name for part in _NEVER_PART)
    )


def plan_quantize(
    source: TensorSource,
    out: str | Path,
    *,
    type: TensorType | None = None,
    rules: Sequence[Rule] = (),
    recipe_text: str = "",
    importance: Importance | None = None,
    token_embedding_type: TensorType | None = None,
    output_tensor_type: TensorType | None = None,
    pure: bool = False,
    leave_output_tensor: bool = False,
    allow_requantize: bool = False,
    ignore_imatrix_rules: bool = False,
    hide_imatrix: bool = False,
    strict: bool = False,
    nonfinite: list[tuple[str, int]] | None = None,
    override_kv: Mapping[str, Any] | None = None,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    version: str = "",
) -> Plan:
    """The plan of a quantise or convert job; nothing is read from the tensors.

    type         for tensors that no rule takes; None: they keep their type, and fp8 becomes bf16
    recipe_text  recorded in the file's metadata
    rules        count whatever `type` is, a float type too (llama-quantize drops them then, without a word)
    pure         every quantisable tensor becomes `type`, rules are left aside
    strict       every warning is an error
    nonfinite    takes (tensor name, how many) of weights that are NaN or infinite and written as 0; None: these are errors

    Raises PlanError for what cannot or must not be done; its text says what to do instead.
    """
    report = _Report(hits=dict.fromkeys(rules, 0))
    special = {"token_embd.weight": token_embedding_type, "output.weight": output_tensor_type}
    if "output.weight" not in source.tensors:  # tied: the embeddings are the output too
        special["token_embd.weight"] = token_embedding_type or output_tensor_type
        if leave_output_tensor:
            report.warnings.append("the model has no output.weight to leave as it is: its embeddings serve as output too")
    outputs: list[Output] = []
    for tensor in source.tensors.values():
        choice = _choose(tensor, type, () if pure else rules, special, leave_output_tensor, report)
        if _is_quantised(tensor) and choice.type is not tensor.stored and not allow_requantize and not _repacks(tensor, choice):
            raise PlanError(
                f"{tensor.name} is {tensor.source_type} already; quantising it again to {choice.type.name} loses twice: "
                "start from the f16 or bf16 model, or say --allow-requantize"
            )
        weights = importance.of(tensor) if importance is not None and _wants_importance(tensor, choice) else None
        if weights is None and _wants_importance(tensor, choice):
            _check_importance(tensor, choice, importance, ignore_imatrix_rules, report)
        outputs.append(
            Output(
                tensor.name,
                tensor.shape,
                tensor.source_type,
                choice.type,
                choice.rule,
                producer(tensor, choice.type, weights, nonfinite),
                choice.note,
            )
        )
    warnings = _warnings(report, rules, outputs)
    if strict and warnings:
        raise PlanError("--strict: " + "; ".join(warnings))
    metadata = _metadata(source, outputs, type, recipe_text, importance, hide_imatrix, version) | dict(override_kv or {})
    identity = json.dumps([source.identity, version, _digest(importance)])
    return make_plan(
        outputs,
        metadata,
        out,
        identity=identity,
        split_max_size=split_max_size,
        split_max_tensors=split_max_tensors,
        warnings=warnings,
    )


def _choose(
    tensor: SourceTensor,
    default: TensorType | None,
    rules: Sequence[Rule],
    special: Mapping[str, TensorType | None],
    leave_output: bool,
    report: _Report,
) -> Choice:
    """The order of precedence of llama-quantize: flags for embeddings and output, then rules, then the default type."""
    rule = first_match(rules, tensor.name)
    if rule is not None:
        report.hits[rule] += 1
    if not quantisable(tensor):
        if tensor.stored is not None and not tensor.stored.is_float:
            return Choice(tensor.stored, "kept")
        return Choice(TYPES["f32"], "stays f32")
    if leave_output and tensor.name == "output.weight":
        return Choice(_kept_type(tensor), "kept")
    flag = special.get(tensor.name)
    if flag is not None:
        wanted, why = flag, "flag"
    elif rule is not None:
        wanted, why = rule.type, str(rule)
    elif default is not None:
        wanted, why = default, "default"
    else:
        report.uncovered.append(tensor.name)
        return Choice(_kept_type(tensor), "kept")
    note = ""
    if tensor.name in _EMBEDDINGS and wanted.rows > 1:
        plain = TYPES[wanted.base] if wanted.base else TYPES.fallback_for(wanted, (tensor.shape[0], 1))[0]
        note = f"{wanted.name} asked for; embeddings are looked up by row and stay {plain.name}"
        wanted = plain
    try:
        chosen, reason = TYPES.fallback_for(wanted, tensor.shape)
    except PlanError as error:
        raise PlanError(f"{tensor.name}: {error}; give it another type (f16 and bf16 hold any)") from None
    if reason:
        note = f"{wanted.name} asked for; {reason}"
    return Choice(chosen, why, note)


def _kept_type(tensor: SourceTensor) -> TensorType:
    """The type that loses nothing: as stored; fp8 with its scales fits in bf16."""
    return tensor.stored or (TYPES[tensor.source_type] if tensor.source_type in TYPES else TYPES["bf16"])


def _is_quantised(tensor: SourceTensor) -> bool:
    return tensor.stored is not None and not tensor.stored.is_float and tensor.stored.name not in _INTEGERS


def _repacks(tensor: SourceTensor, choice: Choice) -> bool:
    """Whether the change only moves bits: base to its repacked twin or back."""
    stored = tensor.stored
    return stored is not None and (choice.type.base or choice.type.name) == (stored.base or stored.name)


def _wants_importance(tensor: SourceTensor, choice: Choice) -> bool:
    return not choice.type.is_float and choice.type is not tensor.stored and not _repacks(tensor, choice)


def _check_importance(
    tensor: SourceTensor, choice: Choice, importance: Importance | None, ignore: bool, report: _Report
) -> None:
    base = TYPES[choice.type.base] if choice.type.base else choice.type
    need = choice.type.imatrix or base.imatrix
    exempt = tensor.name in (*_EMBEDDINGS, "output.weight")
    if need == "hard" or (need == "soft" and not ignore and not exempt):
        have = "the imatrix has no entry for it" if importance is not None else "none was given (--imatrix FILE)"
        raise PlanError(f"{tensor.name} is to become {choice.type.name}, which needs importance data, and {have}")
    if importance is not None and not exempt:
        report.unimportant.append(tensor.name)


def _warnings(report: _Report, rules: Sequence[Rule], outputs: Sequence[Output]) -> list[str]:
    warnings = [*report.warnings, *suspicious(rules)]
    names = [o.name for o in outputs]
    for rule in rules:
        if report.hits.get(rule):
            continue
        matched = [name for name in names if rule.regex.search(name)]
        if matched:
            taker = next(str(r) for r in rules if r.regex.search(matched[0]))
            warnings.append(f"line {rule.line}: {rule} never applies; {taker} comes first and takes {matched[0]}")
        else:
            warnings.append(f"line {rule.line}: {rule} matches no tensor")
    if report.uncovered:
        warnings.append(f"no rule takes {_some(report.uncovered)}, and no default type was given: they are not quantised")
    if report.unimportant:
        warnings.append(f"the imatrix has no data for {_some(report.unimportant)}: quantised without")
    fallen = [f"{o.name} ({o.type.name})" for o in outputs if o.note]
    if fallen:
        warnings.append(f"another type than asked for: {_some(fallen)}")
    return warnings


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _metadata(
    source: TensorSource,
    outputs: Sequence[Output],
    default: TensorType | None,
    recipe_text: str,
    importance: Importance | None,
    hide: bool,
    version: str,
) -> dict[str, Any]:
    metadata = {k: v for k, v in source.metadata.items() if not k.startswith(("split.", "quantize.imatrix.", "ggufmill."))}
    metadata["general.quantization_version"] = np.uint32(2)
    named = default if default is not None and default.ftype is not None else _dominant(outputs)
    metadata["general.file_type"] = np.uint32(named.ftype or 0)
    if importance is not None:
        hidden = {k: "top_secret" if isinstance(v, str) else np.int32(0) for k, v in importance.metadata.items()}
        metadata |= hidden if hide else importance.metadata
    if recipe_text:
        metadata["ggufmill.recipe"] = recipe_text
    if version:
        metadata["ggufmill.version"] = version
    return metadata


def _dominant(outputs: Sequence[Output]) -> TensorType:
    sizes: dict[str, int] = {}
    for o in outputs:
        sizes[o.type.name] = sizes.get(o.type.name, 0) + o.nbytes
    return TYPES[max(sizes, key=lambda name: sizes[name])]


def _digest(importance: Importance | None) -> str:
    digest = hashlib.sha256()
    for name, mean in sorted(importance.means.items()) if importance is not None else ():
        digest.update(name.encode() + mean.tobytes())
    return digest.hexdigest()
