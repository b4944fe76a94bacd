"""Rows encoded on a device of torch: which types, which devices, batches of bounded size."""

from __future__ import annotations

from importlib import import_module

import numpy as np

from .memory import in_pieces, one_at_a_time, sent

_MODULES = {
    "kquants": ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
    "iqk": ("iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks"),
    "iq4_kss": ("iq4_kss",),
    "iq2_kl": ("iq2_kl",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
TYPES_ON_DEVICES = frozenset(_MODULE_OF)  # plain types; of repacked ones their base type is encoded
METADATA_KEY = "ggufmill.encoder.device"  # the device that encoded such types; no key: the program's own encoders
COUPLED_BYTES = 28  # of a weight of rows that are encoded together, on a device: x, values, codes, products, what a step reads


def couples_on_device(type_name: str) -> bool:
    """Whether a device chooses the codes of a plain type's rows whose errors are weighed together: those of single weights."""
    from ..codecs.fields import BlockFields
    from ..covariance.values import is_scalar

    return is_scalar(type_name) and not BlockFields.of(type_name).layout.gray_words


_BATCH_WEIGHTS = 1 << 24  # on a device at a time: some 2 GB with all that a search keeps
_SHARE_OF_BATCH = {"iq2_kl": 16, "iq4_kss": 2}  # its search keeps this many times as much for a weight


def encode_on_device(x: np.ndarray, importance: np.ndarray | None, type_name: str, device: str) -> np.ndarray:
    """float32 [rows, n], importance float32 [n], [rows, n] or None -> uint8 [rows, row_bytes], for TYPES_ON_DEVICES.

    The bytes of the codec of the CPU but where sums that are near a tie are rounded otherwise: errors then differ by less than
    1e-4. Where the device's memory does not suffice, fewer rows are encoded at a time; raises MillError when it is too little
    for one.
    """
    import torch

    family = import_module(f".{_MODULE_OF[type_name]}", __package__)

    def encode_rows(first: int, stop: int) -> np.ndarray:
        with one_at_a_time, torch.inference_mode():
            weights = None
            if importance is not None:
                own = importance.ndim == 2 and len(importance) > 1
                weights = sent(importance[first:stop] if own else importance, device)
            return family.encode(sent(x[first:stop], device), weights, type_name).cpu().numpy()

    rows = max(1, _BATCH_WEIGHTS // _SHARE_OF_BATCH.get(type_name, 1) // x.shape[1])
    return in_pieces(encode_rows, len(x), rows, f"encode {type_name}", device)
