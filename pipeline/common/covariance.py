"""Opening a file of covariances for a model that is to be quantised with them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...formats import TensorSource
from ...quantize.covariance.covariance_matrix import EFFORTS

if TYPE_CHECKING:
    from ...imatrix.covariance import CovarianceFile
    from ...quantize.covariance.source import Covariances


def load_covariances(path: Path, source: TensorSource, effort: int = 1) -> Covariances:
    """The covariances of a file, which are read when a tensor is encoded that needs them.

    Raises FormatError for a file that holds none, MillError if they are of another model than the source, UsageError for an
    effort that does not exist.
    """
    from ...imatrix.covariance import open_covariance
    from ...quantize.covariance.source import CollectedInput, Covariances, PreparedCache

    if effort not in EFFORTS:
        raise UsageError(f"--effort {effort}: it is one of {', '.join(map(str, EFFORTS))}")
    file = open_covariance(path)
    file.check(source)

    def input_of(name: str) -> CollectedInput | None:
        stored = file.input_of(name)
        return CollectedInput(stored.columns, stored.tokens) if stored is not None else None

    return Covariances(input_of, PreparedCache(file.covariance_of), _digest(file), file.metadata(), effort)


def _digest(file: CovarianceFile) -> str:
    """A digest of a file's data, from the checksums in it."""
    digest = hashlib.sha256()
    for stored in file.inputs.values():
        digest.update("\0".join(stored.tensors).encode() + stored.tokens.tobytes() + stored.checksums.tobytes())
    return digest.hexdigest()
