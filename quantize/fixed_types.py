"""Planning a file whose tensors' types are given one by one, without rules: adapters and projectors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import TYPES, TensorSource, TensorType
from ..jobs.outputs import Output
from ..jobs.plan import Plan, make_plan
from .row_producer import RowProducer


def plan_types(
    source: TensorSource,
    out: str | Path,
    types: Mapping[str, TensorType],
    *,
    file_type: int | None = None,
    rule: str = "",
    override_kv: Mapping[str, Any] | None = None,
    allow_nonfinite: bool = False,
    version: str = "",
) -> Plan:
    """The plan of writing every tensor of a source in the type of its name.

    file_type         general.file_type; None: that of the type that takes the most bytes
    rule              what decided the types, for plans
    allow_nonfinite   as for `plan_quantize`

    A tensor whose rows are no multiple of a type's block becomes f16. Raises PlanError for an output that cannot be planned.
    """
    outputs: list[Output] = []
    replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
    for name, tensor in source.tensors.items():
        chosen, note = types[name], ""
        if tensor.shape[0] % chosen.block:
            chosen, note = TYPES["f16"], f"{chosen.name} asked for; rows of {tensor.shape[0]} are no complete blocks"
        produce = RowProducer(tensor, chosen, replaced=replaced)
        outputs.append(Output(name, tensor.shape, tensor.source_type, chosen, rule, produce, note))
    nbytes: Counter[str] = Counter()
    for output in outputs:
        nbytes[output.type.name] += output.nbytes
    largest = TYPES[max(nbytes, key=lambda name: nbytes[name])].ftype or 0
    metadata = dict(source.metadata) | {"general.quantization_version": np.uint32(2)}
    metadata["general.file_type"] = np.uint32(largest if file_type is None else file_type)
    metadata |= {"ggufmill.version": version} if version else {}
    identity = json.dumps([source.identity, version])
    return make_plan(outputs, metadata | dict(override_kv or {}), out, identity=identity, replaced=replaced)
