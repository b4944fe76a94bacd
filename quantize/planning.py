"""From a source, a recipe and importance data to a plan: which tensor becomes which type, and why."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType, dims
from ..jobs.plan import Output, Plan, make_plan
from .recipes.lint import FOR_TERNARY, TERNARY, suspicious
from .recipes.mixes import file_type_id
from .recipes.recipe import Matcher, Rule, without_folders
from .recipes.type_selection import EMBEDDINGS, INTEGERS, OUTPUT, ROUTER, Choice, Chooser, Flags
from .transform import producer

# Where importance may come from when a tensor has no entry of its own (FORMATS E.5): (part of the name, what to put there).
SUBSTITUTES = (
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

    def renamed(self, former: Mapping[str, str]) -> Importance:
        """The same data under the names of a model whose layers have moved; former: new name -> name in this data."""
        return replace(self, means={new: self.means[old] for new, old in former.items() if old in self.means})

    def of(self, tensor: SourceTensor) -> np.ndarray | None:
        """float32 [shape[2] or 1, shape[0]] for a tensor, by its own name or a substitute's; None if there is none.

        Raises PlanError when the entry has another width: it is of another model.
        """
        names = [tensor.name]
        names += [tensor.name.replace(part, other) for part, other in SUBSTITUTES if tensor.name.endswith(part)]
        columns, _, matrices = dims(tensor.shape)
        for name in names:
            mean = self.means.get(name)
            if mean is None:
                continue
            if mean.shape[1] == columns and mean.shape[0] in (1, matrices):
                return np.ascontiguousarray(np.broadcast_to(mean, (matrices, columns)), np.float32)
            if name == tensor.name and name not in EMBEDDINGS:
                raise PlanError(
                    f"imatrix entry {name} is {mean.shape[0]} x {mean.shape[1]}, the tensor needs "
                    f"{matrices} x {columns}: this imatrix was made from another model"
                )
        return None


class Expected(Importance):
    """Stands for an imatrix that is still to be computed: data for all that is collected, taking no memory.

    everywhere: for embeddings and output too, which no collector looks at unless asked.
    """

    everywhere = False

    def of(self, tensor: SourceTensor) -> np.ndarray | None:
        columns, _, matrices = dims(tensor.shape)
        there = self.everywhere or tensor.name.startswith("blk.")
        return np.broadcast_to(np.float32(1), (matrices, columns)) if there else None


class Assumed(Expected):
    """As Expected, for every tensor: to see what a recipe would do, whatever the imatrix."""

    everywhere = True


@dataclass
class _Report:
    """What planning noticed; `warnings` are errors under --strict."""

    warnings: list[str] = field(default_factory=list)
    unimportant: list[str] = field(default_factory=list)


def plan_quantize(
    source: TensorSource,
    out: str | Path,
    *,
    type: TensorType | str | None = None,
    rules: Sequence[Rule] = (),
    recipe_text: str = "",
    importance: Importance | None = None,
    flags: Flags | None = None,
    pure: bool = False,
    allow_requantize: bool = False,
    ignore_imatrix_rules: bool = False,
    hide_imatrix: bool = False,
    strict: bool = False,
    nonfinite: list[tuple[str, int]] | None = None,
    override_kv: Mapping[str, Any] | None = None,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
    keep_split: bool = False,
    version: str = "",
) -> Plan:
    """The plan of a quantise or convert job; nothing is read from the tensors.

    type         for tensors that no rule takes; the name of a file type ('Q4_K_M'): that mix; None: they keep their type, and
                 fp8 becomes bf16
    recipe_text  recorded in the file's metadata, of local paths the names only
    rules        count whatever `type` is, a float type too (llama-quantize drops them then, without a word)
    pure         every quantisable tensor becomes `type`, without mix and rules
    strict       every warning is an error
    keep_split   the same tensors in each file as in the source, which has to be a GGUF in several files
    nonfinite    takes (tensor name, how many) of weights that are NaN or infinite and written as 0; None: these are errors

    Raises PlanError for what cannot or must not be done; its text says what to do instead.
    """
    report, flags = _Report(), flags or Flags()
    if pure and flags.roles:
        raise PlanError(
            "--pure gives every weight the same type: leave it out, or the options that give roles one of their own"
        )
    chooser = Chooser(source, type, rules, flags, importance is not None, pure)
    if flags.leave_output and chooser.tied:
        report.warnings.append("the model has no output.weight to leave as it is: its embeddings serve as output too")
    outputs: list[Output] = []
    for tensor in source.tensors.values():
        choice = chooser.choose(tensor)
        weights = _weights(tensor, choice, importance)
        if _is_quantised(tensor) and choice.type is not tensor.stored and not allow_requantize and not _repacks(tensor, choice):
            raise PlanError(
                f"{tensor.name} is {tensor.source_type} already; quantising it again to {choice.type.name} loses twice: "
                "start from the f16 or bf16 model, or say --allow-requantize"
            )
        if weights is None and _wants_importance(tensor, choice):
            soft = type == "Q2_K_S" and choice.type.name == "q2_K"
            _check_importance(tensor, choice, importance, ignore_imatrix_rules, report, soft)
        outputs.append(_output(tensor, tensor.name, choice, weights, nonfinite))
    if flags.extra_output is not None:
        outputs += _extra_output(source, flags.extra_output, outputs, importance, nonfinite)
    warnings = _warnings(report, chooser, rules, outputs)
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
        tensor_first_split=tensor_first_split,
        shards=source.split() if keep_split else None,
        warnings=warnings,
    )


def _weights(tensor: SourceTensor, choice: Choice, importance: Importance | None) -> np.ndarray | None:
    return importance.of(tensor) if importance is not None and _wants_importance(tensor, choice) else None


def _output(
    tensor: SourceTensor, name: str, choice: Choice, weights: np.ndarray | None, nonfinite: list[tuple[str, int]] | None
) -> Output:
    produce = producer(tensor, choice.type, weights, nonfinite)
    return Output(name, tensor.shape, tensor.source_type, choice.type, choice.rule, produce, choice.note)


def _extra_output(
    source: TensorSource,
    kind: TensorType,
    outputs: Sequence[Output],
    importance: Importance | None,
    nonfinite: list[tuple[str, int]] | None,
) -> list[Output]:
    """A second, smaller output matrix for drafting tokens, as --extra-output-tensor of llama-quantize writes it."""
    name = OUTPUT if OUTPUT in source.tensors else EMBEDDINGS[0]
    tensor = source.tensors.get(name)
    if tensor is None:
        raise PlanError(f"--extra-output-tensor: the model has no {OUTPUT} and no {EMBEDDINGS[0]}")
    choice = Choice(TYPES.fallback_for(kind, tensor.shape)[0], "--extra-output-tensor")
    first = next(o for o in outputs if o.name == name)
    extra = _output(tensor, "output_extra.weight", choice, _weights(tensor, choice, importance), nonfinite)
    if extra.nbytes >= first.nbytes:
        raise PlanError(f"--extra-output-tensor: as {choice.type.name} it would be no smaller than {name} as {first.type.name}")
    return [extra]


def _is_quantised(tensor: SourceTensor) -> bool:
    return tensor.stored is not None and not tensor.stored.is_float and tensor.stored.name not in INTEGERS


def _repacks(tensor: SourceTensor, choice: Choice) -> bool:
    """Whether the change only moves bits: base to its repacked twin or back."""
    stored = tensor.stored
    return stored is not None and (choice.type.base or choice.type.name) == (stored.base or stored.name)


def _wants_importance(tensor: SourceTensor, choice: Choice) -> bool:
    return not choice.type.is_float and choice.type is not tensor.stored and not _repacks(tensor, choice)


def _check_importance(
    tensor: SourceTensor, choice: Choice, importance: Importance | None, ignore: bool, report: _Report, soft: bool
) -> None:
    """soft: the file type asks for importance though the type does not."""
    base = TYPES[choice.type.base] if choice.type.base else choice.type
    need = choice.type.imatrix or base.imatrix or ("soft" if soft else "")
    exempt = tensor.name in (*EMBEDDINGS, OUTPUT)
    if need == "hard" or (need == "soft" and not ignore and not exempt):
        have = "the imatrix has no entry for it" if importance is not None else "none was given (--imatrix FILE)"
        raise PlanError(f"{tensor.name} is to become {choice.type.name}, which needs importance data, and {have}")
    if importance is not None and not exempt:
        report.unimportant.append(tensor.name)


def _warnings(report: _Report, chooser: Chooser, rules: Sequence[Rule], outputs: Sequence[Output]) -> list[str]:
    warnings = [*report.warnings, *suspicious(rules)]
    if isinstance(chooser.default, TensorType) and chooser.default.name in TERNARY:
        warnings.append(f"{chooser.default.name} {FOR_TERNARY}")
    if chooser.pure and rules:
        warnings.append("--pure leaves the rules aside: every weight gets the same type")
    names, matcher = {o.name: None for o in outputs}, Matcher(rules)
    for rule in rules:
        if chooser.hits[rule] or chooser.pure:
            continue
        if rule in chooser.overruled:
            name, why = chooser.overruled[rule]
            what = "stays as it is, norms, routers and the like do" if why in ("kept", "stays f32") else f"follows {why}"
            flag = "; --ffn-gate-inp-type gives routers a type" if name.endswith(ROUTER) else ""
            warnings.append(f"line {rule.line}: {rule} decides nothing; {name} {what}{flag}")
            continue
        matched = rule.matched(names)
        if matched is not None:
            taker = matcher.first(matched)
            warnings.append(f"line {rule.line}: {rule} never applies; {taker} comes first and takes {matched}")
        else:
            warnings.append(f"line {rule.line}: {rule} matches no tensor")
    idle = [role for role in chooser.flags.roles if not chooser.hits[role]]
    warnings += [f"--{role.replace('_', '-')}-type applies to no tensor" for role in idle]
    if chooser.kept:
        warnings.append(f"no rule takes {_some(chooser.kept)}, and no default type was given: they are not quantised")
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
    default: TensorType | str | None,
    recipe_text: str,
    importance: Importance | None,
    hide: bool,
    version: str,
) -> dict[str, Any]:
    metadata = {k: v for k, v in source.metadata.items() if not k.startswith(("split.", "quantize.imatrix.", "ggufmill."))}
    metadata["general.quantization_version"] = np.uint32(2)
    metadata["general.file_type"] = np.uint32(_file_type(default, outputs))
    if importance is not None:
        hidden = {k: "top_secret" if isinstance(v, str) else np.int32(0) for k, v in importance.metadata.items()}
        metadata |= hidden if hide else importance.metadata
    if recipe_text:
        metadata["ggufmill.recipe"] = without_folders(recipe_text)
        hits = Counter(o.rule for o in outputs)
        metadata["ggufmill.rule_hits"] = [f"{count} {rule}" for rule, count in hits.items()]
    if version:
        metadata["ggufmill.version"] = version
    return metadata


def _file_type(default: TensorType | str | None, outputs: Sequence[Output]) -> int:
    if isinstance(default, str):
        return file_type_id(default)
    named = default if default is not None and default.ftype is not None else _dominant(outputs)
    return named.ftype or 0


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
