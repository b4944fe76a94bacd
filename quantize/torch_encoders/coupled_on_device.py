"""Which types' rows, encoded together under a curvature, have their codes chosen by a device of torch, and what that takes."""

from __future__ import annotations

METADATA_KEY = "ggufmill.encoder.device"  # the device of torch that chose codes; no key: the program's own solvers
COUPLED_BYTES = 28  # of a weight of rows that are encoded together, on a device: x, values, codes, products, what a step reads


def couples_on_device(type_name: str) -> bool:
    """Whether a device chooses the codes of a plain type's rows whose errors are weighed together: those of single weights."""
    from ..codecs.fields import BlockFields
    from ..covariance.values import is_scalar

    return is_scalar(type_name) and not BlockFields.of(type_name).layout.gray_words
