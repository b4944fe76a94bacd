"""How much tensors take in their file."""

from __future__ import annotations

from typing import Any

from ...formats import SourceTensor, TensorSource


def tensor_sizes(stored: TensorSource) -> dict[str, Any]:
    """parameters, nbytes and bits_per_weight of all tensors as stored in the file; types: name -> bytes, largest first."""
    types: dict[str, int] = {}
    parameters = 0
    for tensor in stored.tensors.values():
        nbytes = stored_nbytes(tensor)
        types[tensor.source_type] = types.get(tensor.source_type, 0) + nbytes
        parameters += tensor.n_elements
    total = sum(types.values())
    return {
        "parameters": parameters,
        "nbytes": total,
        "bits_per_weight": 8 * total / parameters if parameters else 0.0,
        "types": dict(sorted(types.items(), key=lambda item: -item[1])),
    }


def stored_nbytes(tensor: SourceTensor) -> int:
    """Bytes of a tensor in its file; for types that GGUF does not have, those of bf16."""
    stored = tensor.stored
    return stored.nbytes(tensor.shape) if stored is not None and stored.is_known else 2 * tensor.n_elements
