"""Plans that copy a GGUF model's tensors unchanged: shards merged into one file, or a model cut into shards."""

from __future__ import annotations

from pathlib import Path

from ..errors import PlanError
from ..formats.gguf import GGUFFile
from .plan import Output, Plan, make_plan


def plan_copy(
    file: GGUFFile,
    out: str | Path,
    *,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
) -> Plan:
    """The plan of a copy in one file or, given a limit, in shards (see `make_plan`), even if one shard is enough.

    The metadata are the model's without the split.* keys of its old split. Raises PlanError as `make_plan` does, and for a
    tensor of an unknown type, whose size in bytes cannot be known.
    """
    outputs = []
    for info in file.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        outputs.append(Output(info.name, info.shape, info.type.name, info.type, "kept", info.read))
    return make_plan(
        outputs,
        {key: value for key, value in file.metadata.items() if not key.startswith("split.")},
        out,
        identity=file.identity,
        split_max_size=split_max_size,
        split_max_tensors=split_max_tensors,
        tensor_first_split=tensor_first_split,
        always_split=split_max_size is not None or split_max_tensors is not None,
    )
